"""Small models whose weights are random and large, and runs with them."""

from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.checkpoint import save_checkpoint
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from model_files import make_checkpoint

EOT = 256  # the byte tokenizer's end-of-text
CONTEXT = 17  # of the model in a run
SHAPE = ModelConfig(CONTEXT, d_model=22, num_layers=2, num_heads=2)


def make_model(config: GPTConfig, std: float = 0.3, seed: int = 17, unit_embeddings: bool = True) -> GPT:
    """Return a model with normal weights around 0, or around 1 in the norms.

    With `unit_embeddings` all token embeddings have length 1, so that greedy text varies.
    """
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else 0.0
            parameter.normal_(mean, std, generator=generator)
        if unit_embeddings:
            model.token_embedding.weight.copy_(F.normalize(model.token_embedding.weight))
    return model.eval()


def make_initial_model(config: GPTConfig, scale: float = 1.0, seed: int = 5) -> GPT:
    """Return a model with its initial weights, and matrices `scale` times as large."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() == 2 else 1.0)
    return model


def make_idx(vocab_size: int, B: int, T: int) -> Tensor:
    """Return the same token ids (B, T) in every call."""
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(T))


def make_writer() -> GPT:
    """Return a byte model that never ends a text: its first dimension gives end-of-text a low logit."""
    model = make_model(GPTConfig(**asdict(SHAPE), vocab_size=257), seed=3)
    with torch.no_grad():
        embedding = model.token_embedding.weight
        embedding[:, 0] = 0.0
        embedding[EOT] = 0.0
        embedding[EOT, 0] = -1.0
        model.final_norm.bias[0] = 31.0
    return model


def write_run(run: Path, model: GPT) -> Path:
    """Write a run directory with the model as its best checkpoint, and return the directory."""
    run.mkdir(parents=True)
    save_checkpoint(make_checkpoint(model), run / "checkpoints" / "best.ckpt")
    return run
