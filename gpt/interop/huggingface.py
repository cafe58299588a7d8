"""Read and write GPT-2 in Hugging Face's format. GPT-2's own names (`wte`, `c_attn`, ...) appear nowhere else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.data.tokenizer import END_OF_TEXT, Tokenizer, gpt2_tokenizer
from gpt.errors import UserError, is_disk_full, is_out_of_memory, summarize_error
from gpt.files import write_text
from gpt.interop.vocabulary import read_huggingface_tokenizer, to_huggingface_tokenizer

if TYPE_CHECKING:  # torch takes seconds to import, and a folder's tokenizer does not need it
    from torch import Tensor

    from gpt.model.transformer import GPT

# Our names on the left. GPT-2's linear layers (Conv1D) hold the transposed weight: see `_TRANSPOSED`.
_EMBEDDING_NAMES = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
_BLOCK_NAMES = {
    "norm1": "ln_1",
    "attention.W_qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

_CONFIG_KEYS = {
    "context_length": "n_positions",
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
}

# Keys of config.json that our model does not have, with the values that it supports. The first is the default.
_SUPPORTED_VALUES: dict[str, tuple] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True, False),  # with False, the stored head must equal the embedding
}

_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors")  # in one file, or in shards

MAX_UNUSED_ROWS = 1024  # of an embedding beyond the last token: padded vocabularies are multiples of 64 to 1024


def is_huggingface_folder(path: Path) -> bool:
    """Return True if a path looks like a Hugging Face model folder."""
    return (path / "config.json").is_file()


def download_from_hub(name: str) -> Path:
    """Return the folder of a GPT-2 on the Hugging Face hub, downloaded if necessary; `UserError` if that fails."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        hint = "for the hub's models: pip install huggingface_hub"
        raise UserError(f"{name}: neither a path nor a run; {hint}") from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=["config.json", "tokenizer.json", "vocab.json"]))
        _read_config(folder)  # refuses another model before its weights are downloaded
        return Path(snapshot_download(name, revision=folder.name, allow_patterns=[*_WEIGHT_FILES]))
    except UserError:
        raise
    except Exception as error:  # of the hub, the network, proxies and the cache
        if is_disk_full(error):
            raise
        problem = f"the Hugging Face hub does not give such a model ({summarize_error(error)})"
        hint = "check the name, your access and the connection"
        raise UserError(f"{name}: there is no such path or run, and {problem}: {hint}") from None


def load_huggingface(folder: Path) -> tuple["GPT", Tokenizer]:
    """Load the GPT-2 of a folder with its tokenizer; `UserError` if the folder holds anything else."""
    tokenizer, order = load_tokenizer(folder)  # first, because the check is quick
    return load_huggingface_weights(folder, order), tokenizer


def load_tokenizer(folder: Path) -> tuple[Tokenizer, list[int] | None]:
    """Return a folder's tokenizer, or GPT-2's if it has none, and the embedding row of each of our ids.

    Rows without a token of ours, for added tokens or for padding, are left out, so they are never sampled. The order is
    None if the rows need no change. Raises `UserError` for other models than GPT-2. The weights are not read.
    """
    vocab_size: Any = _read_config(folder).get("vocab_size")
    tokenizer, order = read_huggingface_tokenizer(folder) or (gpt2_tokenizer(), None)
    num_rows = 1 + max(order or [tokenizer.end_of_text])
    if vocab_size == num_rows:
        return tokenizer, order
    is_padded = type(vocab_size) is int and num_rows < vocab_size <= num_rows + MAX_UNUSED_ROWS
    if is_padded and (order or vocab_size % 64 == 0):
        return tokenizer, order or list(range(num_rows))
    owner = "its tokenizer" if order else "GPT-2's own tokenizer"
    raise UserError(f"{folder}: its vocab_size is {vocab_size!r:.60}, and {owner} has {num_rows} tokens")


def load_huggingface_weights(folder: Path, order: list[int] | None = None) -> "GPT":
    """Load the model of a folder.

    Args:
        folder: The folder.
        order: The embedding row of each of our ids; None takes all rows as they are.

    Raises `UserError` if it is not a GPT-2 that our model computes exactly.
    """
    import torch
    from safetensors.torch import load_file

    from gpt.checkpoint import build_config, build_model

    stored_config = _read_config(folder)
    files = sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern) if file.is_file())
    if not files:
        old_file = min(folder.glob("pytorch_model*.bin"), default=None)
        if old_file:
            call = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            raise UserError(f"{folder}: its weights are in the older form, {old_file.name}; rewrite them with {call}")
        hint = "give a GPT-2 directory; transformers' save_pretrained rewrites older weights"
        raise UserError(f"{folder / 'model.safetensors'}: missing; {hint}")
    try:
        weights = {name: weight for file in files for name, weight in load_file(file).items()}
        shape = _translate_config(stored_config)
        if order:
            shape["vocab_size"] = len(order)
        config = build_config(shape)
        state = from_huggingface_weights(weights, config.num_layers)
        if not config.qkv_bias:
            _remove_zero_biases(state)
        if order:
            state["token_embedding.weight"] = state["token_embedding.weight"][order]
        model = build_model(config, state)
        for weight in model.parameters():  # `load_file` maps the file: replacing it would change a model in use
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)
        return model
    except Exception as error:  # safetensors and torch fail on foreign files in many ways
        if is_out_of_memory(error):
            raise
        reason = f"config.json has no {error}" if isinstance(error, KeyError) else summarize_error(error)
        raise UserError(f"{folder}: not a GPT-2 that can be loaded: {reason}") from None


