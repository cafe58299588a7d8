"""The content of GGUF files, read by the library that defines them; llama.cpp reads them in test_three_ways.py."""

import errno
import itertools
import sys

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFReader

import harness
from gpt.data.tokenizer import END_OF_TEXT, Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop.gguf import GGUF_TYPES, PASSTHROUGH_TEMPLATE, write_gguf
from gpt.interop.huggingface import from_huggingface_weights
from gpt.model.transformer import GPT, GPTConfig
from models import gpt2_twin, limit_file_size

TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"
BPE = train_bpe([TEXT * 3], 307)
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}  # llama.cpp's enum llama_ftype
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def make_config(d_model: int = 60, tokenizer: Tokenizer = BPE, **changes) -> GPTConfig:
    """Return a shape in which no two numbers are equal."""
    shape = {"context_length": 97, "num_layers": 3, "num_heads": 5, "vocab_size": tokenizer.vocab_size}
    return GPTConfig(d_model=d_model, **(shape | changes))


@pytest.mark.parametrize("gguf_type", GGUF_TYPES)
def test_weights_have_llama_cpp_names_and_rounded_values(tmp_path, gguf_type):
    """The library translates Hugging Face's names."""
    config = make_config(160 if gguf_type == "q8_0" else 60)
    gpt2 = gpt2_twin(config)
    model = GPT.from_state_dict(config, from_huggingface_weights(gpt2.state_dict(), config.num_layers))
    write_gguf(model, BPE, tmp_path / "model.gguf", gguf_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.num_layers)
    expected = {}
    for name, weight in gpt2.state_dict().items():
        if name == "lm_head.weight":  # tied: llama.cpp takes token_embd
            continue
        is_transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        expected[names.get_name(name, (".weight", ".bias"))] = weight.T if is_transposed else weight
    reader = GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.file_type"].contents() == FILE_TYPES[gguf_type]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == expected.keys()
    for name, weight in expected.items():
        is_exact = weight.ndim == 1 or name == "position_embd.weight"
        tensor_type = GGMLQuantizationType["F32" if is_exact else gguf_type.upper()]
        assert tensors[name].tensor_type == tensor_type, name
        assert tensors[name].shape.tolist() == [*reversed(weight.shape)], name
        values = torch.from_numpy(gguf.dequantize(tensors[name].data, tensor_type).copy())
        if tensor_type == GGMLQuantizationType.Q8_0:
            largest = weight.reshape(*weight.shape[:-1], -1, 32).abs().amax(-1, keepdim=True)
            errors = (values - weight).reshape(*largest.shape[:-1], 32).abs()
            assert (errors <= largest * (0.5 / 127 + 2**-11)).all(), name  # half a step, and a scale rounded to f16
            assert not torch.equal(values, weight), name
        else:
            assert torch.equal(values, weight.to(DTYPES[tensor_type.name]).float()), name


def test_keys_describe_the_model(tmp_path):
    """A file name that is not UTF-8 becomes a name that is. Without `qkv_bias` the biases are zero."""
    file = tmp_path / "caf\udce9.gguf"
    write_gguf(GPT(make_config(96, num_heads=3, qkv_bias=False)), BPE, file, "q8_0")
    reader = GGUFReader(file)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tokens, token_types, _ = (keys.pop(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    assert keys.pop("gpt2.attention.layer_norm_epsilon") == np.float32(1e-5)
    assert keys == {
        "general.architecture": "gpt2",
        "general.name": "caf\ufffd",
        "general.file_type": FILE_TYPES["q8_0"],
        "general.quantization_version": 2,
        "gpt2.context_length": 97,
        "gpt2.embedding_length": 96,
        "gpt2.feed_forward_length": 384,
        "gpt2.block_count": 3,
        "gpt2.attention.head_count": 3,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 306,
        "tokenizer.ggml.eos_token_id": 306,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": PASSTHROUGH_TEMPLATE,
    }
    assert (len(tokens), tokens[306]) == (307, END_OF_TEXT)
    assert token_types == [gguf.TokenType.NORMAL] * 306 + [gguf.TokenType.CONTROL]
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert all(np.array_equal(tensors[f"blk.{i}.attn_qkv.bias"], np.zeros(288, np.float32)) for i in range(3))


@pytest.mark.parametrize("name", ["bpe", "byte", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tokens_and_merges_give_our_ids(tmp_path, name):
    """A byte-pair encoding is built from nothing but the file's tokens and merges."""
    tokenizer = {"bpe": BPE, "gpt2": gpt2_tokenizer(), "byte": byte_tokenizer()}[name]
    write_gguf(GPT(make_config(5, tokenizer)), tokenizer, tmp_path / "model.gguf", "f32")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    assert len(vocab) == tokenizer.vocab_size
    if name == "byte":
        assert merges == [f"{END_OF_TEXT} {END_OF_TEXT}"]
        merges = []
    pairs = [tuple(merge.split(" ")) for merge in merges]
    rebuilt = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    rebuilt.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert rebuilt.encode(TEXT).ids == tokenizer.encode(TEXT)


def test_types_that_cannot_hold_the_weights_are_refused(tmp_path, monkeypatch):
    """q8_0 needs rows divisible by 32, and f16 small numbers. Nothing is left of the file."""
    model, file = GPT(make_config()), tmp_path / "model.gguf"
    large_model = GPT(make_config(96, num_heads=3))
    with torch.no_grad():
        model.blocks[1].feed_forward.expand.weight[7, 11] = 65520.0  # the smallest number that f16 rounds to infinity
        large_model.token_embedding.weight[7, 11] = 127 * 65520.0
    for refused_model, gguf_type, name in (
        (model, "q8_0", "token_embd.weight"),
        (model, "f16", "blk.1.ffn_up.weight"),
        (large_model, "q8_0", "token_embd.weight"),
    ):
        problem = "holds numbers too large, or for q8_0 rows not divisible by 32,"
        line = harness.refusal(write_gguf, refused_model, BPE, file, gguf_type)
        assert line == f"{name} {problem} for type={gguf_type}: use f32 or bf16"
    write_gguf(model, BPE, tmp_path / "bf16.gguf", "bf16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    line = harness.refusal(write_gguf, model, BPE, file, "f32")
    assert line == "GGUF files need the library gguf: pip install gguf"
    assert [path.name for path in tmp_path.iterdir()] == ["bf16.gguf"]


def test_a_full_disk_leaves_no_file(tmp_path):
    """Writing stops at any size with the system's own error."""
    model, file = GPT(make_config()), tmp_path / "model.gguf"
    write_gguf(model, BPE, file, "f32")
    size = file.stat().st_size
    file.unlink()
    for limit in itertools.chain(range(0, size, size // 13), [size - 1]):
        with limit_file_size(limit), pytest.raises(OSError) as caught:
            write_gguf(model, BPE, file, "f32")
        assert caught.value.errno == errno.EFBIG, limit
        assert not list(tmp_path.iterdir()), limit
