"""Checkpoints: written whole or not at all, refused in one line when damaged or foreign, and never run as code."""

import functools
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harness
from gpt.checkpoint import CHECKPOINT_FORMAT, load_checkpoint, require_storable, restore_model, save_checkpoint
from gpt.checkpoint_formats import upgrade_config
from gpt.data.tokenizer import byte_tokenizer
from gpt.errors import UserError
from gpt.model.transformer import ModelConfig
from model_files import Bomb, limit_file_size, make_trained_checkpoint, small_model

SHAPE = ModelConfig(context_length=13, d_model=14, num_layers=1, num_heads=7, qkv_bias=False)
make_payload = functools.partial(make_trained_checkpoint, SHAPE)
PATH = Path("last.ckpt")  # of payloads that never were on disk


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    """The bytes of a good checkpoint."""
    path = tmp_path_factory.mktemp("good") / "last.ckpt"
    save_checkpoint(make_payload(), path)
    return path.read_bytes()


def refusal(path: Path) -> str:
    """The one line with which `load_checkpoint` or else `restore_model` refuses a file."""
    return harness.refusal(lambda: restore_model(load_checkpoint(path), path))


def same(one: Any, other: Any) -> bool:
    """Whether two payloads are equal, order of keys, types and tensors included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# --- writing ---


def test_round_trip(tmp_path):
    """Everything saved comes back, and the model built from it gives the very same logits."""
    payload, path = make_payload(), tmp_path / "checkpoints" / "last.ckpt"
    save_checkpoint(payload, path)
    loaded = load_checkpoint(path)
    assert same(loaded, payload | {"config": upgrade_config(payload["config"])})
    assert not same(loaded, make_payload(seed=5))
    model, tokenizer = restore_model(loaded, path)
    original = small_model(SHAPE)
    assert (model.config, tokenizer.sha256) == (original.config, byte_tokenizer().sha256)
    idx = torch.tensor([tokenizer.encode("2 3 5 7 11")])
    with torch.no_grad():
        logits = model(idx)
        assert torch.equal(logits, original(idx))
        assert logits.std() > 0.01


@pytest.mark.parametrize("old", [None, b"the old one"])
def test_failing_write(tmp_path, old):
    """A payload that cannot be pickled leaves the folder as it was."""
    path = tmp_path / "last.ckpt"
    if old:
        path.write_bytes(old)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save_checkpoint(make_payload() | {"unpicklable": lambda: 0}, path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([old] if old else [])


def test_full_disk(tmp_path):
    """A write that breaks off halfway, here at a limit on the size of files, leaves the old checkpoint alone."""
    path, payload = tmp_path / "last.ckpt", make_payload()
    path.write_bytes(b"the old one")
    with limit_file_size(7919):
        line = harness.refusal(save_checkpoint, payload, path)
    assert line == f"{path}: the disk is full: free some space; earlier checkpoints are intact"
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("last.ckpt", b"the old one")]


def test_save_makes_no_run_directory(tmp_path):
    """The folder of the checkpoints is made, but not the run directory: that was there, and somebody has deleted it."""
    gone = tmp_path / "run"
    line = harness.refusal(save_checkpoint, make_payload(), gone / "checkpoints/last.ckpt")
    assert "last.ckpt: cannot be written, because its folder was deleted or moved" in line
    assert not gone.exists()
    gone.mkdir()
    save_checkpoint(make_payload(), gone / "checkpoints/last.ckpt")
    assert os.listdir(gone / "checkpoints") == ["last.ckpt"]


def test_state_that_can_be_stored(tmp_path):
    """What `require_storable` lets through comes back; anything else is refused with its type."""
    odd = [
        {(1, 2): 3},
        {0.5: 1},
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(1).expand(5),
        torch.nn.Parameter(FINITE),
    ]
    require_storable(odd)
    save_checkpoint(make_payload() | {"callbacks": odd}, tmp_path / "last.ckpt")
    assert same(load_checkpoint(tmp_path / "last.ckpt")["callbacks"], odd)
    for value in (np.float64(2), {2, 3}, tmp_path, [1.0, {"mean": b"2"}], {np.int64(3): 5}):
        with pytest.raises(ValueError, match=r"Unsupported: (float64|set|PosixPath|bytes|int64)"):
            require_storable({"state": value})


# --- damage ---


@pytest.mark.parametrize("kept", [0, 1, 2, 31, 0.5, 0.9, -22, -1])
def test_truncated(tmp_path, written, kept):
    """A file cut short, from nothing at all to all but its last byte."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(written[: int(kept * len(written)) if isinstance(kept, float) else kept])
    assert "cut short" in refusal(path)


