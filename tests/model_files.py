"""Small models with random weights, their checkpoints, a prepared corpus, and a disk that is too small."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from gpt import checkpoint
from gpt.data.dataset_cache import write_checked_json
from gpt.data.tokenizer import Tokenizer, byte_tokenizer
from gpt.model.transformer import GPT, GPTConfig, ModelConfig

SHAPE = ModelConfig(context_length=13, d_model=14, num_layers=2, num_heads=7)


def small_model(shape: ModelConfig = SHAPE, tokenizer: Tokenizer | None = None, seed: int = 3, scale: float = 0) -> GPT:
    """Return a model with noise of standard deviation `scale` on all its initial weights, biases and gains."""
    torch.manual_seed(seed)
    vocab_size = (tokenizer or byte_tokenizer()).vocab_size
    model = GPT(GPTConfig(**asdict(shape), vocab_size=vocab_size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def make_checkpoint(model: GPT, tokenizer: Tokenizer | None = None, **record: object) -> dict:
    """Return a checkpoint of a model with the keys that every checkpoint has, and `record`."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    shape = {key: value for key, value in asdict(model.config).items() if key != "vocab_size"}
    parts = {"config": {"model": shape}, "tokenizer": (tokenizer or byte_tokenizer()).to_dict()}
    return {"format": checkpoint.CHECKPOINT_FORMAT, "state_dict": weights} | parts | record


def make_trained_checkpoint(shape: ModelConfig = SHAPE, seed: int = 3) -> dict:
    """Return a checkpoint with the keys that training saves, after one step of an optimizer."""
    model = small_model(shape, seed=seed)
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(11, 7)}, 1: {"momentum": torch.randn(5)}}
    groups = [{"lr": 0.003, "betas": (0.9, 0.95), "params": [0, 1]}]
    optimizer = {"state": state, "param_groups": groups}
    return make_checkpoint(model, optimizer=optimizer, step=11, git_commit=None, prompts=["2 3 5", "é"])


class Bomb:
    """An object whose pickle is a call that creates a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def write_run(folder: Path, *args, tokenizer: Tokenizer | None = None, record: dict | None = None, **options) -> GPT:
    """Write a run directory whose best checkpoint is `small_model(*args, tokenizer, **options)`; return the model."""
    model = small_model(*args, tokenizer=tokenizer, **options)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save_checkpoint(make_checkpoint(model, tokenizer, **(record or {})), folder / "checkpoints/best.ckpt")
    return model


def write_prepared_corpus(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    train: Sequence[int] = range(103),
    validation: Sequence[int] = range(31),
    **changes: object,
) -> Path:
    """Write a prepared corpus in the simplest way: the ids of each split, and dataset.json about them."""
    tokenizer, splits = tokenizer or byte_tokenizer(), {}
    folder.mkdir(parents=True)
    for name, ids in (("train", train), ("validation", validation)):
        content = np.array(ids, "uint16" if tokenizer.vocab_size <= 65_536 else "uint32").tobytes()
        (folder / f"{name}.bin").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        counts = {"tokens": len(ids), "bytes": len(ids), "documents": 1}
        splits[name] = counts | {"files": [[f"{name}.bin", len(ids), digest]]}
    metadata = {"key": {"tokenizer": {}}, "tokenizer": tokenizer.sha256, "splits": splits}
    write_checked_json(folder / "dataset.json", metadata | changes)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let no file grow beyond a number of bytes, as if the disk were full."""
    import resource  # which Windows lacks

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
