"""Checkpoints are written whole or not at all, refused in one line if damaged or foreign, and never run as code."""

import math
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harness
from gpt.checkpoint import CHECKPOINT_FORMAT, load_checkpoint, require_storable, restore_model, save_checkpoint
from gpt.checkpoint_formats import upgrade_config
from gpt.data.tokenizer import byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError
from gpt.model.transformer import ModelConfig
from models import Bomb, limit_file_size, make_trained_checkpoint, small_model

SHAPE = ModelConfig(context_length=13, d_model=14, num_layers=1, num_heads=7, qkv_bias=False)
CHECKPOINT = make_trained_checkpoint(SHAPE)
NAME = "blocks.0.feed_forward.expand.weight"
WEIGHT = CHECKPOINT["state_dict"][NAME]


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory) -> bytes:
    """The bytes of an intact file."""
    path = tmp_path_factory.mktemp("good") / "last.ckpt"
    save_checkpoint(CHECKPOINT, path)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "last.ckpt"


def refusal(path: Path) -> str:
    """Return the line with which a file is refused, without the path at its beginning."""
    line = harness.refusal(lambda: restore_model(load_checkpoint(path), path))
    assert line.startswith(f"{path}: ") and len(line) < 700
    return line.removeprefix(f"{path}: ")


def is_equal(value: Any, other: Any) -> bool:
    """Return True if two checkpoints are equal, including the order of keys, types and tensors."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, dict):
        return list(value) == list(other) and all(is_equal(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return value == other


# --- writing ---


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    """The model built from it gives the same logits."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    save_checkpoint(CHECKPOINT, path)
    loaded = load_checkpoint(path)
    assert is_equal(loaded, CHECKPOINT | {"config": upgrade_config(CHECKPOINT["config"])})
    assert not is_equal(loaded, make_trained_checkpoint(SHAPE, seed=5))
    model, tokenizer = restore_model(loaded, path)
    original = small_model(SHAPE)
    assert (model.config, tokenizer.sha256) == (original.config, byte_tokenizer().sha256)
    idx = torch.tensor([tokenizer.encode("2 3 5 7 11")])
    with torch.no_grad():
        logits = model(idx)
        assert torch.equal(logits, original(idx))
        assert logits.std() > 0.01


@pytest.mark.promise("runs.md#second process in the same directory")
def test_a_failed_write_leaves_the_folder_as_it_was(path):
    """It fails at a value that cannot be pickled, or halfway, here at a limit on the size of files."""
    for old in (None, b"the old checkpoint"):
        if old:
            path.write_bytes(old)
        with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
            save_checkpoint(CHECKPOINT | {"unpicklable": lambda: 0}, path)
        with limit_file_size(7919):
            line = harness.refusal(save_checkpoint, CHECKPOINT, path)
        assert line == f"{path}: the disk is full: free some space; earlier checkpoints are intact"
        assert [file.read_bytes() for file in path.parent.iterdir()] == ([old] if old else [])


def test_saving_creates_no_run_directory(tmp_path):
    """The folder of the checkpoints is created. A run directory that is missing has been deleted or moved."""
    path = tmp_path / "run/checkpoints/last.ckpt"
    assert "its folder was deleted or moved: put it back" in harness.refusal(save_checkpoint, CHECKPOINT, path)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    save_checkpoint(CHECKPOINT, path)
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_storable_states_come_back(path):
    """Any state that `require_storable` accepts is loaded again. Others are refused with their type."""
    states = [{(1, 2): 3}, {0.5: 1}, torch.zeros(3, dtype=torch.complex64), torch.zeros(1).expand(5)]
    states.append(torch.nn.Parameter(WEIGHT))
    require_storable(states)
    save_checkpoint(CHECKPOINT | {"callbacks": states}, path)
    assert is_equal(load_checkpoint(path)["callbacks"], states)
    for state in (np.float64(2), {2, 3}, path, [1.0, {"mean": b"2"}], {np.int64(3): 5}):
        with pytest.raises(ValueError, match=r"Unsupported: (float64|set|PosixPath|bytes|int64)"):
            require_storable({"state": state})