def _remove_zero_biases(state: dict[str, "Tensor"]) -> None:
    """Remove the biases of queries, keys and values from a state dict; `ValueError` unless they are zero."""
    for name in [name for name in state if name.endswith("W_qkv.bias")]:
        if state.pop(name).any():
            raise ValueError("its qkv_bias is false, and it has such biases")


def write_huggingface(model: "GPT", tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer into an empty folder, for `transformers`; `UserError` on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    model.config.require_gpt2("an export")
    for name, content in _make_configs(model, tokenizer).items():
        write_text(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")
    write_text(folder / "tokenizer.json", to_huggingface_tokenizer(tokenizer).to_str())
    file = folder / "model.safetensors"
    try:
        save_file(to_huggingface_weights(model), file, {"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{folder}: the weights cannot be written ({error})") from None
    file.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it readable for its owner only


def set_activation_function(folder: Path, name: str) -> None:
    """Change the activation function in a folder's config.json."""
    config = _read_config(folder) | {"activation_function": name}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _make_configs(model: "GPT", tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the contents of the folder's JSON files but for the tokenizer, by the names of the files."""
    shape, context_length = model.config, model.config.context_length
    end_ids = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    config: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    config |= {key: values[0] for key, values in _SUPPORTED_VALUES.items()}
    config |= end_ids | {"n_inner": None, "n_ctx": context_length}
    config |= {key: getattr(shape, name) for name, key in _CONFIG_KEYS.items()}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout)
    if not shape.qkv_bias:
        config["qkv_bias"] = False  # only our own code reads it: `transformers` gets biases of zero
    # Without max_length, `pipeline` would generate 256 tokens. A small model has fewer positions.
    generation: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_length": context_length}
    generation |= end_ids | {"pad_token_id": tokenizer.end_of_text}
    # The class GPT2Tokenizer has no ignore_merges, so it would give some words other tokens.
    tokenization: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenization |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "model_max_length": context_length}
    return {"config": config, "generation_config": generation, "tokenizer_config": tokenization}


def from_huggingface_weights(weights: dict[str, "Tensor"], num_layers: int) -> dict[str, "Tensor"]:
    """Convert the state dict of a GPT2Model or GPT2LMHeadModel to ours."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    if f"h.{num_layers}.ln_1.weight" in weights:
        raise UserError(f"the Hugging Face weights have more than the {num_layers} layers of their configuration")
    state = {}
    for name, gpt2_name in parameter_names(num_layers):
        if gpt2_name not in weights:
            raise UserError(f"the Hugging Face weights lack {gpt2_name!r}: only GPT-2 models can be loaded")
        weight = weights[gpt2_name]
        state[name] = weight.t() if gpt2_name.endswith(_TRANSPOSED) else weight
    head, embedding = weights.get("lm_head.weight"), weights["wte.weight"]
    if head is not None and (head.dtype != embedding.dtype or not head.equal(embedding)):
        raise UserError("the Hugging Face weights have an lm_head.weight other than wte.weight; it must be the same")
    return state


def to_huggingface_weights(model: "GPT") -> dict[str, "Tensor"]:
    """Convert a model's weights to the state dict of a GPT2LMHeadModel, without its tied head."""
    return {
        f"transformer.{name}": weight.t().contiguous() if name.endswith(_TRANSPOSED) else weight
        for name, weight in named_weights(model)
    }


def named_weights(model: "GPT") -> Iterator[tuple[str, "Tensor"]]:
    """Yield a model's weights with their names in a GPT2Model. Biases that `qkv_bias` leaves out are zero."""
    state = model.state_dict()
    for name, gpt2_name in parameter_names(model.config.num_layers):
        zero_bias = model.final_norm.bias.new_zeros(3 * model.config.d_model)
        yield gpt2_name, state.get(name, zero_bias)


def parameter_names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield each of our parameter names with its name in a GPT2Model."""
    yield from _EMBEDDING_NAMES.items()
    for i in range(num_layers):
        for layer, gpt2_layer in _BLOCK_NAMES.items():
            for parameter in ("weight", "bias"):
                yield f"blocks.{i}.{layer}.{parameter}", f"h.{i}.{gpt2_layer}.{parameter}"
    for parameter in ("weight", "bias"):
        yield f"final_norm.{parameter}", f"ln_f.{parameter}"


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; `UserError` if it is not the configuration of a GPT-2."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({summarize_error(error)})") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "gpt2":
        raise UserError(f"{folder}: its model_type is {model_type!r:.60}, and only 'gpt2' is supported")
    return config


def _translate_config(config: dict) -> dict[str, Any]:
    """Translate Hugging Face's configuration to ours; `ValueError` for a variant that our model does not have."""
    for key, supported in _SUPPORTED_VALUES.items():
        if config.get(key, supported[0]) not in supported:
            raise ValueError(f"its {key} is {config[key]!r}, and only {supported[0]!r} is supported")
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError(f"its n_inner is {config['n_inner']}, and only 4 n_embd = {4 * config['n_embd']} is supported")
    return {name: config[key] for name, key in _CONFIG_KEYS.items()} | {"qkv_bias": config.get("qkv_bias", True)}
