"""A model with its tokenizer: text in, text out, and how likely each token was."""

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.errors import UserError
from gpt.hardware import DAMAGED, free_memory
from gpt.model.transformer import GPT
from gpt.sampling.generation import Sampling, TextStream, align, generate
from gpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """A token's bytes, the natural logarithm of its probability, and the tokens that were likeliest in its place.

    The probability is the model's own: before temperature, filters and repetition penalty.
    """

    token: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class Continuation(TextStream):
    """A text as it grows, with the log-probabilities of its tokens if they were asked for."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]):
        super().__init__(tokenizer, stops)
        self.logprobs: list[TokenLogprob] = []


@dataclass
class LanguageModel:
    """A model on its device, with its tokenizer. `generate` and `stream` start a new document if the prompt is empty.

    Of a prompt longer than the model's context, the model sees the end.
    """

    model: GPT
    tokenizer: Tokenizer

    def generate(self, prompt: str = "", max_new_tokens: int = 300, **options: Any) -> str:
        """Continue a prompt; return the new text. The options are those of `stream`."""
        return "".join(self.stream(prompt, max_new_tokens, **options))

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = 300,
        *,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Continue a prompt; yield the new text in pieces, which end before the first of the texts in `stop`.

        `sampling` takes the fields of `Sampling`: temperature, top_k, top_p, min_p, repetition_penalty. The same seed
        gives the same text; without a seed, each call differs.
        """
        generator = torch.Generator(self.device).manual_seed(secrets.randbits(31) if seed is None else seed)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UserError("stop='' would end the text before it begins: give at least one character")
        ids, printed = self.tokenizer.encode(prompt), 0
        for (text,) in self.continue_texts([ids], max_new_tokens, Sampling(**sampling), generator, stops=stops):
            if piece := text.text[printed:]:
                yield piece
            printed = len(text.text)

    def continue_texts(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        slide: int = 1,
        stops: tuple[str, ...] = (),
        top_logprobs: int | None = None,
    ) -> Iterator[list[Continuation]]:
        """Continue several prompts, given as token ids, at once: yield all texts after each token, and at the end.

        Every step yields the same list. `top_logprobs` fills the texts' `logprobs`, with that many likeliest tokens
        each. `UserError` if the texts do not fit into memory.
        """
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens} is out of range: it must be at least 1")
        context = self.model.config.context_length
        idx, padding = align([ids[-context:] or [self.tokenizer.end_of_text] for ids in prompts])
        listed = 0 if top_logprobs is None else 1 + top_logprobs
        self._require_memory(len(prompts), idx.shape[1] + max_new_tokens, listed)
        texts = [Continuation(self.tokenizer, stops) for _ in prompts]
        drawn_from: list[Tensor] = []
        watch = None if top_logprobs is None else drawn_from.append
        for tokens in generate(
            self.model, idx.to(self.device), max_new_tokens, sampling, generator, True, slide, padding, watch
        ):
            logits = drawn_from.pop() if drawn_from else None
            for row, (text, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
                if text.finish_reason is None:
                    text.feed(token)
                    if logits is not None and top_logprobs is not None:
                        text.logprobs += self._logprobs(logits[row : row + 1], [token], top_logprobs)
            if all(text.finish_reason for text in texts):
                break
            yield texts
        for text in texts:
            if text.finish_reason is None:
                text.finish()
        yield texts

    @torch.inference_mode()
    def logprobs(self, text: str, top: int = 0) -> list[TokenLogprob]:
        """How likely each token of a text is, with the `top` likeliest in its place. The text begins a document.

        In a text longer than the model's context, every token sees at least half a context before it.
        """
        self.model.eval()
        ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(text)]
        context, found = self.model.config.context_length, list[TokenLogprob]()
        while (done := len(found)) < len(ids) - 1:
            start = max(0, done - context // 2)
            seen = ids[start : min(start + context, len(ids) - 1)]
            hidden = self.model.hidden(torch.tensor([seen], device=self.device))[0, done - start :]
            found += self._logprobs(self.model.head(hidden), ids[done + 1 : start + len(seen) + 1], top)
        return found

    @property
    def device(self) -> torch.device:
        return self.model.token_embedding.weight.device

    def _logprobs(self, logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
        """What logits (T, V) say about the T tokens that follow."""
        logprobs = logits.float().log_softmax(-1)
        values, ids = (found.tolist() for found in logprobs.topk(min(top, logprobs.shape[-1])))  # T lists of `top`
        own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        if any(map(math.isnan, own)):
            raise UserError(DAMAGED)

        def named(token: int, logprob: float, top: Iterable[TokenLogprob] = ()) -> TokenLogprob:
            return TokenLogprob(self.tokenizer.decode_bytes([token]), logprob, tuple(top))

        return [
            named(token, logprob, map(named, likeliest, theirs))
            for token, logprob, likeliest, theirs in zip(tokens, own, ids, values, strict=True)
        ]

    def _require_memory(self, rows: int, length: int, listed: int) -> None:
        """Raise `UserError` if texts of that many tokens, with `listed` log-probabilities each, do not fit."""
        config = self.model.config
        seen = min(length, config.context_length)
        # A row takes 100 bytes for a token as a number and as text, 500 for each log-probability until it is printed,
        # its keys and values, the activations of a layer, and its logits ten times over while they are filtered.
        row = (100 + 500 * listed) * length + 40 * config.vocab_size
        row += 4 * seen * config.d_model * (2 * config.num_layers + 8)
        if (needs := rows * row) > (free := free_memory(self.device)):
            raise UserError(
                f"{rows:,} texts of up to {length:,} tokens need about {needs / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free: ask for fewer texts or fewer new tokens"
            )
