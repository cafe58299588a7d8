"""GPT-2 in Hugging Face's format; GPT-2's own names (`wte`, `c_attn`, ...) appear nowhere else."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.data.tokenizer import END_OF_TEXT, Tokenizer, gpt2_tokenizer
from gpt.errors import UserError, is_disk_full, is_out_of_memory, summarize_error
from gpt.files import write_text
from gpt.interop import vocabulary

if TYPE_CHECKING:  # torch takes seconds to import, and a directory's tokenizer does not need it
    from torch import Tensor

    from gpt.model.transformer import GPT

# Our names on the left. Their linear layers (Conv1D) hold the transposed weight: see `_TRANSPOSED`.
_EMBEDDINGS = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight"}
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

# What their configuration may vary and ours does not: the values that we support, of which the first is the default.
_FIXED: dict[str, tuple] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True, False),  # False only where the stored head is the embedding all the same
}

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")  # in one file, or in shards

MAX_UNUSED_ROWS = 1 << 10  # rows of an embedding beyond the last token: padded vocabularies are multiples of 64 to 1024


def is_huggingface_folder(path: Path) -> bool:
    """Tell whether a path looks like a Hugging Face model directory."""
    return (path / "config.json").is_file()


def download_from_hub(name: str) -> Path:
    """Download a GPT-2 from the Hugging Face hub, or find it downloaded; `UserError` if that is not possible."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        hint = "for the hub's models: pip install huggingface_hub"
        raise UserError(f"{name}: neither a path nor a run; {hint}") from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=["config.json", "tokenizer.json", "vocab.json"]))
        _stored_config(folder)  # of another model, no weights are downloaded
        return Path(snapshot_download(name, revision=folder.name, allow_patterns=[*_WEIGHTS]))
    except UserError:
        raise
    except Exception as error:  # of the hub, the network, proxies and the cache
        if is_disk_full(error):
            raise
        hub = f"the Hugging Face hub does not give such a model ({summarize_error(error)})"
        hint = "check the name, your access and the connection"
        raise UserError(f"{name}: there is no such path or run, and {hub}: {hint}") from None


def load_huggingface(folder: Path) -> tuple["GPT", Tokenizer]:
    """Load the GPT-2 of a directory with its tokenizer; `UserError` if it is anything else."""
    tokenizer, order = load_tokenizer(folder)  # first: checking it takes no time
    return load_huggingface_weights(folder, order), tokenizer


def load_tokenizer(folder: Path) -> tuple[Tokenizer, list[int] | None]:
    """Return a directory's tokenizer, GPT-2's if it has none, and the row in its embedding of each of our ids.

    Rows beyond these, of added tokens or to fill up the matrix, are left out, so no text has them and none is sampled.
    Raises `UserError` for other models than GPT-2. The weights are not read.
    """
    size = _stored_config(folder).get("vocab_size")
    tokenizer, order = vocabulary.read(folder) or (gpt2_tokenizer(), None)
    needed = 1 + max(order or [tokenizer.end_of_text])
    is_filled_up = type(size) is int and needed < size <= needed + MAX_UNUSED_ROWS and (order or size % 64 == 0)
    if size != needed and not is_filled_up:
        whose = "GPT-2's own tokenizer" if order is None else "its tokenizer"
        raise UserError(f"{folder}: its vocab_size is {size!r:.60}, and {whose} has {needed} tokens")
    return tokenizer, order or (list(range(needed)) if is_filled_up else None)


def load_huggingface_weights(folder: Path, order: list[int] | None = None) -> "GPT":
    """Load the model of a directory, whatever its vocabulary; `order` names the row of its embedding for each token.

    Raises `UserError` if it is not a GPT-2 that our model computes exactly.
    """
    import torch
    from safetensors.torch import load_file

    from gpt.checkpoint import build_config, build_model

    stored = _stored_config(folder)
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern) if file.is_file())
    if not files:
        hint = "give a GPT-2 directory; transformers' save_pretrained writes it anew from older weights"
        raise UserError(f"{folder / 'model.safetensors'}: missing; {hint}")
    try:
        weights = {name: weight for file in files for name, weight in load_file(file).items()}
        config = build_config(_shape(stored) | ({"vocab_size": len(order)} if order else {}))
        state = from_huggingface_weights(weights, config.num_layers)
        if not config.qkv_bias:
            biases = [state.pop(name) for name in list(state) if name.endswith("W_qkv.bias")]
            if any(bias.any() for bias in biases):
                raise ValueError("its qkv_bias is false, and it has such biases")
        if order is not None:
            state["token_embedding.weight"] = state["token_embedding.weight"][order]
        model = build_model(config, state)
        for weight in model.parameters():  # `load_file` maps the file: replacing it would change a model in use
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)
        return model
    except Exception as error:  # safetensors and torch each fail on foreign files in their own ways
        if is_out_of_memory(error):
            raise
        why = f"config.json has no {error}" if isinstance(error, KeyError) else summarize_error(error)
        raise UserError(f"{folder}: not a GPT-2 that can be loaded: {why}") from None


