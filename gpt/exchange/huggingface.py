"""GPT-2 weights in Hugging Face's layout, the only place where GPT-2's own names for things appear."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt.errors import UserError
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.tokenizer import Tokenizer, gpt2_tokenizer

# Ours on the left. Their linear layers hold the transposed weight (Conv1D), which `_TRANSPOSED` names.
_OUTER = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
_NORM = {"final_norm": "ln_f"}
_BLOCK = {
    "norm1": "ln_1",
    "attention.W_qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}
# What their configuration may vary and ours does not: the default where it says nothing, and what is the same as ours.
_FIXED: dict[str, tuple[object, tuple]] = {
    "model_type": (None, ("gpt2",)),
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _names(num_layers: int) -> dict[str, str]:
    """Our parameter names to theirs."""
    pairs = dict(_NORM)
    for i in range(num_layers):
        pairs |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for ours, theirs in _BLOCK.items()}
    both = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in pairs.items() for kind in ("weight", "bias")}
    return _OUTER | both


def from_huggingface(weights: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Our state dict from that of a GPT2Model or GPT2LMHeadModel."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    if f"h.{num_layers}.ln_1.weight" in weights:
        raise UserError(f"the Hugging Face weights have more than the {num_layers} layers of their configuration")
    state = {}
    for ours, theirs in _names(num_layers).items():
        if theirs not in weights:
            raise UserError(f"the Hugging Face weights lack {theirs!r}: only GPT-2 models can be loaded")
        state[ours] = weights[theirs].T if theirs.endswith(_TRANSPOSED) else weights[theirs]
    return state


def load_directory(folder: Path) -> GPT:
    """The model of a Hugging Face GPT-2 directory (config.json and model.safetensors); `UserError` where it is none."""
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or folder / 'model.safetensors'}: missing; give a GPT-2 directory") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({error})") from None
    try:
        config = _read_config(stored)
        state = from_huggingface(weights, config.num_layers)
        # Copied, as `load_file` maps the file: whoever replaced it would change the weights of a model in use.
        contiguous = torch.contiguous_format
        state = {name: w.to(torch.float32, copy=True, memory_format=contiguous) for name, w in state.items()}
        return GPT.from_state_dict(config, state)
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = f"config.json has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{folder}: not a GPT-2 that can be loaded: {reason}") from None


def is_directory(path: Path) -> bool:
    """Whether a path is meant as a Hugging Face directory."""
    return (path / "config.json").is_file()


def build_model(folder: Path) -> tuple[GPT, Tokenizer]:
    """The model of a directory, with GPT-2's tokenizer; `UserError` where it has another vocabulary."""
    model, tokenizer = load_directory(folder), gpt2_tokenizer()
    if (theirs := model.config.vocab_size) != tokenizer.vocab_size:
        raise UserError(f"{folder}: a vocabulary of {theirs} tokens, and GPT-2's has {tokenizer.vocab_size}")
    return model.eval(), tokenizer


def _read_config(stored: dict) -> GPTConfig:
    """Our configuration from theirs; a variation that our model does not have raises `ValueError`."""
    for key, (default, only) in _FIXED.items():
        if stored.get(key, default) not in only:
            raise ValueError(f"its {key} is {stored.get(key, default)!r}, and only {only[0]!r} is supported")
    if stored.get("n_inner") not in (None, 4 * stored["n_embd"]):
        raise ValueError(f"its n_inner is {stored['n_inner']}, and only 4 n_embd = {4 * stored['n_embd']} is supported")
    return GPTConfig(
        context_length=stored["n_positions"],
        d_model=stored["n_embd"],
        num_layers=stored["n_layer"],
        num_heads=stored["n_head"],
        vocab_size=stored["vocab_size"],
    )
