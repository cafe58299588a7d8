"""GPT-2 directories as `transformers` saves them: the same logits, and one line about each that cannot be loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import harness
from gpt.interop.huggingface import load_huggingface_weights
from gpt.model.transformer import GPTConfig
from model_files import Bomb

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


READ, ODD = ": cannot be read as a Hugging Face model (", ": not a GPT-2 that can be loaded"


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
    line = harness.refusal(load_huggingface_weights, folder)
    assert line.startswith(f"{folder}")
    return line.removeprefix(f"{folder}")


def test_pickles_are_not_read(folder, tmp_path):
    """Older weights are not even opened, and the line says how to write them anew."""
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    assert "transformers' save_pretrained writes it anew from older weights" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@torch.no_grad()
def test_same_logits(saved):
    """The directory gives the shape, and weights with which our model says what theirs says."""
    model = load_huggingface_weights(saved).eval()
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
    model = load_huggingface_weights(tmp_path).eval()
    idx = torch.arange(CONTEXT)[None]
    torch.testing.assert_close(model.hidden(idx), theirs(idx).last_hidden_state, atol=1e-4, rtol=0.0)


def test_half_precision_becomes_single(saved, folder):
    """Weights stored in 16 bits are loaded as fp32, with the values they have."""
    stored = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    state, full = load_huggingface_weights(folder).state_dict(), load_huggingface_weights(saved).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], full[name].half().float()) for name in full)


def is_same(folder: Path, saved: Path) -> bool:
    """Whether two directories hold the same weights, bit for bit."""
    state, expected = load_huggingface_weights(folder).state_dict(), load_huggingface_weights(saved).state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_shards(saved, tmp_path):
    """The shards of `transformers`; then one is missing."""
    make_theirs().save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert is_same(tmp_path, saved)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    assert " lack '" in refusal(tmp_path)


def test_stored_head(saved, folder):
    """A head in the file must be the embedding; `tie_word_embeddings: false` is then no matter."""
    weights = load_file(folder / "model.safetensors")
    embedding = weights["transformer.wte.weight"]
    change_config(folder, tie_word_embeddings=False)
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert is_same(folder, saved)
    changed = embedding.clone()
    changed[VOCAB - 1, 0] += 1
    for head in (changed, embedding[:-1].clone(), embedding.double()):
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
        assert "have an lm_head.weight other than wte.weight" in refusal(folder)


def test_without_biases(folder):
    """`qkv_bias: false` is ours, and true only of a model whose biases are zero."""
    change_config(folder, qkv_bias=False)
    assert "its qkv_bias is false, and it has such biases" in refusal(folder)
    weights = load_file(folder / "model.safetensors")
    zero = {name: torch.zeros_like(w) for name, w in weights.items() if name.endswith("c_attn.bias")}
    save_file(weights | zero, folder / "model.safetensors")
    model = load_huggingface_weights(folder)
    assert not model.config.qkv_bias
    assert "blocks.0.attention.W_qkv.bias" not in model.state_dict()


def test_file_may_be_replaced(folder):
    """What is loaded stays as it is, whatever is written over the file afterwards; matrices lie as ours do."""
    state = load_huggingface_weights(folder).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(bytes(size))
    assert all(tensor.is_contiguous() and torch.equal(tensor, before[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", None, READ),
        ("config.json", b"\xff", READ),
        ("config.json", b"[2, 3]", ": its model_type is None, and only 'gpt2' is supported"),
        ("config.json", b"[" * 100_000, READ + "it is nested too deeply"),
        ("config.json", b'{"n_layer": ' + b"7" * 10_000 + b"}", READ + "Exceeds the limit"),
        ("config.json", b'{"model_type": "llama"}', ": its model_type is 'llama', and only 'gpt2' is supported"),
        ("config.json", b'{"model_type": "gpt2"}', f"{ODD}: config.json has no 'n_embd'"),
        ("model.safetensors", None, "/model.safetensors: missing; give a GPT-2 directory; transformers' save_"),
        ("model.safetensors", b"2 3 5 7 11 13 17 19", ODD),
        ("model.safetensors", (2**63).to_bytes(8, "little") + b"{", ODD),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_broken_files(folder, file, content, reason):
    """Each file that is missing, damaged or of another model is refused, and the line says which."""
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    assert refusal(folder).startswith(reason)


def test_other_places(folder, tmp_path):
    """A folder that is not there or is a file, weights that are cut short, a pipe or a device."""
    assert refusal(tmp_path / "nowhere").startswith(READ)
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").startswith(": cannot be read")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert refusal(folder).startswith(ODD)
    for make in (lambda: os.mkfifo(weights), lambda: weights.symlink_to("/dev/zero")):
        weights.unlink()
        make()
        assert refusal(folder).startswith("/model.safetensors: missing; give a GPT-2 directory")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "relu"}, "its activation_function is 'relu'"),
        ({"layer_norm_epsilon": 0.1}, "its layer_norm_epsilon is 0.1"),
        ({"scale_attn_weights": False}, "its scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is True"),
        ({"n_inner": 5 * D_MODEL}, f"its n_inner is {5 * D_MODEL}"),
        ({"n_layer": LAYERS - 1}, f"have more than the {LAYERS - 1} layers"),
        ({"n_embd": 2 * D_MODEL}, "its configuration describes"),
        ({"n_layer": 10**9}, "lack 'h.2.ln_1.weight'"),
        ({"n_layer": 2.0}, "its num_layers is 2.0, of type float"),
        ({"n_positions": 10**12}, "its configuration describes"),
        ({"vocab_size": 100}, "size mismatch for token_embedding.weight"),
    ],
    ids=str,
)
def test_other_configurations(folder, changes, reason):
    """What our model computes otherwise is refused; so are other shapes, before memory or time is spent on them."""
    change_config(folder, **changes)
    assert reason in refusal(folder)