def write_huggingface(model: "GPT", tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer into an empty folder, for `transformers`; `UserError` on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    model.config.require_gpt2("an export")
    config, context = model.config, model.config.context_length
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    stored: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    stored |= {key: values[0] for key, values in _FIXED.items()} | ends | {"n_inner": None, "n_ctx": context}
    stored |= {theirs: getattr(config, ours) for ours, theirs in _SHAPE.items()}
    stored |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
    if not config.qkv_bias:
        stored["qkv_bias"] = False  # for ourselves: `transformers` sees biases of zero
    # Without max_length, `pipeline` goes on for 256 tokens, beyond the positions of a small model.
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_length": context}
    sampling |= ends | {"pad_token_id": tokenizer.end_of_text}
    # The class GPT2Tokenizer would not ignore merges, and then some words have other tokens.
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    words |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "model_max_length": context}
    for name, content in ("config", stored), ("generation_config", sampling), ("tokenizer_config", words):
        write_text(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")
    write_text(folder / "tokenizer.json", vocabulary.to_huggingface_tokenizer(tokenizer).to_str())
    try:
        save_file(to_huggingface_weights(model), file := folder / "model.safetensors", {"format": "pt"})
        file.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read it
    except SafetensorError as error:
        raise UserError(f"{folder}: the weights cannot be written ({error})") from None


def from_huggingface_weights(weights: dict[str, "Tensor"], num_layers: int) -> dict[str, "Tensor"]:
    """Convert the state dict of a GPT2Model or GPT2LMHeadModel to ours."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    if f"h.{num_layers}.ln_1.weight" in weights:
        raise UserError(f"the Hugging Face weights have more than the {num_layers} layers of their configuration")
    state = {}
    for ours, theirs in parameter_names(num_layers):
        if theirs not in weights:
            raise UserError(f"the Hugging Face weights lack {theirs!r}: only GPT-2 models can be loaded")
        state[ours] = weights[theirs].t() if theirs.endswith(_TRANSPOSED) else weights[theirs]
    head, embedding = weights.get("lm_head.weight"), weights["wte.weight"]
    if head is not None and (head.dtype != embedding.dtype or not head.equal(embedding)):
        raise UserError("the Hugging Face weights have an lm_head.weight other than wte.weight; it must be the same")
    return state


def to_huggingface_weights(model: "GPT") -> dict[str, "Tensor"]:
    """Convert a model's weights to the state dict of a GPT2LMHeadModel, without its tied head."""
    weights = {f"transformer.{name}": weight for name, weight in named_weights(model)}
    return {name: w.t().contiguous() if name.endswith(_TRANSPOSED) else w for name, w in weights.items()}


def named_weights(model: "GPT") -> Iterator[tuple[str, "Tensor"]]:
    """Yield a model's weights with their names in a GPT2Model; what `qkv_bias` leaves out is zero, as it must be."""
    state = model.state_dict()
    for ours, theirs in parameter_names(model.config.num_layers):
        yield theirs, state[ours] if ours in state else model.final_norm.bias.new_zeros(3 * model.config.d_model)


def parameter_names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield each of our parameter names with that of a GPT2Model."""
    yield from _EMBEDDINGS.items()
    blocks = ((f"blocks.{i}.{ours}", f"h.{i}.{theirs}") for i in range(num_layers) for ours, theirs in _BLOCK.items())
    for ours, theirs in itertools.chain(blocks, [("final_norm", "ln_f")]):
        yield from ((f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias"))


def _stored_config(folder: Path) -> dict[str, Any]:
    """Read config.json; `UserError` if it is not a GPT-2's."""
    try:
        stored = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({summarize_error(error)})") from None
    if (kind := stored.get("model_type") if isinstance(stored, dict) else None) != "gpt2":
        raise UserError(f"{folder}: its model_type is {kind!r:.60}, and only 'gpt2' is supported")
    return stored


def _shape(stored: dict) -> dict[str, Any]:
    """Translate their configuration to ours; `ValueError` for a variation that our model does not have."""
    for key, supported in _FIXED.items():
        if (value := stored.get(key, supported[0])) not in supported:
            raise ValueError(f"its {key} is {value!r}, and only {supported[0]!r} is supported")
    if stored.get("n_inner") not in (None, 4 * stored["n_embd"]):
        raise ValueError(f"its n_inner is {stored['n_inner']}, and only 4 n_embd = {4 * stored['n_embd']} is supported")
    return {ours: stored[theirs] for ours, theirs in _SHAPE.items()} | {"qkv_bias": stored.get("qkv_bias", True)}
