"""Every way to run the model agrees with the plain model for another value of each field, or refuses it.

Otherwise a cache, packed weights or an export could ignore a new field.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gpt.data.tokenizer import byte_tokenizer
from gpt.errors import UserError
from gpt.interop import gguf, huggingface
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.sampling.packed import pack_weights
from harness import refusal
from models import make_idx, random_model

SMALL = GPTConfig(context_length=23, d_model=32, num_layers=2, num_heads=4, vocab_size=257)
OTHER = {
    "context_length": 29,
    "d_model": 64,
    "num_layers": 3,
    "num_heads": 2,
    "dropout": 0.3,
    "qkv_bias": False,
}
T = 23


def test_every_field_has_another_value():
    """A new field gets a line in the table above, with a value that is not its default."""
    fields = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    assert OTHER.keys() == fields.keys(), (
        "add each new field of ModelConfig to OTHER, with a value that is not the default"
    )
    assert [name for name, value in OTHER.items() if value in (fields[name], getattr(SMALL, name))] == []


def plain(config: GPTConfig, idx: Tensor) -> Tensor:
    """Return the logits of the plain attention of the notes."""
    model = random_model(config, std=0.15)
    for block in model.blocks:
        block.attention.fused_kernel = False
    return model(idx)


@pytest.mark.parametrize("name", [name for name in OTHER if name != "dropout"])  # it acts in training only
@torch.no_grad()
def test_every_field_changes_the_model(name):
    idx = make_idx(257, 1, T)
    assert not torch.allclose(plain(dataclasses.replace(SMALL, **{name: OTHER[name]}), idx), plain(SMALL, idx))


def cached(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    caches = model.init_kv_caches()
    return torch.cat([model(idx[:, t : t + 1], caches) for t in range(T)], dim=1)


def cached_in_parts(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    caches = model.init_kv_caches()
    return torch.cat([model(part, caches) for part in idx.split(7, dim=1)], dim=1)


def padded(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    shorter, pad_lengths = torch.cat([idx[:, :1], idx[:, :-1]], dim=1), torch.tensor([1])
    logits = model.head(model.forward_features(shorter, pad_lengths=pad_lengths))[:, 1:]
    return torch.cat([logits, model(idx)[:, -1:]], dim=1)  # the padded row has no room for the last token


def for_training(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    hidden, head = model.features_and_head(idx)
    return hidden @ head.T


def packed_bf16(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    return cached(pack_weights(model, "bf16"), idx, folder).float()


def packed_int8(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    return cached(pack_weights(model, "int8"), idx, folder).float()


def compiled(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    with torch.compiler.set_stance("force_eager"):  # torch.compile is not tested
        return cached(pack_weights(model, "fp32", compiled=True), idx, folder)


def in_transformers(model: GPT, idx: Tensor, folder: Path) -> Tensor:
    huggingface.write_huggingface(model, byte_tokenizer(), folder)
    return AutoModelForCausalLM.from_pretrained(folder)(idx).logits


WAYS: dict[Callable[[GPT, Tensor, Path], Tensor], float] = {  # and the mean error that is allowed
    **dict.fromkeys([cached, cached_in_parts, padded, for_training, compiled, in_transformers], 1e-5),
    **dict.fromkeys([packed_bf16, packed_int8], 0.03),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, within its compiler
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", OTHER)
@torch.no_grad()
def test_every_way_agrees_or_refuses(name, way, tmp_path):
    """The mean error of logits is in standard deviations of the plain model's logits."""
    config = dataclasses.replace(SMALL, **{name: OTHER[name]})
    idx = make_idx(257, 1, T)
    expected = plain(config, idx)
    try:
        result = way(random_model(config, std=0.15), idx, tmp_path)
    except UserError:
        return
    error = (result - expected).abs().mean() / expected.std()
    assert error < WAYS[way]


@dataclasses.dataclass
class ConfigWithNewField(GPTConfig):
    """A configuration with a new field that GPT-2 does not have."""

    other_field: int = 0


def compile_it(model: GPT, tokenizer, path: Path) -> None:
    pack_weights(model, "fp32", compiled=True)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (huggingface.write_huggingface, "an export"),
        (lambda model, tokenizer, folder: gguf.write_gguf(model, tokenizer, folder / "model.gguf", "f32"), "an export"),
        (compile_it, "--compile"),
    ],
    ids=["hf", "gguf", "compiled"],
)
def test_new_fields_are_refused_by_exports_and_compile(tmp_path, use: Callable, what):
    """A new field at its default is accepted. Otherwise nothing is written."""
    model = GPT(GPTConfig(16, 32, 1, 4, vocab_size=257))
    shape = dataclasses.asdict(model.config)
    model.config = ConfigWithNewField(**shape, other_field=3)
    line = refusal(use, model, byte_tokenizer(), tmp_path / "model")
    assert line == f"{what} supports only GPT-2, which has no model.other_field=3"
    assert not list(tmp_path.iterdir())
    model.config = ConfigWithNewField(**shape)
    (tmp_path / "model").mkdir()
    use(model, byte_tokenizer(), tmp_path / "model")
