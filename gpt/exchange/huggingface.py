"""GPT-2 in Hugging Face's format; GPT-2's own names (`wte`, `c_attn`, ...) appear nowhere else."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.errors import UserError
from gpt.text.tokenizer import Tokenizer, gpt2_tokenizer

if TYPE_CHECKING:  # torch takes seconds to import, and a directory's tokenizer does not need it
    from torch import Tensor

    from gpt.model.transformer import GPT

# Our names on the left. Their linear layers (Conv1D) hold the transposed weight: see `_TRANSPOSED`.
_EMBEDDINGS = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
_FINAL_NORM = {"final_norm": "ln_f"}
_BLOCK = {
    "norm1": "ln_1",
    "attention.W_qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

_SHAPE = {
    "context_length": "n_positions",
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
}
LARGEST_CONFIG = 1_000_000  # bytes of config.json

# What their configuration may vary and ours does not: the default if a key is absent, and the values that we support.
_FIXED: dict[str, tuple[object, tuple]] = {
    "model_type": (None, ("gpt2",)),
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}


def is_directory(path: Path) -> bool:
    """Tell whether a path looks like a Hugging Face model directory."""
    return (path / "config.json").is_file()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return GPT-2's tokenizer for a directory of a GPT-2, whose weights are not read; `UserError` for other models."""
    stored, tokenizer = _stored_config(folder), gpt2_tokenizer()
    kind, vocab_size = stored.get("model_type"), stored.get("vocab_size")
    if (kind, vocab_size) != ("gpt2", tokenizer.vocab_size):
        raise UserError(
            f"{folder}: its model_type is {kind!r} and its vocab_size {vocab_size}; "
            f"only 'gpt2' with GPT-2's vocabulary of {tokenizer.vocab_size} tokens is supported"
        )
    return tokenizer


def load_model(folder: Path) -> tuple["GPT", Tokenizer]:
    """Load the GPT-2 of a directory, with GPT-2's tokenizer; `UserError` if it is anything else."""
    tokenizer = load_tokenizer(folder)  # first: checking it takes no time
    return load_directory(folder), tokenizer


def load_directory(folder: Path) -> "GPT":
    """Load the model of a directory (config.json and model.safetensors), whatever its vocabulary.

    Raises `UserError` if it is not a GPT-2 that our model computes exactly.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from gpt.exchange.assembly import assemble, configure, reason
    from gpt.hardware import is_out_of_memory

    stored, file = _stored_config(folder), folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{file}: missing; give a GPT-2 directory")
    try:
        weights = load_file(file)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({reason(error)})") from None
    try:
        config = configure(_shape(stored))
        # Copied, because `load_file` maps the file: replacing it would change the weights of a model in use.
        return assemble(config, from_huggingface(weights, config.num_layers), copy=True)
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        why = f"config.json has no {error}" if isinstance(error, KeyError) else reason(error)
        raise UserError(f"{folder}: not a GPT-2 that can be loaded: {why}") from None


def from_huggingface(weights: dict[str, "Tensor"], num_layers: int) -> dict[str, "Tensor"]:
    """Convert the state dict of a GPT2Model or GPT2LMHeadModel to ours."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    if f"h.{num_layers}.ln_1.weight" in weights:
        raise UserError(f"the Hugging Face weights have more than the {num_layers} layers of their configuration")
    state = {}
    for ours, theirs in _names(num_layers):
        if theirs not in weights:
            raise UserError(f"the Hugging Face weights lack {theirs!r}: only GPT-2 models can be loaded")
        state[ours] = weights[theirs].t() if theirs.endswith(_TRANSPOSED) else weights[theirs]
    return state


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield each of our parameter names with theirs."""
    yield from _EMBEDDINGS.items()
    blocks = ((f"blocks.{i}.{ours}", f"h.{i}.{theirs}") for i in range(num_layers) for ours, theirs in _BLOCK.items())
    for ours, theirs in itertools.chain(_FINAL_NORM.items(), blocks):
        yield from ((f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias"))


def _stored_config(folder: Path) -> dict:
    """Read config.json, in which a key given twice is an error."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("config.json has a key twice")
        return found

    try:
        with (folder / "config.json").open("rb") as stream:
            content = stream.read(LARGEST_CONFIG + 1)
        if len(content) > LARGEST_CONFIG:
            raise ValueError(f"config.json has more than {LARGEST_CONFIG:,} bytes")
        stored = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise UserError(f"{folder / 'config.json'}: missing; give a GPT-2 directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({error})") from None
    if not isinstance(stored, dict):
        raise UserError(f"{folder}: cannot be read as a Hugging Face model (config.json is not a JSON object)")
    return stored


def _shape(stored: dict) -> dict[str, Any]:
    """Translate their configuration to ours; `ValueError` for a variation that our model does not have."""
    for key, (default, supported) in _FIXED.items():
        if stored.get(key, default) not in supported:
            raise ValueError(f"its {key} is {stored.get(key, default)!r}, and only {supported[0]!r} is supported")
    if stored.get("n_inner") not in (None, 4 * stored["n_embd"]):
        raise ValueError(f"its n_inner is {stored['n_inner']}, and only 4 n_embd = {4 * stored['n_embd']} is supported")
    return {ours: stored[theirs] for ours, theirs in _SHAPE.items()}
