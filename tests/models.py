"""Small models with random weights, their checkpoints and runs, a prepared corpus, and a disk that is too small."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt import checkpoint
from gpt.data.dataset_cache import write_checked_json
from gpt.data.tokenizer import Tokenizer, byte_tokenizer
from gpt.model.transformer import GPT, GPTConfig, ModelConfig

EOT = 256  # the byte tokenizer's end-of-text
SHAPE = ModelConfig(context_length=13, d_model=14, num_layers=2, num_heads=7)
WRITER_SHAPE = ModelConfig(context_length=17, d_model=22, num_layers=2, num_heads=2)


def random_model(config: GPTConfig, std: float = 0.3, seed: int = 17, unit_embeddings: bool = True) -> GPT:
    """Return a model with normal weights around 0, or around 1 in the norms.

    With `unit_embeddings` all token embeddings have length 1, so that greedy text varies.
    """
    model = GPT(config)
    randomize(model, std, seed)
    if unit_embeddings:
        with torch.no_grad():
            model.token_embedding.weight.copy_(F.normalize(model.token_embedding.weight))
    return model.eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, std: float, seed: int) -> None:
    """Draw all parameters of a model, ours or one of `transformers`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_gain = name.endswith("weight") and parameter.dim() == 1
        parameter.normal_(1.0 if is_gain else 0.0, std, generator=generator)


def small_model(shape: ModelConfig = SHAPE, tokenizer: Tokenizer | None = None, seed: int = 3, std: float = 0.3) -> GPT:
    """Return a random model of a shape, for a tokenizer."""
    vocab_size = (tokenizer or byte_tokenizer()).vocab_size
    return random_model(GPTConfig(**asdict(shape), vocab_size=vocab_size), std, seed)


def gpt2_twin(config: GPTConfig, std: float = 0.2, seed: int = 17, model_class: str = "GPT2LMHeadModel") -> Any:
    """Return a random model of `transformers` with the shape of one of ours."""
    import transformers  # which takes seconds

    shape = {"vocab_size": config.vocab_size, "n_positions": config.context_length, "n_embd": config.d_model}
    shape |= {"n_layer": config.num_layers, "n_head": config.num_heads, "bos_token_id": 0, "eos_token_id": 0}
    gpt2_config = transformers.GPT2Config(**shape, attn_implementation="eager")
    model = getattr(transformers, model_class)(gpt2_config).eval()
    randomize(model, std, seed)
    return model


def make_idx(vocab_size: int, B: int, T: int) -> Tensor:
    """Return the same token ids (B, T) in every call."""
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(T))


def make_writer() -> GPT:
    """Return a byte model that never ends a text: its first dimension gives end-of-text a low logit."""
    model = small_model(WRITER_SHAPE)
    with torch.no_grad():
        embedding = model.token_embedding.weight
        embedding[:, 0] = 0.0
        embedding[EOT] = 0.0
        embedding[EOT, 0] = -1.0
        model.final_norm.bias[0] = 31.0
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


def write_run(run: Path, model: GPT, tokenizer: Tokenizer | None = None) -> Path:
    """Write a run directory with the model as its best checkpoint, and return the directory."""
    run.mkdir(parents=True)
    checkpoint.save_checkpoint(make_checkpoint(model, tokenizer), run / "checkpoints/best.ckpt")
    return run


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
