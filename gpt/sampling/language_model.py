"""A model with its tokenizer: text in, text out, and how likely each token was."""

import codecs
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt.data.chunking import token_label
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError, require_range
from gpt.hardware.device import without_cudnn_attention
from gpt.model.transformer import GPT
from gpt.sampling.generation import NON_FINITE_LOGITS, SamplingParams, generate, left_pad

if TYPE_CHECKING:
    from PIL.Image import Image

    from gpt.sampling.insight import Page

MIN_HEAD_PX = 320  # of the picture of a head


@dataclass(frozen=True)
class TokenLogprob:
    """A token's bytes, the natural logarithm of its probability, and the tokens that were likeliest in its place.

    The probability is the model's own: before temperature, filters and repetition penalty.
    """

    token: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class Completion:
    """A text that grows by tokens. It shows only whole characters, and nothing from a stop string on."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()):
        if "" in stops:
            raise UserError("stop='' would end the text before it begins: give at least one character")
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # decoded text that may be the start of a stop string
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of the tokens, if the caller wants them
        self.finish_reason: str | None = None  # end_of_text, stop or length; None while the text grows

    def feed(self, token: int) -> None:
        """Add a token, and set `finish_reason` if it ends the text."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self.finish("end_of_text")
        else:
            self._add(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def finish(self, reason: str = "length") -> None:
        """End the text, unless a stop string already ended it. Pending characters become part of it."""
        self._add(self._decoder.decode(b"", final=True))
        if self.finish_reason is None:
            self.finish_reason = reason
            self.text += self._pending

    def _add(self, new_text: str) -> None:
        text = self._pending + new_text
        stop_positions = [position for position in map(text.find, self._stops) if position >= 0]
        if stop_positions:
            self.finish_reason = "stop"
            end = min(stop_positions)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text += text[:end]
        self._pending = text[end:]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may be the start of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(repr=False)
class LanguageModel:
    """A model on its device, with its tokenizer.

    An empty prompt starts a new document. If a prompt is longer than the model's context, the model sees its end.
    """

    model: GPT
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        config = self.model.config
        shape = f"{config.num_parameters:,} parameters, a context of {config.context_length:,} tokens"
        return f"{type(self).__name__}({shape}, tokenizer {self.tokenizer.name}, on {self.device})"

    def generate(self, prompt: str = "", max_new_tokens: int = 300, **options: Any) -> str:
        """Continue a prompt and return the new text. The options are the same as for `stream`."""
        return "".join(self.stream(prompt, max_new_tokens, **options))

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = 300,
        *,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        min_p: float = SamplingParams.min_p,
        repetition_penalty: float = SamplingParams.repetition_penalty,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """Continue a prompt and yield the new text in pieces. It ends before the first of the texts in `stop`.

        The same seed gives the same text. Without a seed, each call differs.
        """
        if not isinstance(prompt, str):
            raise UserError(f"the prompt is of type {type(prompt).__name__}: give one text, and call again for another")
        sampling = SamplingParams(repetition_penalty, temperature, top_k, top_p, min_p)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        generator = torch.Generator(self.device).manual_seed(secrets.randbits(31) if seed is None else seed)
        ids = self.tokenizer.encode(prompt)
        length = 0
        for (completion,) in self.generate_batch([ids], max_new_tokens, sampling, generator, stops=stops):
            if len(completion.text) > length:
                yield completion.text[length:]
            length = len(completion.text)

    def generate_batch(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        generator: torch.Generator,
        slide: int = 1,
        stops: tuple[str, ...] = (),
        top_logprobs: int | None = None,
    ) -> Iterator[list[Completion]]:
        """Continue several prompts at once: yield the same list of completions after each token, and at the end.

        Args:
            prompts: The token ids of each prompt.
            max_new_tokens: The greatest length of a completion.
            sampling: How to draw a token.
            generator: Random numbers, on the model's device.
            slide: How many of the oldest tokens to drop whenever the context is full.
            stops: Texts that end a completion.
            top_logprobs: If given, fill `logprobs` of each completion, with this many of the likeliest tokens.
        """
        require_range("max_new_tokens", max_new_tokens, 1)
        context = self.model.config.context_length
        idx, pad_lengths = left_pad([ids[-context:] or [self.tokenizer.end_of_text] for ids in prompts])
        completions = [Completion(self.tokenizer, stops) for _ in prompts]
        logits: list[Tensor] = []  # of the latest step alone
        steps = generate(
            self.model, idx.to(self.device), max_new_tokens, sampling, generator, slide, pad_lengths, logits.append
        )
        for tokens in steps:
            latest = logits.pop()
            for row, (completion, token) in enumerate(zip(completions, tokens.tolist(), strict=True)):
                if completion.finish_reason is None:
                    completion.feed(token)
                    if top_logprobs is not None:
                        completion.logprobs += self._logprobs(latest[row : row + 1], [token], top_logprobs)
            if all(completion.finish_reason for completion in completions):
                break
            yield completions
        for completion in completions:
            if completion.finish_reason is None:
                completion.finish()
        yield completions

    @torch.inference_mode()
    @without_cudnn_attention()
    def logprobs(self, text: str, top: int = 0) -> list[TokenLogprob]:
        """Return how likely each token of a text is, with the `top` likeliest in its place. The text begins a document.

        In a text longer than the model's context, every token sees at least half a context before it.
        """
        self.model.eval()
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text)]
        context = self.model.config.context_length
        result: list[TokenLogprob] = []
        while len(result) < len(ids) - 1:
            start = max(0, len(result) - context // 2)
            end = min(start + context, len(ids) - 1)
            idx = torch.tensor([ids[start:end]], device=self.device)
            hidden = self.model.forward_features(idx)[0, len(result) - start :]
            result += self._logprobs(self.model.head(hidden), ids[len(result) + 1 : end + 1], top)
        return result

    def insight(self, prompt: str = "", max_new_tokens: int = 60, seed: int | None = None, **sampling: Any) -> "Page":
        """Continue a prompt, and show why the model chose each token. `sampling` takes the same options as `stream`."""
        from gpt.sampling.insight import Page, insight_page

        params = SamplingParams(**sampling)
        ids = self.tokenizer.encode(prompt)
        seed = secrets.randbits(31) if seed is None else seed
        generator = torch.Generator(self.device).manual_seed(seed)
        *_, (completion,) = self.generate_batch([ids], max_new_tokens, params, generator)
        metadata = {"seed": seed, **vars(params)}
        return Page(insight_page(self.model, self.tokenizer, ids, completion.tokens, params, metadata))

    @torch.inference_mode()
    def attention(self, text: str) -> "Image":
        """Draw the attention of all heads on a text: a row of heads for each layer."""
        from gpt.sampling.pictures import draw_attention

        ids = self.tokenizer.encode(text)[-self.model.config.context_length :] or [self.tokenizer.end_of_text]
        maps = self.model.eval().attention_maps(torch.tensor([ids], device=self.device))[0].float().cpu().numpy()
        tokens = [token_label(self.tokenizer.decode_bytes([i])) for i in ids]
        cell = max(4, min(24, MIN_HEAD_PX // len(ids)))
        return draw_attention(maps, tokens, f"{len(ids)} tokens of a text", cell)

    @property
    def device(self) -> torch.device:
        return self.model.token_embedding.weight.device

    def _logprobs(self, logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Return the log-probabilities of T tokens and of the `top` likeliest, from logits (T, V) that predict them."""
        logprobs = logits.float().log_softmax(-1)
        likeliest = logprobs.topk(min(top, logprobs.shape[-1]))  # each (T, top)
        chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        if any(map(math.isnan, chosen)):
            raise UserError(NON_FINITE_LOGITS)
        decode = self.tokenizer.decode_bytes
        result = []
        rows = zip(tokens, chosen, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        for token, logprob, top_ids, top_values in rows:
            top_tokens = [TokenLogprob(decode([i]), value) for i, value in zip(top_ids, top_values, strict=True)]
            result.append(TokenLogprob(decode([token]), logprob, tuple(top_tokens)))
        return result
