"""GGUF files: what they hold, read by the library that defines them; llama.cpp reads them in test_three_ways.py."""

import errno
import itertools
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import GPT2Config, GPT2LMHeadModel

import harness
from gpt.data.tokenizer import END_OF_TEXT, Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop.gguf import GGUF_TYPES, PASSTHROUGH_TEMPLATE, write_gguf
from gpt.interop.huggingface import from_huggingface_weights
from gpt.model.transformer import GPT, GPTConfig
from model_files import limit_file_size

TEXT = "It's 1,234 naïve cafés, don't you think?\n\n\tself.x  =  3 # 世界 🙂\r\nthe theme there, thethethe    \n"
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}  # llama.cpp's enum llama_ftype


def shape(tokenizer: Tokenizer, d_model: int = 60, **changes) -> GPTConfig:
    """The shape of a model with sizes that no other number can stand for."""
    settings = {"context_length": 97, "num_layers": 3, "num_heads": 5} | changes
    return GPTConfig(d_model=d_model, vocab_size=tokenizer.vocab_size, **settings)


def make_both(config: GPTConfig) -> tuple[GPT, GPT2LMHeadModel]:
    """A model with random weights everywhere, biases and gains included, as ours and as Hugging Face's."""
    sizes = {"n_positions": config.context_length, "n_embd": config.d_model, "n_layer": config.num_layers}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=config.vocab_size, n_head=config.num_heads, **sizes)).eval()
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return GPT.from_state_dict(config, from_huggingface_weights(theirs.state_dict(), config.num_layers)), theirs


def refusal(tmp_path: Path, *arguments) -> str:
    """The one line with which writing is refused; nothing is left of it."""
    before = sorted(tmp_path.rglob("*"))
    line = harness.refusal(write_gguf, *arguments)
    assert sorted(tmp_path.rglob("*")) == before
    return line


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([TEXT * 3], 307)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_weights(tmp_path, bpe, kind):
    """Every tensor has the name that the library gives to Hugging Face's, and its values as the type rounds them."""
    config = shape(bpe, 160 if kind == "q8_0" else 60)
    model, theirs = make_both(config)
    write_gguf(model, bpe, tmp_path / "model.gguf", kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.num_layers)
    expected = {}
    for name, weight in theirs.state_dict().items():
        if name == "lm_head.weight":  # tied: llama.cpp takes token_embd
            continue
        in_by_out = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        expected[names.get_name(name, (".weight", ".bias"))] = weight.T if in_by_out else weight
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        exact = weight.ndim == 1 or name == "position_embd.weight"
        stored = GGMLQuantizationType["F32" if exact else kind.upper()]
        assert found[name].tensor_type == stored, name
        assert found[name].shape.tolist() == [*reversed(weight.shape)], name
        values = torch.from_numpy(gguf.dequantize(found[name].data, stored).copy())
        if stored == GGMLQuantizationType.Q8_0:
            largest = weight.reshape(*weight.shape[:-1], -1, 32).abs().amax(-1, keepdim=True)
            apart = (values - weight).reshape(*largest.shape[:-1], 32).abs()
            assert (apart <= largest * (0.5 / 127 + 2**-11)).all(), name  # half a step, and a scale rounded to f16
            assert not torch.equal(values, weight), name
        else:
            dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            assert torch.equal(values, weight.to(dtypes[stored.name]).float()), name


