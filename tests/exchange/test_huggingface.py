"""GPT-2 directories as `transformers` saves them: the same logits, and one line about each that cannot be loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from gpt.errors import UserError
from gpt.exchange.huggingface import from_huggingface, load_directory
from gpt.model.transformer import GPT, GPTConfig

VOCAB, CONTEXT, HEADS, LAYERS = 101, 13, 3, 2
D_MODEL = HEADS * 7


def make_theirs(kind: type = GPT2LMHeadModel, **changes):
    """A small model of theirs in which every parameter, biases and gains included, is random and large."""
    shape = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": D_MODEL, "n_layer": LAYERS, "n_head": HEADS}
    model = kind(GPT2Config(**(shape | {"bos_token_id": 0, "eos_token_id": 0} | changes))).eval()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with a small GPT2LMHeadModel."""
    folder = tmp_path_factory.mktemp("huggingface")
    make_theirs().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_config(folder: Path, **changes) -> None:
    """Set keys of config.json; None removes one."""
    file = folder / "config.json"
    stored = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


def refusal(folder: Path) -> str:
    """The one line with which a directory is refused."""
    with pytest.raises(UserError) as caught:
        load_directory(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def test_same_logits(saved):
    """The directory gives the shape, and weights with which our model says what theirs says."""
    model = load_directory(saved).eval()
    assert model.config == GPTConfig(CONTEXT, D_MODEL, LAYERS, HEADS, vocab_size=VOCAB)
    idx = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
    expected = make_theirs()(idx).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model(idx), expected, atol=1e-4, rtol=0.0)


@torch.no_grad()
def test_without_a_head(tmp_path):
    """A GPT2Model, which has no head and no prefix before its names, loads as well."""
    theirs = make_theirs(GPT2Model)
    theirs.save_pretrained(tmp_path)
    model = load_directory(tmp_path).eval()
    idx = torch.arange(CONTEXT)[None]
    torch.testing.assert_close(model.hidden(idx), theirs(idx).last_hidden_state, atol=1e-4, rtol=0.0)


def test_half_precision_becomes_single(saved, folder):
    """Weights stored in 16 bits are loaded as fp32, with the values they have."""
    stored = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    state, full = load_directory(folder).state_dict(), load_directory(saved).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], full[name].half().float()) for name in full)


def test_file_may_be_replaced(folder):
    """What is loaded stays as it is, whatever is written over the file afterwards; matrices lie as ours do."""
    state = load_directory(folder).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(bytes(size))
    assert all(tensor.is_contiguous() and torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_from_huggingface_by_hand():
    """Their linear layers hold the transposed matrix; the embeddings do not."""
    theirs = {name: tensor.detach() for name, tensor in make_theirs().state_dict().items()}
    ours = from_huggingface(theirs, LAYERS)
    expand = theirs["transformer.h.1.mlp.c_fc.weight"]
    assert expand.shape == (D_MODEL, 4 * D_MODEL)
    assert torch.equal(ours["blocks.1.feed_forward.expand.weight"], expand.T)
    assert torch.equal(ours["token_embedding.weight"], theirs["transformer.wte.weight"])
    assert torch.equal(ours["blocks.0.attention.W_qkv.bias"], theirs["transformer.h.0.attn.c_attn.bias"])
    assert set(ours) == set(GPT(GPTConfig(CONTEXT, D_MODEL, LAYERS, HEADS, vocab_size=VOCAB)).state_dict())


@pytest.mark.parametrize("model_type", ["llama", "gpt_neo", None])
def test_other_models(folder, model_type):
    """Only GPT-2 can be loaded, and the line names the folder and what it holds instead."""
    change_config(folder, model_type=model_type)
    message = refusal(folder)
    assert message.startswith(f"{folder}: ")
    assert f"model_type is {model_type!r}" in message
    assert "'gpt2'" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(folder, name):
    """The line names the file that is not there."""
    (folder / name).unlink()
    assert refusal(folder).startswith(f"{folder / name}: missing")


def test_missing_folder(tmp_path):
    """So it does for a folder that is not there, or that is a file."""
    assert refusal(tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere' / 'config.json'}: missing")
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").startswith(f"{tmp_path / 'file'}: cannot be read")


@pytest.mark.parametrize("content", [b"", b"2 3 5 7 11 13 17 19", b"\x80" + bytes(31), None])
def test_corrupt_weights(folder, content):
    """A weights file that is empty, something else, or cut short."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7] if content is None else content)
    assert refusal(folder).startswith(f"{folder}: cannot be read as a Hugging Face model")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_corrupt_config(folder, content):
    """A configuration that is not JSON."""
    (folder / "config.json").write_bytes(content)
    assert refusal(folder).startswith(f"{folder}: cannot be read as a Hugging Face model")


@pytest.mark.parametrize("name", ["wte.weight", "h.1.attn.c_proj.bias", "ln_f.weight"])
def test_missing_weight(folder, name):
    """The line names the weight that is not there."""
    weights = load_file(folder / "model.safetensors")
    del weights[f"transformer.{name}"]
    save_file(weights, folder / "model.safetensors")
    assert repr(name) in refusal(folder)


@pytest.mark.parametrize("content", ["[2, 3]", '{"model_type": "gpt2"}'])
def test_incomplete_config(folder, content):
    """JSON that is no complete configuration of a model."""
    (folder / "config.json").write_text(content)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.1},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
        {"n_inner": 5 * D_MODEL},
        {"n_layer": LAYERS - 1},
        {"n_embd": 2 * D_MODEL},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_formulas(tmp_path, changes):
    """What our model computes otherwise than this GPT-2 does is refused, not loaded to say something else."""
    theirs = make_theirs(**({} if "n_layer" in changes or "n_embd" in changes else changes))
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert str(tmp_path) in refusal(tmp_path)
