"""Write a model and its tokenizer as one GGUF file, for llama.cpp, Ollama and programs built on them.

The `gguf` library defines the names and keys of a GPT-2. Linear layers keep our layout, (out, in).
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
# Without a template, llama.cpp's web page would put ChatML's markup around a message.
PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class _StreamedArray(np.ndarray):
    """An array that Python writes. The error of numpy's own `tofile` does not report that the disk is full."""

    def tofile(self, stream, *_) -> None:
        stream.write(self.data)


def write_gguf(model: "GPT", tokenizer: Tokenizer, file: Path, gguf_type: str) -> None:
    """Write the file whole or not at all.

    Args:
        model: The model. Its norms, biases and position embeddings stay fp32, as in llama.cpp's own conversion.
        tokenizer: The model's tokenizer.
        file: The new file.
        gguf_type: How to store matrices and token embeddings: one of `GGUF_TYPES`.

    Raises `UserError` if the weights cannot be stored in this type, or without the `gguf` library.
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
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if gguf_type == "f32" else f"MOSTLY_{gguf_type.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.context_length)
        writer.add_embedding_length(config.d_model)
        writer.add_feed_forward_length(4 * config.d_model)
        writer.add_block_count(config.num_layers)
        writer.add_head_count(config.num_heads)
        writer.add_layer_norm_eps(model.final_norm.eps)
        _add_tokenizer(writer, tokenizer)
        _add_weights(writer, model, gguf_type)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _add_weights(writer, model: "GPT", gguf_type: str) -> None:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, model.config.num_layers)
    for gpt2_name, weight in named_weights(model):
        name = names.get_name(f"transformer.{gpt2_name}", (".weight", ".bias")) or gpt2_name
        is_quantized = weight.ndim == 2 and name != "position_embd.weight"
        tensor_type = gguf.GGMLQuantizationType[gguf_type.upper() if is_quantized else "F32"]
        try:
            with np.errstate(over="raise"):
                array = gguf.quants.quantize(weight.contiguous().numpy(), tensor_type)
        except (FloatingPointError, gguf.quants.QuantError):
            problem = "holds numbers too large, or for q8_0 rows not divisible by 32,"
            raise UserError(f"{name} {problem} for type={gguf_type}: use f32 or bf16") from None
        writer.add_tensor(name, array.view(_StreamedArray), raw_dtype=tensor_type)


def _add_tokenizer(writer, tokenizer: Tokenizer) -> None:
    """Store the tokens as printable strings, and the merges.

    llama.cpp splits text as GPT-2 does and then merges. It requires at least one merge. A tokenizer without merges,
    such as `byte`, gets a merge that never applies: no text is split into its parts.
    """
    from gguf import TokenType

    tokens = [to_printable(token) for token in sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)]
    merges = [f"{to_printable(left)} {to_printable(right)}" for left, right in list_merges(tokenizer.ranks)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, END_OF_TEXT])
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL])
    writer.add_token_merges(merges or [f"{END_OF_TEXT} {END_OF_TEXT}"])
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(PASSTHROUGH_TEMPLATE)
