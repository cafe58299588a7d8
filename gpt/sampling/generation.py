"""Sampling token ids from a model: filters on the logits, and decoding with a key-value cache.

Letters in shapes: B rows (texts sampled together), T tokens, V vocabulary, N likeliest tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.errors import UserError, require_range
from gpt.hardware.device import without_cudnn_attention
from gpt.model.transformer import GPT

NON_FINITE_LOGITS = "the model's logits are not finite, so it is damaged: use another checkpoint"
TOP_P_PREFILTER = 1024  # likeliest tokens that top-p tries before it sorts the whole vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the next token. Filters apply in the order of the fields; 0 (1 for top_p) switches one off."""

    repetition_penalty: float = 1.0  # divides the logits of earlier tokens, or multiplies them where negative
    temperature: float = 0.8  # divides all logits; 0 takes the likeliest token
    top_k: int = 0  # keep the k likeliest tokens
    top_p: float = 0.95  # keep the fewest likeliest tokens that together reach this probability
    min_p: float = 0.0  # keep tokens at least this many times as likely as the likeliest

    def __post_init__(self) -> None:
        require_range("repetition-penalty", self.repetition_penalty, 0.01, 100, note="(1 is off)")
        if self.temperature != 0.0:
            require_range("temperature", self.temperature, 1e-6, 100, note="(or 0: the likeliest token)")
        require_range("top-k", self.top_k, 0, note="(0 is off)")
        require_range("top-p", self.top_p, 1e-30, 1, note="(1 is off)")
        require_range("min-p", self.min_p, 0, 1, note="(0 is off)")


def filter_logits(logits: Tensor, previous: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply the repetition penalty, temperature and filters to logits (B, V); excluded tokens become -inf.

    `previous` (B, T) holds the tokens so far. The likeliest token always stays. The temperature must be above 0.
    Penalty: Keskar et al. 2019 (CTRL); top-k: Fan et al. 2018; top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
    """
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        repeated = logits.gather(1, previous)  # (B, T)
        logits = logits.scatter(1, previous, torch.where(repeated > 0, repeated / penalty, repeated * penalty))
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        # Sorting 50,257 logits takes 3.5 ms on a CPU. A few of the likeliest are nearly always enough.
        likeliest, order = logits.topk(min(TOP_P_PREFILTER, logits.shape[-1]))  # each (B, N)
        probability = (likeliest - logits.logsumexp(-1, keepdim=True)).exp()
        if (probability.sum(-1) < sampling.top_p).any():
            likeliest, order = logits.sort(descending=True)  # N = V
            probability = likeliest.softmax(-1)
        preceding = probability.cumsum(-1) - probability  # the likeliest token has none before it, so it stays
        likeliest = likeliest.masked_fill(preceding >= sampling.top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(1, order, likeliest)
    if sampling.min_p > 0.0:
        probability = logits.softmax(-1)
        threshold = sampling.min_p * probability.amax(-1, keepdim=True)
        logits = logits.masked_fill(probability < threshold, -torch.inf)
    return logits


def next_token(logits: Tensor, previous: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> Tensor:
    """Draw a token (B,) for each row of logits (B, V), after the tokens `previous` (B, T)."""
    logits = logits.float()
    if sampling.temperature == 0.0:
        greedy = SamplingParams(sampling.repetition_penalty, temperature=1.0, top_p=1.0)
        return filter_logits(logits, previous, greedy).argmax(-1)
    probability = filter_logits(logits, previous, sampling).softmax(-1)
    # Drawing from 50,257 tokens takes 1.1 ms on a CPU. Drawing from those that the filters left takes a tenth of that.
    num_candidates = max(1, int((probability > 0).sum(-1).max()))
    candidates, order = probability.topk(num_candidates)  # each (B, N)
    try:
        return order.gather(1, torch.multinomial(candidates, 1, generator=generator)).squeeze(1)
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise UserError(NON_FINITE_LOGITS) from None


def window_start(length: int, context_length: int, slide: int = 1) -> int:
    """Return the index of the first of `length` tokens that the model sees. A full window moves by `slide` tokens."""
    excess = max(0, length - context_length)
    return -(-excess // slide) * slide


def left_pad(prompts: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Pad prompts at the left to one tensor (B, T). Return it with the number of padding tokens in each row.

    A row is padded with its own first token, so the repetition penalty meets no token that the prompt lacks.
    """
    longest = max(map(len, prompts))
    pad_lengths = [longest - len(ids) for ids in prompts]
    rows = [ids[:1] * pad + ids for ids, pad in zip(prompts, pad_lengths, strict=True)]
    return torch.tensor(rows), pad_lengths


@torch.inference_mode()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    sampling: SamplingParams,
    generator: torch.Generator | None = None,
    slide: int = 1,
    pad_lengths: list[int] | None = None,
    on_logits: Callable[[Tensor], object] | None = None,
) -> Iterator[Tensor]:
    """Continue the tokens idx (B, T), T at least 1: yield the next token (B,) of every row, `max_new_tokens` times.

    Each new token costs one pass over that token only, because the cache holds the keys and values of earlier ones.
    Past the context length, the window slides. Positions are learned, so the embedding of every token in it changes,
    and the cache is rebuilt, every `slide` tokens.

    Args:
        model: The model. It is set to evaluation mode.
        idx: Token ids (B, T).
        max_new_tokens: How many tokens to yield.
        sampling: How to draw a token.
        generator: Random numbers, on the device of `idx`; by default PyTorch's own.
        slide: How many of the oldest tokens a full window drops at once. 1 keeps the most context.
        pad_lengths: How many tokens at the left of each row are padding, from `left_pad`. Each row continues as if
            it were alone.
        on_logits: A function to call with the logits (B, V) of every step, before the filters.
    """
    model.eval()
    T, context = idx.shape[1], model.config.context_length
    if T < 1:
        raise ValueError("generation needs at least one token to start from: begin with end-of-text")
    require_range("slide", slide, 1, context, note="(the model's context)")
    tokens = torch.cat([idx, idx.new_zeros(idx.shape[0], max_new_tokens)], dim=1)
    pad_lengths = pad_lengths or [0]
    window_starts: list[int] = []  # the first token that each row sees
    for length in range(T, T + max_new_tokens):
        new_starts = [pad + window_start(length - pad, context, slide) for pad in pad_lengths]
        if new_starts != window_starts:
            window_starts = new_starts
            caches = model.init_kv_caches()  # they hold the tokens from min(window_starts) to `cached_until`
            cached_until = min(window_starts)
            offsets = [start - cached_until for start in window_starts]
            cache_starts = torch.tensor(offsets, device=idx.device) if any(offsets) else None  # (B,)
        with without_cudnn_attention():
            hidden = model.forward_features(tokens[:, cached_until:length], caches, cache_starts)  # (B, new, C)
        cached_until = length
        logits = model.head(hidden[:, -1])  # (B, V)
        if on_logits is not None:
            on_logits(logits)
        tokens[:, length] = next_token(logits, tokens[:, :length], sampling, generator)
        yield tokens[:, length]
