"""A model and its tokenizer as one GGUF file, which llama.cpp, Ollama and the programs built on them run.

Names and keys are those of the `gguf` library's GPT-2. Linear layers keep our layout, (out, in).
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt.data.chunking import replace_surrogates
from gpt.data.tokenizer import END_OF_TEXT, Tokenizer
from gpt.errors import UserError
from gpt.files import atomic_write
from gpt.interop.huggingface import named_weights
from gpt.interop.vocabulary import list_merges, to_printable

if TYPE_CHECKING:  # torch takes seconds to import, and a command that checks its arguments needs only `GGUF_TYPES`
    from gpt.model.transformer import GPT

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
# What a chat becomes. Without a template, llama.cpp's web page would put ChatML's markup around what one writes.
PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class _Streamed(np.ndarray):
    """An array that Python writes, because the error of numpy's own `tofile` does not say that the disk is full."""

    def tofile(self, stream, *_) -> None:
        stream.write(self.data)


def write_gguf(model: "GPT", tokenizer: Tokenizer, file: Path, kind: str) -> None:
    """Write the file whole or not at all, with matrices and token embeddings stored as `kind`, one of `GGUF_TYPES`.

    Norms, biases and position embeddings stay fp32, as in llama.cpp's own conversion. Raises `UserError` if the weights
    cannot be stored as `kind`, or without the `gguf` library.
    """
    model.config.require_gpt2("an export")
    config = model.config
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the library gguf: pip install gguf") from None
    with atomic_write(file) as temporary:
        writer = gguf.GGUFWriter(temporary, "gpt2")
        writer.add_name(replace_surrogates(file.stem))
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.context_length)
        writer.add_embedding_length(config.d_model)
        writer.add_feed_forward_length(4 * config.d_model)
        writer.add_block_count(config.num_layers)
        writer.add_head_count(config.num_heads)
        writer.add_layer_norm_eps(model.final_norm.eps)
        _add_tokenizer(writer, tokenizer)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.num_layers)
        for theirs, weight in named_weights(model):
            name = names.get_name(f"transformer.{theirs}", (".weight", ".bias")) or theirs
            stored = kind if weight.ndim == 2 and name != "position_embd.weight" else "f32"
            quantization = gguf.GGMLQuantizationType[stored.upper()]
            try:
                with np.errstate(over="raise"):
                    packed = gguf.quants.quantize(weight.contiguous().numpy(), quantization)
            except (FloatingPointError, gguf.quants.QuantError):
                why = "holds numbers too large, or for q8_0 rows not divisible by 32,"
                raise UserError(f"{name} {why} for type={kind}: use f32 or bf16") from None
            writer.add_tensor(name, packed.view(_Streamed), raw_dtype=quantization)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _add_tokenizer(writer, tokenizer: Tokenizer) -> None:
    """Store the tokens as GPT-2's stand-ins, and the merges, of which llama.cpp requires at least one.

    It splits text as GPT-2 does and then merges. For a tokenizer without merges, such as `byte`, the one stored never
    applies: no text is split into its parts.
    """
    from gguf import TokenType

    tokens = [to_printable(token) for token in sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)]
    pairs = [f"{to_printable(left)} {to_printable(right)}" for left, right in list_merges(tokenizer.ranks)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, END_OF_TEXT])
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL])
    writer.add_token_merges(pairs or [f"{END_OF_TEXT} {END_OF_TEXT}"])
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(PASSTHROUGH_TEMPLATE)