# --- damage ---


@pytest.mark.parametrize("length", [0, 1, 2, 31, 0.5, 0.9, -22, -1])
def test_a_file_that_is_cut_short_is_refused(path, good_bytes, length):
    path.write_bytes(good_bytes[: int(length * len(good_bytes)) if isinstance(length, float) else length])
    assert "cut short" in refusal(path)


def is_flip_refused(path: Path, content: bytes, position: int, bit: int) -> bool:
    """Flip a bit; return True if the file is refused in one line, and check that otherwise nothing changes."""
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        assert is_equal(load_checkpoint(path), CHECKPOINT), (position, bit)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error), (position, bit)
        return True
    return False


def test_a_flipped_bit_in_any_record_is_refused(path, good_bytes):
    """One bit at the beginning, in the middle and at the end of every record of the archive."""
    path.write_bytes(good_bytes)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert len(records) > len(CHECKPOINT["state_dict"])
    for name, content in records:
        start = good_bytes.index(content, good_bytes.index(name.encode()))
        for position in {start, start + len(content) // 2, start + len(content) - 1}:
            assert is_flip_refused(path, good_bytes, position, position % 8), (name, position)


def test_a_record_marked_as_a_folder_is_refused(path, good_bytes):
    """One bit of the archive's list marks a record as a folder. Its checksum still fits."""
    entry = good_bytes.rindex(b"PK\x01\x02", 0, good_bytes.rindex(b"archive/data/0"))
    assert is_flip_refused(path, good_bytes, entry + 38, 4)  # the external attributes of MS-DOS


# --- files that are no checkpoint, or not of one model ---


def test_other_files_are_refused(tmp_path):
    """A pipe or a device is refused at once instead of being read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "2 3 5 7 11")
    for name, reason in {
        "missing": "cannot be read (No such file or directory)",
        "pipe": "a directory or a device, not a checkpoint; name a file or a run",
        "folder": "a directory or a device, not a checkpoint; name a file or a run",
        "/dev/zero": "a directory or a device, not a checkpoint; name a file or a run",
        "loop": "cannot be read (Too many levels of symbolic links)",
        "a" * 300: "cannot be read (File name too long)",
        "other.zip": "not a checkpoint of this project (",
    }.items():
        assert refusal(tmp_path / name).startswith(reason)


OTHERS = {name: weight for name, weight in CHECKPOINT["state_dict"].items() if name != NAME}
DO_NOT_FIT = "do not fit together ("


def with_shape(**changes: object) -> dict:
    """Return the checkpoint with another configuration of the model."""
    return CHECKPOINT | {"config": {"model": CHECKPOINT["config"]["model"] | changes}}


def with_weights(weights: dict) -> dict:
    """Return the checkpoint with these weights in place of the one called `NAME`."""
    return CHECKPOINT | {"state_dict": OTHERS | weights}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([2, 3, 5], "its 'format' is missing or of another type"),
        (CHECKPOINT | {"format": "gguf"}, "its 'format' is missing or of another type"),
        ({"format": CHECKPOINT_FORMAT, "config": {}, "tokenizer": {}}, "its 'state_dict' is missing"),
        (CHECKPOINT | {"format": CHECKPOINT_FORMAT + 1}, f"(format {CHECKPOINT_FORMAT + 1}); update first"),
        (CHECKPOINT | {"layer": torch.nn.Linear(2, 3)}, "objects other than tensors and plain types"),
        (CHECKPOINT | {"config": {}}, "do not fit together (it has no 'model')"),
        (CHECKPOINT | {"config": {"model": 7}}, DO_NOT_FIT),
        (CHECKPOINT | {"tokenizer": {"name": "byte"}}, DO_NOT_FIT),
        (CHECKPOINT | {"tokenizer": gpt2_tokenizer().to_dict()}, DO_NOT_FIT),
        # A configuration is compared with the weights before any memory or time is spent on it.
        (with_shape(num_heads=0), "model.num_heads=0 is out of range: it must be at least 1"),
        (with_shape(d_model=7 * 10**6), "its configuration describes 588,001,974,000,000 weights, and there are 6,300"),
        (with_shape(context_length=12), "size mismatch for position_embedding.weight"),
        (with_shape(num_layers=True), "its num_layers is True, of type bool"),
        (with_shape(width=7), "its configuration has an unknown key 'width'"),
        # Weights must be finite floating-point numbers of the right names and shapes.
        (with_weights({NAME: 2 * [WEIGHT]}), "'list' object has no attribute 'numel'"),
        (with_weights({NAME: WEIGHT.int()}), f"its {NAME} is of type torch.int32"),
        (with_weights({NAME: WEIGHT * math.nan}), f"its {NAME} is not finite"),
        (with_weights({NAME: torch.where(WEIGHT > 0.01, -1e300, WEIGHT.double())}), f"its {NAME} is not finite"),
        (with_weights({NAME: WEIGHT.T}), f"size mismatch for {NAME}"),
        (with_weights({NAME: WEIGHT.to("meta")}), DO_NOT_FIT),
        (with_weights({NAME: WEIGHT, 7: WEIGHT}), DO_NOT_FIT),
        (with_weights({NAME: WEIGHT, "lora.weight": torch.ones(7)}), 'Unexpected key(s) in state_dict: "lora.weight"'),
        (with_weights({"other": WEIGHT}), f'Missing key(s) in state_dict: "{NAME}"'),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_parts_that_do_not_fit_are_refused(path, content, reason):
    """The file was saved by another program, by a later version of this one, or its parts are of several models."""
    torch.save(content, path)
    assert reason in refusal(path)


def test_weights_of_other_types_become_fp32(path):
    """Weights in 16 or 64 bits, and the ordered dictionary of `Module.state_dict`."""
    model = small_model(SHAPE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
        save_checkpoint(CHECKPOINT | {"state_dict": model.to(dtype).state_dict()}, path)
        loaded = restore_model(load_checkpoint(path), path)[0].state_dict()
        assert is_equal(dict(loaded), {name: weight.float() for name, weight in expected.items()})


def test_weights_whose_sum_overflows_are_finite(path):
    weight = torch.full_like(WEIGHT, 3e38)
    model, _ = restore_model(CHECKPOINT | {"state_dict": CHECKPOINT["state_dict"] | {NAME: weight}}, path)
    assert torch.equal(model.state_dict()[NAME], weight)


# --- hostile files ---


@pytest.mark.promise("security.md#can run code", "security.md#weights_only=True")
def test_a_pickle_is_never_run(tmp_path, path):
    """It may be the whole file, or a record of an archive that has everything else of a checkpoint."""
    trace = tmp_path / "trace"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    assert "another format" in refusal(path)
    save_checkpoint(CHECKPOINT | {"bomb": Bomb(trace)}, path)
    assert "objects other than tensors and plain types" in refusal(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # the bomb works


def test_a_module_named_in_a_checkpoint_is_not_imported(tmp_path, path, monkeypatch):
    """An import would run the module."""
    (tmp_path / "bait.py").write_text("raise SystemExit('caught')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for pickled in (b"\x80\x02cbait\nhook\n.", b"\x80\x04\x8c\x04bait\x8c\x04hook\x93.", b"\x80\x02(ibait\nhook\n."):
        with zipfile.ZipFile(path, "w") as archive:  # as torch writes it, but for its pickle
            for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
                archive.writestr(f"archive/{name}", content)
        assert "not a checkpoint of this project" in refusal(path)
        assert "bait" not in sys.modules
