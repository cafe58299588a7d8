"""A look at the model after each validation: samples, and what every head attends to."""

import re

import numpy as np
import torch

from gpt.data.chunking import token_label
from gpt.data.overlap import find_copies
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import Tokenizer
from gpt.hardware.device import numerics
from gpt.sampling.generation import SamplingParams
from gpt.sampling.language_model import Completion, LanguageModel
from gpt.sampling.pictures import draw_attention
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import GPTModule
from gpt.training.run_directory import SAMPLES_FILE, RunDirectory
from gpt.training.state import RunSpec

SAMPLE_TOKENS = 80
PICTURED_TOKENS, PICTURED_HEADS = 32, 300  # tokens of a picture, and times the heads of a layer


class SampleWriter:
    """Continues the fixed prompts after each validation, with the same seed, so that only the model differs.

    `val_samples/longest_copy` is the length, in characters, of the longest passage that stands in the training text.
    TensorBoard also gets a picture of what all heads attend to, always on the first tokens of the validation text.
    """

    def __init__(self, spec: RunSpec, run: RunDirectory, curves: MetricLogger):
        self._dataset, self._run, self._curves = spec.dataset, run, curves

    def write(self, module: GPTModule, step: int) -> tuple[list[str], int]:
        """Sample the model after a validation.

        Returns:
            The samples, each with its prompt in brackets, and the characters of the longest passage in them that
            occurs in the training text.
        """
        generator = torch.Generator(module.device).manual_seed(module.config.seed)
        prompts = module.config.data.prompts or []
        with numerics(module.config.trainer.device, deterministic=False):  # top-p has no such kernel on CUDA
            streams = [continue_prompt(module, self._dataset.tokenizer, prompt, generator) for prompt in prompts]
        module.model.train()
        texts = [one.text for one in streams]
        parts = [f"[{prompt}]{text}" if prompt else text for prompt, text in zip(prompts, texts, strict=True)]
        samples, copied = parts.copy(), ""
        if streams:
            copied = longest_copy([one.tokens for one in streams], self._dataset)
            self._curves.record({"longest_copy": len(copied)}, step)
            if copied:
                parts.append(f"longest passage from the training text ({len(copied)} characters): {copied!r}")
        longest_run = max(map(len, re.findall("`+", "".join(parts))), default=0)
        fence = "`" * max(3, longest_run + 1)  # of a Markdown code block, which shows text as it is
        text = "\n\n---\n\n".join(f"{fence}\n{part}\n{fence}" for part in parts)
        with (self._run.path / SAMPLES_FILE).open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(f"## Step {step}\n\n{text}\n\n")
        if (writer := self._curves.writer) is not None:
            writer.add_text("samples", text, step)
            writer.add_image("weights/attention", self._draw_attention(module), step, dataformats="HWC")
        return samples, len(copied)

    def _draw_attention(self, module: GPTModule) -> np.ndarray:
        text = self._dataset.sources[0].validation
        shape = module.config.model
        most = min(PICTURED_TOKENS, max(8, PICTURED_HEADS // shape.num_heads), shape.context_length)
        ids = text[:most].tolist()
        model = module.model.eval()
        with torch.compiler.set_stance("force_eager"):
            maps = model.attention_maps(torch.tensor([ids], device=module.device))[0].float().cpu()
        model.train()
        tokens = [token_label(self._dataset.tokenizer.decode_bytes([i])) for i in ids]
        return np.asarray(draw_attention(maps.numpy(), tokens, f"the first {len(ids)} tokens of the validation text"))


def continue_prompt(module: GPTModule, tokenizer: Tokenizer, prompt: str, generator: torch.Generator) -> Completion:
    """Continue a prompt by at most `SAMPLE_TOKENS` tokens."""
    model = LanguageModel(module.model, tokenizer)
    ids = model.tokenizer.encode(prompt)
    with torch.compiler.set_stance("force_eager"):  # compiling for lengths that vary does not pay
        *_, (text,) = model.generate_batch([ids], SAMPLE_TOKENS, SamplingParams(), generator)
    return text


def longest_copy(samples: list[list[int]], text: TokenDataset) -> str:
    """The longest passage of the samples, of eight tokens or more, that stands in the training text; else empty."""
    border = text.tokenizer.vocab_size  # a token that no corpus has
    ids = [token for sample in samples for token in (*sample, border)]
    passages = find_copies(ids, text.sources)
    start, end = max(passages, key=lambda passage: passage[1] - passage[0], default=(0, 0))
    return text.tokenizer.decode(ids[start:end])
