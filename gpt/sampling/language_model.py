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
from gpt.model.transformer import GPT
from gpt.sampling.generation import DAMAGED, SamplingParams, generate, left_pad

if TYPE_CHECKING:
    from PIL.Image import Image

    from gpt.sampling.insight import Page

PICTURE = 320  # pixels that the picture of a head has at least


@dataclass(frozen=True)
class TokenLogprob:
    """A token's bytes, the natural logarithm of its probability, and the tokens that were likeliest in its place.

    The probability is the model's own: before temperature, filters and repetition penalty.
    """

    token: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class Completion:
    """A text that grows by tokens: only whole characters of it, and nothing from a stop string on."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()):
        if "" in stops:
            raise UserError("stop='' would end the text before it begins: give at least one character")
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded text that may be the start of a stop string
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of the tokens, if they were asked for
        self.finish_reason: str | None = None  # end_of_text, stop or length; None while the text goes on

    def feed(self, token: int) -> None:
        """Add one token; sets `finish_reason` if it ends the text."""
        self.tokens.append(token)
        if token == self._tokenizer.end_of_text:
            self.finish("end_of_text")
        else:
            self._add(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def finish(self, reason: str = "length") -> None:
        """End the text with what was held back, unless a stop string already ends it."""
        self._add(self._decoder.decode(b"", final=True))
        if self.finish_reason is None:
            self.finish_reason = reason
            self.text += self._held

    def _add(self, piece: str) -> None:
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.finish_reason, end = "stop", min(found)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self.text += text[:end]
        self._held = text[end:]


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of the text that may be the start of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(repr=False)
class LanguageModel:
    """A model on its device, with its tokenizer. `generate` and `stream` start a new document if the prompt is empty.

    Of a prompt longer than the model's context, the model sees the end.
    """

    model: GPT
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        config = self.model.config
        shape = f"{config.num_parameters:,} parameters, a context of {config.context_length:,} tokens"
        return f"{type(self).__name__}({shape}, tokenizer {self.tokenizer.name}, on {self.device})"

    def generate(self, prompt: str = "", max_new_tokens: int = 300, **options: Any) -> str:
        """Continue a prompt, with the options of `stream`; return the new text."""
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
        """Continue a prompt; yield the new text in pieces. It ends before the first of the texts in `stop`.

        The same seed gives the same text; without a seed, each call differs.
        """
        if not isinstance(prompt, str):
            raise UserError(f"the prompt is of type {type(prompt).__name__}: give one text, and call again for another")
        sampling = SamplingParams(repetition_penalty, temperature, top_k, top_p, min_p)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        generator = torch.Generator(self.device).manual_seed(secrets.randbits(31) if seed is None else seed)
        ids, printed = self.tokenizer.encode(prompt), 0
        for (text,) in self.generate_batch([ids], max_new_tokens, sampling, generator, stops=stops):
            if piece := text.text[printed:]:
                yield piece
            printed = len(text.text)

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
        """Continue several prompts, given as token ids, at once: yield all texts after each token, and at the end.

        Every step yields the same list. `top_logprobs` fills the texts' `logprobs`, with that many likeliest tokens
        each.
        """
        require_range("max_new_tokens", max_new_tokens, 1)
        context = self.model.config.context_length
        idx, padding = left_pad([ids[-context:] or [self.tokenizer.end_of_text] for ids in prompts])
        texts = [Completion(self.tokenizer, stops) for _ in prompts]
        logits: list[Tensor] = []  # of the latest token alone
        arguments = (max_new_tokens, sampling, generator, slide, padding, logits.append)
        for tokens in generate(self.model, idx.to(self.device), *arguments):
            latest = logits.pop()
            for row, (text, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
                if text.finish_reason is None:
                    text.feed(token)
                    if top_logprobs is not None:
                        text.logprobs += self._logprobs(latest[row : row + 1], [token], top_logprobs)
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

    def insight(self, prompt: str = "", max_new_tokens: int = 60, seed: int | None = None, **sampling: Any) -> "Page":
        """Continue a prompt, and show why the model chose each token; `sampling` as the options of `stream`."""
        from gpt.sampling.insight import Page, insight_page

        settings = SamplingParams(**sampling)
        ids = self.tokenizer.encode(prompt)
        seed = secrets.randbits(31) if seed is None else seed
        generator = torch.Generator(self.device).manual_seed(seed)
        *_, (text,) = self.generate_batch([ids], max_new_tokens, settings, generator)
        facts = {"seed": seed, **vars(settings)}
        return Page(insight_page(self.model, self.tokenizer, ids, text.tokens, settings, facts))

    @torch.inference_mode()
    def attention(self, text: str) -> "Image":
        """Draw what all heads attend to in a text of at least one token: a row of heads for each layer."""
        from gpt.sampling.pictures import draw_attention

        ids = self.tokenizer.encode(text)[-self.model.config.context_length :] or [self.tokenizer.end_of_text]
        maps = self.model.eval().attention_maps(torch.tensor([ids], device=self.device))[0].float().cpu().numpy()
        tokens = [token_label(self.tokenizer.decode_bytes([i])) for i in ids]
        return draw_attention(maps, tokens, f"{len(ids)} tokens of a text", max(4, min(24, PICTURE // len(ids))))

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

        def named(token: int, logprob: float, *top: TokenLogprob) -> TokenLogprob:
            return TokenLogprob(self.tokenizer.decode_bytes([token]), logprob, top)

        rows = zip(tokens, own, ids, values, strict=True)
        return [named(token, logprob, *map(named, likeliest, theirs)) for token, logprob, likeliest, theirs in rows]
