"""GPT-2 folders that `transformers` saves give the same logits. Other folders are refused in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import harness
from gpt.interop.huggingface import load_huggingface_weights
from gpt.model.transformer import GPTConfig
from models import Bomb, gpt2_twin

VOCAB_SIZE, CONTEXT_LENGTH, NUM_HEADS, NUM_LAYERS = 101, 13, 3, 2
D_MODEL = NUM_HEADS * 7
CONFIG = GPTConfig(CONTEXT_LENGTH, D_MODEL, NUM_LAYERS, NUM_HEADS, vocab_size=VOCAB_SIZE)
UNREADABLE = ": cannot be read as a Hugging Face model ("
NOT_A_GPT2 = ": not a GPT-2 that can be loaded"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a small GPT2LMHeadModel."""
    folder = tmp_path_factory.mktemp("huggingface")
    gpt2_twin(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of that folder to change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_config(folder: Path, **changes) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, **changes) -> None:
    """Replace or add tensors of model.safetensors, with `__` for each dot."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): weight for name, weight in changes.items()}, file)


def refusal(folder: Path) -> str:
    """Return the line with which a folder is refused, without the folder at its beginning."""
    line = harness.refusal(load_huggingface_weights, folder)
    assert line.startswith(f"{folder}")
    return line.removeprefix(f"{folder}")


def have_equal_weights(folder: Path, other: Path) -> bool:
    """Return True if two folders hold the same weights, bit for bit."""
    state, expected = (load_huggingface_weights(path).state_dict() for path in (folder, other))
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


@torch.no_grad()
def test_logits_are_equal(saved):
    model = load_huggingface_weights(saved).eval()
    assert model.config == CONFIG
    idx = torch.randint(VOCAB_SIZE, (2, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(3))
    expected = gpt2_twin(CONFIG)(idx).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model(idx), expected, atol=1e-4, rtol=0.0)


def test_a_model_without_a_head_is_loaded(saved, tmp_path):
    """A GPT2Model has no prefix before its names either."""
    gpt2_twin(CONFIG, model_class="GPT2Model").save_pretrained(tmp_path)
    assert have_equal_weights(tmp_path, saved)


def test_half_precision_becomes_fp32(saved, folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.half() for name, weight in weights.items()}, folder / "model.safetensors")
    state, expected = load_huggingface_weights(folder).state_dict(), load_huggingface_weights(saved).state_dict()
    assert {weight.dtype for weight in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], expected[name].half().float()) for name in expected)


def test_shards_are_one_model(saved, tmp_path):
    """A missing shard is refused."""
    gpt2_twin(CONFIG).save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert have_equal_weights(tmp_path, saved)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    assert " lack '" in refusal(tmp_path)


def test_a_stored_head_must_be_the_embedding(saved, folder):
    """If it is, `tie_word_embeddings: false` does not matter."""
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_config(folder, tie_word_embeddings=False)
    change_weights(folder, lm_head__weight=embedding.clone())
    assert have_equal_weights(folder, saved)
    changed = embedding.clone()
    changed[VOCAB_SIZE - 1, 0] += 1
    for head in (changed, embedding[:-1].clone(), embedding.double()):
        change_weights(folder, lm_head__weight=head)
        assert "have an lm_head.weight other than wte.weight" in refusal(folder)


def test_qkv_bias_may_be_left_out_if_it_is_zero(folder):
    """`qkv_bias: false` is a key of ours in config.json."""
    change_config(folder, qkv_bias=False)
    assert "its qkv_bias is false, and it has such biases" in refusal(folder)
    zeros = torch.zeros(3 * D_MODEL)
    names = [f"transformer__h__{i}__attn__c_attn__bias" for i in range(NUM_LAYERS)]
    change_weights(folder, **{name: zeros.clone() for name in names})
    model = load_huggingface_weights(folder)
    assert not model.config.qkv_bias
    assert "blocks.0.attention.W_qkv.bias" not in model.state_dict()


def test_a_loaded_model_does_not_depend_on_the_file(folder):
    """Writing over the file changes nothing, and matrices are contiguous."""
    state = load_huggingface_weights(folder).state_dict()
    copy = {name: weight.clone() for name, weight in state.items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert all(weight.is_contiguous() and torch.equal(weight, copy[name]) for name, weight in state.items())


@pytest.mark.promise("security.md#safetensors")
def test_pickles_are_not_read(folder, tmp_path):
    """The line names the program that rewrites older weights."""
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Bomb(tmp_path / "trace")}, folder / "pytorch_model.bin")
    assert "its weights are in the older form, pytorch_model.bin" in refusal(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", b"[2, 3]", ": its model_type is None, and only 'gpt2' is supported"),
        ("config.json", b"[" * 100_000, UNREADABLE + "it is nested too deeply"),
        ("config.json", b'{"n_layer": ' + b"7" * 10_000 + b"}", UNREADABLE + "Exceeds the limit"),
        ("config.json", b'{"model_type": "gpt2"}', f"{NOT_A_GPT2}: config.json has no 'n_embd'"),
        ("model.safetensors", b"2 3 5 7 11 13 17 19", NOT_A_GPT2),
        ("model.safetensors", (2**63).to_bytes(8, "little") + b"{", NOT_A_GPT2),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_damaged_files_are_refused(folder, file, content, reason):
    (folder / file).write_bytes(content)
    assert refusal(folder).startswith(reason)


def test_missing_and_special_files_are_refused(folder, tmp_path):
    """The folder does not exist or is a file. The weights are cut short, a pipe or a device."""
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        assert refusal(tmp_path / name).startswith(UNREADABLE)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert refusal(folder).startswith(NOT_A_GPT2)
    for create in (lambda: os.mkfifo(weights), lambda: weights.symlink_to("/dev/zero")):
        weights.unlink()
        create()
        assert refusal(folder).startswith("/model.safetensors: missing; give a GPT-2 directory")


@pytest.mark.slow
def test_the_remedy_for_weights_in_the_older_form_works(folder):
    from transformers import AutoModelForCausalLM

    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    line = harness.refusal(load_huggingface_weights, folder)
    assert line.startswith(f"{folder}: its weights are in the older form, pytorch_model.bin; rewrite them with ")
    eval(line.partition(" with ")[2], {"AutoModelForCausalLM": AutoModelForCausalLM})
    embedding = state["transformer.wte.weight"]
    assert load_huggingface_weights(folder).token_embedding.weight.equal(embedding)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "relu"}, "its activation_function is 'relu'"),
        ({"layer_norm_epsilon": 0.1}, "its layer_norm_epsilon is 0.1"),
        ({"scale_attn_weights": False}, "its scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is True"),
        ({"n_inner": 5 * D_MODEL}, f"its n_inner is {5 * D_MODEL}"),
        ({"n_layer": NUM_LAYERS - 1}, f"have more than the {NUM_LAYERS - 1} layers"),
        ({"n_layer": 10**9}, "lack 'h.2.ln_1.weight'"),
        ({"n_positions": 10**12}, "context_length=1000000000000"),
    ],
    ids=str,
)
def test_configurations_that_our_model_does_not_compute_are_refused(folder, changes, reason):
    """A shape that the weights do not have is refused before memory or time is spent on it."""
    change_config(folder, **changes)
    assert reason in refusal(folder)