def flip(path: Path, written: bytes, places: Iterable[tuple[int, int]]) -> int:
    """Flip bits one by one: each is refused in one line, or changes nothing. Return how many were refused."""
    payload, refused = make_payload(), 0
    for place, bit in places:
        damaged = bytearray(written)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            assert same(load_checkpoint(path), payload), (place, bit)
        except UserError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), (place, bit)
    return refused


def test_flipped_bit_in_every_record(tmp_path, written):
    """One bit at the beginning, in the middle and at the end of every record of the archive is noticed."""
    (tmp_path / "good").write_bytes(written)
    with zipfile.ZipFile(tmp_path / "good") as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert len(records) > len(make_payload()["state_dict"])
    places = set()
    for name, content in records:
        first = written.index(content, written.index(name.encode()))
        places |= {first, first + len(content) // 2, first + len(content) - 1}
    assert flip(tmp_path / "last.ckpt", written, [(place, place % 8) for place in places]) == len(places)


def test_record_marked_as_a_folder(tmp_path, written):
    """One bit of the archive's list makes a folder of a record, whose checksum still fits: it is refused."""
    entry = written.rindex(b"PK\x01\x02", 0, written.rindex(b"archive/data/0"))
    assert flip(tmp_path / "last.ckpt", written, [(entry + 38, 4)]) == 1  # the external attributes of MS-DOS


# --- what is no checkpoint, or not of one model ---


def test_not_a_checkpoint(tmp_path):
    """What is missing, no file, or another format is named; a pipe or a device is refused rather than waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "text").write_text("2 3 5 7 11\n")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "2 3 5 7 11")
    for name, reason in {
        "missing": "cannot be read (No such file or directory)",
        "pipe": "a directory or a device, not a checkpoint; name a file or a run",
        "folder": "a directory or a device, not a checkpoint; name a file or a run",
        "/dev/zero": "a directory or a device, not a checkpoint; name a file or a run",
        "loop": "cannot be read (Too many levels of symbolic links)",
        "a" * 300: "cannot be read (File name too long)",
        "text": "not a checkpoint of this project (it is cut short or in another format)",
        "other.zip": "not a checkpoint of this project (",
    }.items():
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: {reason}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([2, 3, 5], "its 'format' is missing or of another type"),
        ({"format": CHECKPOINT_FORMAT, "config": {}, "tokenizer": {}}, "its 'state_dict' is missing"),
        (make_payload() | {"format": "gguf"}, "its 'format' is missing or of another type"),
        (
            make_payload() | {"format": CHECKPOINT_FORMAT + 1},
            f"written by a newer version of this project (format {CHECKPOINT_FORMAT + 1})",
        ),
        (make_payload() | {"layer": torch.nn.Linear(2, 3)}, "objects other than tensors and plain types"),
    ],
)
def test_foreign_torch_files(tmp_path, content, reason):
    """What another program, or a later version of this one, saved with torch is refused, and the line says why."""
    torch.save(content, tmp_path / "last.ckpt")
    line = refusal(tmp_path / "last.ckpt")
    assert line.startswith(f"{tmp_path / 'last.ckpt'}: ") and reason in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 0}, "model.num_heads=0 is out of range: it must be at least 1"),
        ({"d_model": 7 * 10**6}, "its configuration describes 588,001,974,000,000 weights, and there are 6,300"),
        ({"context_length": 12}, "size mismatch for position_embedding.weight"),
        ({"num_layers": True}, "its num_layers is True, of type bool"),
        ({"d_model": 14.0}, "its d_model is 14.0, of type float"),
        ({"width": 7}, "its configuration has an unknown key 'width'"),
    ],
)
def test_shapes_that_the_weights_do_not_have(changes, reason):
    """A configuration is compared with the weights before any memory or time is spent on it."""
    payload = make_payload()
    payload["config"]["model"] |= changes
    line = harness.refusal(restore_model, payload, PATH)
    assert line.startswith(f"{PATH}: the checkpoint's tokenizer, configuration and weights do not fit together (")
    assert reason in line and len(line) < 500


def test_other_parts_that_do_not_fit():
    """Parts that are not those of one model are refused in one line."""
    for changes in (
        {"config": {}},
        {"config": {"model": 7}},
        {"state_dict": dict.fromkeys(make_payload()["state_dict"], 7)},
        {"tokenizer": {"name": "byte"}},
        {"tokenizer": byte_tokenizer().to_dict() | {"pattern": "."}},
    ):
        assert "do not fit together (" in harness.refusal(restore_model, make_payload() | changes, PATH)


WEIGHTS = make_payload()["state_dict"]
NAME = "blocks.0.feed_forward.expand.weight"
FINITE = WEIGHTS[NAME]
REST = {name: weight for name, weight in WEIGHTS.items() if name != NAME}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({NAME: 2 * [FINITE]}, "'list' object has no attribute 'numel'"),
        ({NAME: FINITE.int()}, f"its {NAME} is of type torch.int32"),
        ({NAME: FINITE * math.nan}, f"its {NAME} is not finite"),
        ({NAME: torch.where(FINITE > 0.01, -1e300, FINITE.double())}, f"its {NAME} is not finite"),
        ({NAME: FINITE.T}, f"size mismatch for {NAME}"),
        ({NAME: FINITE.to("meta")}, "do not fit together"),
        ({NAME: FINITE, 7: FINITE}, "do not fit together"),
        ({NAME: FINITE, "lora.weight": torch.ones(7)}, 'Unexpected key(s) in state_dict: "lora.weight"'),
        ({"other": FINITE}, f'Missing key(s) in state_dict: "{NAME}"'),
    ],
)
def test_foreign_weights(tmp_path, weights, reason):
    """Weights that are not finite floating-point numbers of the right names and shapes."""
    save_checkpoint(make_payload() | {"state_dict": REST | weights}, tmp_path / "last.ckpt")
    assert reason in refusal(tmp_path / "last.ckpt")


def test_great_weights_are_finite():
    """Weights whose sum overflows are finite all the same."""
    weight = torch.full_like(FINITE, 3e38)
    model, _ = restore_model(make_payload() | {"state_dict": WEIGHTS | {NAME: weight}}, PATH)
    assert torch.equal(model.state_dict()[NAME], weight)


def test_half_precision_and_metadata_are_taken(tmp_path):
    """Weights in 16 or 64 bits, and the ordered dictionary of `Module.state_dict`, load as ever."""
    path, model = tmp_path / "last.ckpt", small_model(SHAPE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
        save_checkpoint(make_payload() | {"state_dict": model.to(dtype).state_dict()}, path)
        loaded = restore_model(load_checkpoint(path), path)[0].state_dict()
        assert same(dict(loaded), {name: weight.float() for name, weight in expected.items()})


# --- hostile files ---


def test_pickle_in_an_archive_is_never_run(tmp_path):
    """A pickle, alone or inside an archive that has everything a checkpoint has, is refused and not run."""
    path, trace = tmp_path / "last.ckpt", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    assert "another format" in refusal(path)
    save_checkpoint(make_payload() | {"bomb": Bomb(trace)}, path)
    assert "objects other than tensors and plain types" in refusal(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # the bomb is a live one


def test_nothing_is_imported(tmp_path, monkeypatch):
    """A module that a checkpoint names is not imported, which would run it."""
    (tmp_path / "bait.py").write_text("raise SystemExit('caught')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "last.ckpt"
    for pickled in (b"\x80\x02cbait\nhook\n.", b"\x80\x04\x8c\x04bait\x8c\x04hook\x93.", b"\x80\x02(ibait\nhook\n."):
        with zipfile.ZipFile(path, "w") as archive:  # as torch writes it, but for its pickle
            for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
                archive.writestr(f"archive/{name}", content)
        assert "not a checkpoint of this project" in refusal(path)
        assert "bait" not in sys.modules