def test_keys(tmp_path, bpe):
    """The file says what llama.cpp needs to know, and nothing that we do not know."""
    config = shape(bpe, 96, num_heads=3)
    for kind in GGUF_TYPES:
        write_gguf(GPT(config), bpe, tmp_path / f"{kind}.gguf", kind)
        fields = GGUFReader(tmp_path / f"{kind}.gguf").fields
        found = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
        lists = {key: found.pop(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")}
        assert found.pop("gpt2.attention.layer_norm_epsilon") == np.float32(1e-5)
        assert found == {
            "general.architecture": "gpt2",
            "general.name": kind,
            "general.file_type": FILE_TYPES[kind],
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
        assert len(lists["tokens"]) == 307
        assert lists["tokens"][306] == END_OF_TEXT
        assert lists["token_type"] == [gguf.TokenType.NORMAL] * 306 + [gguf.TokenType.CONTROL]


@pytest.mark.parametrize("name", ["bpe", "byte", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tokens(tmp_path, bpe, name):
    """A byte-pair encoding made of nothing but the file's tokens and merges gives our ids."""
    tokenizer = {"bpe": bpe, "gpt2": gpt2_tokenizer(), "byte": byte_tokenizer()}[name]
    write_gguf(GPT(shape(tokenizer, 5)), tokenizer, tmp_path / "model.gguf", "f32")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    assert len(vocabulary) == tokenizer.vocab_size
    assert merges
    if name == "byte":
        assert merges == [f"{END_OF_TEXT} {END_OF_TEXT}"]
        merges = []
    rebuilt = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges])
    )
    rebuilt.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert rebuilt.encode(TEXT).ids == tokenizer.encode(TEXT)


def test_no_bias(tmp_path, bpe):
    """llama.cpp requires the bias that a model with qkv_bias=false lacks, so the file holds zeros."""
    write_gguf(GPT(shape(bpe, qkv_bias=False)), bpe, tmp_path / "model.gguf", "f16")
    found = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert all(np.array_equal(found[f"blk.{i}.attn_qkv.bias"], np.zeros(180, np.float32)) for i in range(3))


def test_odd_file_name(tmp_path, bpe):
    """A file name that is no UTF-8 is no reason to fail."""
    file = tmp_path / "caf\udce9.gguf"
    write_gguf(GPT(shape(bpe)), bpe, file, "f32")
    assert GGUFReader(file).fields["general.name"].contents() == "caf\ufffd"


def test_impossible_kinds(tmp_path, bpe):
    """Rows that q8_0 cannot divide; numbers that f16 cannot hold."""
    model, file = GPT(shape(bpe)), tmp_path / "model.gguf"
    why = "holds numbers too large, or for q8_0 rows not divisible by 32,"
    assert refusal(tmp_path, model, bpe, file, "q8_0") == f"token_embd.weight {why} for type=q8_0: use f32 or bf16"
    with torch.no_grad():
        model.blocks[1].feed_forward.expand.weight[7, 11] = 65520.0  # the least that f16 rounds to infinity
    assert refusal(tmp_path, model, bpe, file, "f16") == f"blk.1.ffn_up.weight {why} for type=f16: use f32 or bf16"
    write_gguf(model, bpe, file, "bf16")
    large = GPT(shape(bpe, 96, num_heads=3))
    with torch.no_grad():
        large.token_embedding.weight[7, 11] = 127 * 65520.0
    line = refusal(tmp_path, large, bpe, tmp_path / "large.gguf", "q8_0")
    assert line == f"token_embd.weight {why} for type=q8_0: use f32 or bf16"


def test_without_the_library(tmp_path, bpe, monkeypatch):
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    message = refusal(tmp_path, GPT(shape(bpe)), bpe, tmp_path / "model.gguf", "f32")
    assert message == "GGUF files need the library gguf: pip install gguf"


def test_full_disk(tmp_path, bpe):
    """Wherever the disk is full, the error says so, which numpy's does not, and nothing is left of the file."""
    model = GPT(shape(bpe))
    write_gguf(model, bpe, tmp_path / "model.gguf", "f32")
    size = (tmp_path / "model.gguf").stat().st_size
    (tmp_path / "model.gguf").unlink()
    for limit in itertools.chain(range(0, size, size // 13), [size - 1]):
        with limit_file_size(limit), pytest.raises(OSError) as caught:
            write_gguf(model, bpe, tmp_path / "model.gguf", "f32")
        assert caught.value.errno == errno.EFBIG, limit
        assert not list(tmp_path.iterdir()), limit
