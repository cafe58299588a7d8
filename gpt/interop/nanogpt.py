"""Read a checkpoint of nanoGPT's train.py, `ckpt.pt`.

nanoGPT names the weights as GPT-2 does, and stores linear layers as PyTorch does, (out, in). Its GELU is the exact
form. Our model computes GPT-2's own form with tanh.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.data.tokenizer import Tokenizer, gpt2_tokenizer
from gpt.errors import UserError, is_out_of_memory, summarize_error
from gpt.interop.huggingface import MAX_UNUSED_ROWS, parameter_names

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

    from gpt.model.transformer import GPT

NANOGPT_CHECKPOINT = "ckpt.pt"  # in the folder that nanoGPT calls out_dir
_CONFIG_KEYS = {"context_length": "block_size", "d_model": "n_embd", "num_layers": "n_layer", "num_heads": "n_head"}
_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks


def is_nanogpt(checkpoint: Any) -> bool:
    """Return True if what a file holds has the keys of nanoGPT's checkpoints."""
    return isinstance(checkpoint, dict) and {"model", "model_args"} <= checkpoint.keys()


def restore_nanogpt(checkpoint: dict[str, Any], path: Path) -> tuple["GPT", Tokenizer]:
    """Build the model of a checkpoint, and return it with GPT-2's tokenizer.

    Raises `UserError` with `path` if the model has another vocabulary, or is no GPT-2.
    """
    from gpt.checkpoint import build_config, build_model

    tokenizer = gpt2_tokenizer()
    try:
        model_args = checkpoint["model_args"]
        _require_gpt2_vocabulary(model_args["vocab_size"])
        shape = {name: model_args[key] for name, key in _CONFIG_KEYS.items()}
        config = build_config(shape | {"vocab_size": tokenizer.vocab_size})
        state = from_nanogpt_weights(checkpoint["model"], config.num_layers)
        state["token_embedding.weight"] = state["token_embedding.weight"][: tokenizer.vocab_size]
        return build_model(config, state), tokenizer
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path}: not a nanoGPT that can be loaded: {summarize_error(error)}") from None


def describe_gelu(path: Path) -> str:
    """Return the line about what is computed otherwise than in nanoGPT."""
    difference = "with the exact GELU; here GELU is GPT-2's tanh form, and losses differ by less than 0.001"
    return f"{path} is a checkpoint of nanoGPT, {difference}"


def from_nanogpt_weights(weights: dict[str, "Tensor"], num_layers: int) -> dict[str, "Tensor"]:
    """Convert the state dict of nanoGPT's GPT to ours. Biases that `bias=False` leaves out are zero.

    Raises `ValueError` if a weight is missing, or if our model has no place for one.
    """
    for prefix in ("_orig_mod.", "transformer."):  # torch.compile adds the first
        weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    weights = {name: weight for name, weight in weights.items() if not name.endswith(_BUFFERS)}
    head = weights.pop("lm_head.weight", None)
    if head is not None and not head.equal(weights["wte.weight"]):
        raise ValueError("its lm_head.weight is another than its wte.weight; it must be the same")
    state: dict[str, Tensor] = {}
    for name, gpt2_name in parameter_names(num_layers):
        is_bias = gpt2_name.endswith("bias")
        if is_bias and gpt2_name not in weights:
            weight = state[name.removesuffix("bias") + "weight"]
            state[name] = weight.new_zeros(len(weight))
        else:
            state[name] = weights.pop(gpt2_name)
    if weights:
        raise ValueError(f"it has {next(iter(weights))!r:.100}, which is no weight of a GPT-2 of {num_layers} layers")
    return state


def _require_gpt2_vocabulary(vocab_size: Any) -> None:
    """Raise `ValueError` unless a vocabulary has the size of GPT-2's, or is padded to a multiple of 64."""
    num_tokens = gpt2_tokenizer().vocab_size
    is_padded = type(vocab_size) is int and num_tokens < vocab_size <= num_tokens + MAX_UNUSED_ROWS
    if vocab_size != num_tokens and not (is_padded and vocab_size % 64 == 0):
        problem = f"its vocab_size is {vocab_size!r:.60}, and GPT-2's tokenizer has {num_tokens:,} tokens"
        hint = "the vocabulary of a meta.pkl cannot be read: train on its text again, with tokenizer=byte"
        raise ValueError(f"{problem}; {hint}")
