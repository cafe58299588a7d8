"""What a person looks at while a model learns: its text, how much of that is copied, and where it attends."""

from pathlib import Path

import torch
from lightning import Trainer

from gpt.hardware import arithmetic
from gpt.sampling.generation import Sampling, TextStream, generate
from gpt.sampling.scoring import Score
from gpt.text.overlap import find_copies
from gpt.text.pieces import label
from gpt.text.shards import Corpora
from gpt.training.attention_picture import attention_picture, to_png
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback

SAMPLE_TOKENS = 80
ATTENTION_TOKENS = 24  # as many as have room for labels


class Samples(StepCallback):
    """Continues the fixed prompts after each validation, with the same seed, so that only the model differs.

    `samples/longest_copy` is the length, in characters, of the longest passage that stands in the training text.
    """

    def __init__(self, run_dir: Path, curves: Curves):
        self._file, self._curves = run_dir / "samples.md", curves
        self.latest: list[str] = []  # of the last validation, each with its prompt in brackets

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if not trainer.is_global_zero:
            return
        generator = torch.Generator(module.device).manual_seed(module.config.seed)
        stance = torch.compiler.set_stance("force_eager")  # compiling for lengths that vary does not pay
        with stance, arithmetic(module.config.trainer.device, deterministic=False):  # top-p has no such kernel on CUDA
            prompts = module.config.data.prompts or []
            streams = [self._continue(module, prompt, generator) for prompt in prompts]
        module.model.train()
        continued = [(prompt, one.text) for prompt, one in zip(prompts, streams, strict=True)]
        self.latest = [f"[{prompt}]{text}" if prompt else text for prompt, text in continued]
        text = "\n\n---\n\n".join(f"**{prompt}**{text}" if prompt else text for prompt, text in continued)
        copied = longest_copy([one.tokens for one in streams], module.corpora) if streams else ""
        if streams:
            self._curves.write({"samples/longest_copy": len(copied)}, step)
        if copied:
            text += f"\n\n---\n\nlongest passage from the training text ({len(copied)} characters): {copied!r}"
        if self._curves.writer is not None:
            self._curves.writer.add_text("samples", text, step)
        with self._file.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(f"## Step {step}\n\n{text}\n\n")

    def _continue(self, module: GPTModule, prompt: str, generator: torch.Generator) -> TextStream:
        tokenizer = module.corpora.tokenizer
        ids = (tokenizer.encode(prompt) or [tokenizer.end_of_text])[-module.config.model.context_length :]
        out = TextStream(tokenizer)
        idx = torch.tensor([ids], device=module.device)
        for token in generate(module.model, idx, SAMPLE_TOKENS, Sampling(), generator):
            out.feed(int(token))
            if out.finish_reason:
                break
        out.finish()
        return out


def longest_copy(samples: list[list[int]], corpora: Corpora) -> str:
    """The longest passage of the samples, of eight tokens or more, that stands in the training text; else empty."""
    border = corpora.tokenizer.vocab_size  # a token that no corpus has
    return find_copies([token for sample in samples for token in (*sample, border)], corpora.sources)[1]


class AttentionMaps(StepCallback):
    """Draws each layer's attention after each validation, always on the first tokens of the validation text."""

    def __init__(self, curves: Curves):
        self._curves = curves

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if self._curves.writer is None:
            return
        tokenizer, text = module.corpora.tokenizer, module.corpora.sources[0].validation
        ids = text[: min(ATTENTION_TOKENS, module.config.model.context_length, len(text))].tolist()
        model = module.model.eval()
        with torch.compiler.set_stance("force_eager"):
            maps = model.attention_maps(torch.tensor([ids], device=module.device))[0].float().cpu()  # (L, H, T, T)
        model.train()
        labels = [label(tokenizer.decode_bytes([i])) for i in ids]
        for layer, heads in enumerate(maps, start=1):
            picture = attention_picture(heads.numpy(), labels)
            self._curves.write_picture(f"weights/attention/layer_{layer}", picture.size, to_png(picture), step)
