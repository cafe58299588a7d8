"""Samples and a picture of the attention weights, after each validation."""

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
# The limits of a picture of attention weights.
MAX_PICTURE_TOKENS = 32
MAX_PICTURE_HEAD_TOKENS = 300  # tokens times heads of a layer


def write_samples(
    spec: RunSpec, run: RunDirectory, module: GPTModule, logger: MetricLogger, step: int
) -> tuple[list[str], int]:
    """Write completions of the run's prompts to samples.md and TensorBoard, always with the same seed.

    The curve `val_samples/longest_copy` is the length in characters of the longest passage that they copy from the
    training text. TensorBoard also shows the attention weights of all heads on the first tokens of the validation text.

    Returns:
        The samples, each with its prompt in brackets, and the length of the longest copy.
    """
    generator = torch.Generator(module.device).manual_seed(module.config.seed)
    prompts = module.config.data.prompts or []
    with numerics(module.config.trainer.device, deterministic=False):  # top-p has no deterministic kernel on CUDA
        completions = [continue_prompt(module, spec.dataset.tokenizer, prompt, generator) for prompt in prompts]
    module.model.train()
    samples = [
        f"[{prompt}]{completion.text}" if prompt else completion.text
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    parts = samples.copy()
    copied_text = ""
    if completions:
        copied_text = longest_copy([completion.tokens for completion in completions], spec.dataset)
        logger.write_metrics({"longest_copy": len(copied_text)}, step)
    if copied_text:
        parts.append(f"longest passage from the training text ({len(copied_text)} characters): {copied_text!r}")
    longest_run = max(map(len, re.findall("`+", "".join(parts))), default=0)
    fence = "`" * max(3, longest_run + 1)  # of a Markdown code block
    text = "\n\n---\n\n".join(f"{fence}\n{part}\n{fence}" for part in parts)
    with (run.path / SAMPLES_FILE).open("a", encoding="utf-8", newline="\n") as stream:
        stream.write(f"## Step {step}\n\n{text}\n\n")
    if logger.writer is not None:
        logger.writer.add_text("samples", text, step)
        logger.writer.add_image("weights/attention", _draw_attention(spec.dataset, module), step, dataformats="HWC")
    return samples, len(copied_text)


def _draw_attention(dataset: TokenDataset, module: GPTModule) -> np.ndarray:
    config = module.config.model
    num_tokens = min(MAX_PICTURE_TOKENS, max(8, MAX_PICTURE_HEAD_TOKENS // config.num_heads), config.context_length)
    ids = dataset.sources[0].validation[:num_tokens].tolist()
    model = module.model.eval()
    with torch.compiler.set_stance("force_eager"):
        maps = model.attention_maps(torch.tensor([ids], device=module.device))[0].float().cpu()
    model.train()
    tokens = [token_label(dataset.tokenizer.decode_bytes([i])) for i in ids]
    return np.asarray(draw_attention(maps.numpy(), tokens, f"the first {len(ids)} tokens of the validation text"))


def continue_prompt(module: GPTModule, tokenizer: Tokenizer, prompt: str, generator: torch.Generator) -> Completion:
    """Return a completion of at most `SAMPLE_TOKENS` tokens."""
    model = LanguageModel(module.model, tokenizer)
    ids = model.tokenizer.encode(prompt)
    with torch.compiler.set_stance("force_eager"):  # compiling for each length takes too long
        *_, (completion,) = model.generate_batch([ids], SAMPLE_TOKENS, SamplingParams(), generator)
    return completion


def longest_copy(samples: list[list[int]], dataset: TokenDataset) -> str:
    """Return the longest passage of eight or more tokens that occurs in the samples and the training text, or ''."""
    separator = dataset.tokenizer.vocab_size  # no corpus contains this id
    ids = [token for sample in samples for token in (*sample, separator)]
    passages = find_copies(ids, dataset.sources)
    start, end = max(passages, key=lambda passage: passage[1] - passage[0], default=(0, 0))
    return dataset.tokenizer.decode(ids[start:end])
