"""Checkpoints: written whole or not at all, refused in one line when damaged or foreign, and never run as code."""

import os
import pickle
import random
import resource
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt.errors import UserError
from gpt.exchange.checkpoint import FORMAT, load, save, to_model
from gpt.files import link
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.text.tokenizer import byte_tokenizer

MODEL = ModelConfig(context_length=13, d_model=14, num_layers=1, num_heads=7, qkv_bias=False)


def make_payload(seed: int = 3) -> dict:
    """What a training hands to `save`, with random weights and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=257, **asdict(MODEL)))
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(11, 7)}, 1: {"momentum": torch.randn(5)}}
    return {
        "format": FORMAT,
        "state_dict": {name: tensor.detach() for name, tensor in model.state_dict().items()},
        "config": {"model": asdict(MODEL), "seed": seed, "run_dir": None, "prompts": ["2 3 5", "é"]},
        "tokenizer": byte_tokenizer().to_dict(),
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.003, "betas": (0.9, 0.95), "params": [0, 1]}]}],
        "step": 11,
        "corpus": {"format": 1, "corpus": "a hash"},
        "git_commit": "0" * 40,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "threads": 2,
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    """The bytes of a good checkpoint."""
    path = tmp_path_factory.mktemp("good") / "last.ckpt"
    save(make_payload(), path)
    return path.read_bytes()


def refusal(path: Path) -> str:
    """The message with which `load` refuses a file: one line that begins with the path."""
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


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


class Bomb:
    """Pickles as a call that makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


class Spy:
    """Notes what is in a folder, and in the file `target` of it, at the moment it is pickled."""

    def __init__(self, target: Path):
        self.target = target
        self.names: list[str] = []
        self.content = b""

    def __reduce__(self):
        self.names = sorted(os.listdir(self.target.parent))
        self.content = self.target.read_bytes()
        return int, ()


def test_round_trip(tmp_path):
    """Everything saved comes back, and the model built from it gives the very same logits."""
    payload, path = make_payload(), tmp_path / "checkpoints" / "last.ckpt"
    save(payload, path)
    loaded = load(path)
    assert same(loaded, payload)
    assert not same(loaded, make_payload(seed=5))
    model, tokenizer = to_model(loaded)
    original = GPT(GPTConfig(vocab_size=257, **asdict(MODEL)))
    original.load_state_dict(payload["state_dict"])
    assert (model.config, tokenizer.sha256) == (original.config, byte_tokenizer().sha256)
    idx = torch.tensor([tokenizer.encode("2 3 5 7 11")])
    with torch.no_grad():
        logits = model(idx)
        assert torch.equal(logits, original(idx))
        assert logits.std() > 0.01


def test_temporary_file_in_the_same_folder(tmp_path):
    """While a checkpoint is written the old one stands, a hidden file grows beside it, and only one file is left."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"the old one")
    spy = Spy(path)
    save(make_payload() | {"spy": spy}, path)
    assert spy.content == b"the old one"
    assert len(spy.names) == 2
    assert spy.names[0].startswith(".last.ckpt.")
    assert spy.names[1] == "last.ckpt"
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert zipfile.is_zipfile(path)


@pytest.mark.parametrize("old", [None, b"the old one"])
def test_failing_write(tmp_path, old):
    """A payload that cannot be pickled leaves the folder as it was."""
    path = tmp_path / "last.ckpt"
    if old:
        path.write_bytes(old)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save(make_payload() | {"unpicklable": lambda: 0}, path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([old] if old else [])


def test_full_disk(tmp_path):
    """A write that breaks off halfway, here at a limit on the size of files, leaves the old checkpoint alone."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"the old one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    payload = make_payload()
    resource.setrlimit(resource.RLIMIT_FSIZE, (7919, hard))
    try:
        with pytest.raises((OSError, RuntimeError)):
            save(payload, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("last.ckpt", b"the old one")]


def test_full_disk_is_reported(tmp_path, monkeypatch):
    """If the disk has less room than the tensors need, the one line says so, and what has become of the old file."""
    path, payload = tmp_path / "last.ckpt", make_payload()
    path.write_bytes(b"the old one")
    needs = 4 * (sum(weight.numel() for weight in payload["state_dict"].values()) + 1 + 11 * 7 + 5)

    def fail(*arguments) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", fail)
    for free, error in [(needs, UserError), (needs + 1, RuntimeError)]:
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with pytest.raises(error) as caught:
            save(payload, path)
        if error is UserError:
            there = f"the checkpoint needs {needs:,} bytes and there are {free:,} free"
            assert str(caught.value) == f"{path}: the disk is full: {there}; earlier checkpoints are intact"
        assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("last.ckpt", b"the old one")]


def test_link_shares_the_file(tmp_path):
    """Both names are one file, and what the target named before is untouched under its other name."""
    best, last, previous = (tmp_path / f"{name}.ckpt" for name in ("best", "last", "previous"))
    best.write_bytes(b"new")
    last.write_bytes(b"old")
    link(last, previous)
    link(best, last)
    assert best.stat().st_ino == last.stat().st_ino != previous.stat().st_ino
    assert (best.read_bytes(), last.read_bytes(), previous.read_bytes()) == (b"new", b"new", b"old")
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt", "previous.ckpt"]


def test_link_twice(tmp_path):
    """Linking what is linked already changes nothing and leaves nothing behind."""
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    best.write_bytes(b"new")
    link(best, last)
    link(best, last)
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt"]


def contents_while(target: Path, act: Callable[[], None]) -> set[bytes]:
    """Every content that a reader finds in a file while `act` replaces it."""
    found, done = set(), threading.Event()

    def read_again_and_again() -> None:
        while not done.is_set():
            found.add(target.read_bytes() if target.exists() else b"missing")

    reader = threading.Thread(target=read_again_and_again)
    reader.start()
    try:
        act()
    finally:
        done.set()
        reader.join()
    return found


def test_save_replaces_in_one_step(tmp_path):
    """Whoever reads a checkpoint while it is saved over, again and again, finds one or the other, whole."""
    path, payloads, whole = tmp_path / "last.ckpt", [make_payload(3), make_payload(5)], []
    for payload in payloads:
        save(payload, path)
        whole.append(path.read_bytes())
    assert whole[0] != whole[1]

    def save_again_and_again() -> None:
        for i in range(31):
            save(payloads[i % 2], path)

    assert contents_while(path, save_again_and_again) == set(whole)


def test_link_replaces_in_one_step(tmp_path):
    """A link is replaced in one step, too."""
    sources, target = [tmp_path / "a", tmp_path / "b"], tmp_path / "target"
    for i, source in enumerate(sources):
        source.write_bytes(bytes([i]))
    link(sources[1], target)

    def link_again_and_again() -> None:
        for i in range(101):
            link(sources[i % 2], target)

    assert contents_while(target, link_again_and_again) == {b"\x00", b"\x01"}


def test_missing_file(tmp_path):
    """A path that names nothing."""
    assert refusal(tmp_path / "last.ckpt").endswith("there is no such checkpoint")


@pytest.mark.parametrize("kept", [0, 1, 2, 31, 0.5, 0.9, -22, -1])
def test_truncated(tmp_path, written, kept):
    """A file cut short, from nothing at all to all but its last byte."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(written[: int(kept * len(written)) if isinstance(kept, float) else kept])
    assert "cut short" in refusal(path)


def test_flipped_bit_in_every_record(tmp_path, written):
    """One bit at the beginning, in the middle and at the end of every record of the archive is noticed."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(written)
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert len(records) > len(make_payload()["state_dict"])
    for name, content in records:
        first = written.index(content, written.index(name.encode()))
        for place in {first, first + len(content) // 2, first + len(content) - 1}:
            damaged = bytearray(written)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            assert "damaged" in refusal(path), (name, place)


def test_flipped_bit_in_the_directory(tmp_path, written):
    """Every bit of a record's entry in the archive's list, and of its end: refused, or the very same as before."""
    path, payload = tmp_path / "last.ckpt", make_payload()
    entry = written.rindex(b"PK\x01\x02", 0, written.rindex(b"archive/data/0"))
    end = written.rindex(b"PK\x05\x06")
    refused, changed = 0, []
    for place in [*range(entry, entry + 60), *range(end, len(written))]:
        for bit in range(8):
            damaged = bytearray(written)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                if not same(load(path), payload):
                    changed.append((place - entry, bit))
            except UserError as error:
                refused += 1
                assert str(error).startswith(f"{path}: "), place
                assert "\n" not in str(error), place
    assert refused > 211
    assert changed == []


def test_record_marked_as_a_folder(tmp_path, written):
    """One bit of the archive's list makes a folder of a record, whose checksum still fits: it is refused."""
    path = tmp_path / "last.ckpt"
    damaged = bytearray(written)
    entry = written.rindex(b"PK\x01\x02", 0, written.rindex(b"archive/data/0"))
    damaged[entry + 38] ^= 0x10  # the external attributes of MS-DOS: a directory
    path.write_bytes(damaged)
    refusal(path)


def test_flipped_bits_anywhere(tmp_path, written):
    """A flip at any place either is noticed or lies where it changes nothing, in the padding between records."""
    path, payload, draw = tmp_path / "last.ckpt", make_payload(), random.Random(7)
    refused = 0
    for _ in range(211):
        damaged = bytearray(written)
        place = draw.randrange(len(written))
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            assert same(load(path), payload), place
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), place
    assert 150 < refused < 211


def test_foreign_files(tmp_path):
    """Files that are not our checkpoints are refused, and the line says why."""
    text, other_zip = tmp_path / "text", tmp_path / "other.zip"
    text.write_text("2 3 5 7 11\n")
    assert "another format" in refusal(text)
    with zipfile.ZipFile(other_zip, "w") as archive:
        archive.writestr("a.txt", "2 3 5 7 11")
    assert "not a checkpoint of this project" in refusal(other_zip)
    (tmp_path / "folder").mkdir()
    assert "directory" in refusal(tmp_path / "folder")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([2, 3, 5], "it has no 'format'"),
        ({}, "it has no 'format'"),
        (torch.ones(3), "it has no 'format'"),
        (torch.nn.Linear(2, 3).state_dict(), "it has no 'format'"),
        ({"format": 1, "config": {}, "tokenizer": {}}, "it has no 'state_dict'"),
        ({"format": 1, "state_dict": {}, "tokenizer": {}}, "it has no 'config'"),
        ({"format": 1, "state_dict": {}, "config": {}}, "it has no 'tokenizer'"),
        (torch.nn.Linear(2, 3), "objects other than tensors and plain types"),
    ],
    ids=["list", "empty", "tensor", "state-dict", "no-weights", "no-config", "no-tokenizer", "module"],
)
def test_foreign_torch_files(tmp_path, content, reason):
    """What another program saved with torch is refused, and the line says why."""
    path = tmp_path / "last.ckpt"
    torch.save(content, path)
    assert reason in refusal(path)


def test_newer_format(tmp_path):
    """A file of a later version says so; the present format is the last one that loads."""
    path = tmp_path / "last.ckpt"
    save(make_payload() | {"format": 999}, path)
    assert "newer version of this project (format 999); update" in refusal(path)
    save(make_payload() | {"format": FORMAT + 1}, path)
    assert "newer version" in refusal(path)


def test_format_of_another_kind(tmp_path):
    """A foreign file may have all the keys and yet mean something else by them."""
    path = tmp_path / "last.ckpt"
    save(make_payload() | {"format": "gguf"}, path)
    refusal(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict": {"token_embedding.weight": torch.ones(257, 7)}},
        {"config": {}},
        {"config": {"model": {"width": 7}}},
        {"config": {"model": asdict(MODEL) | {"d_model": 0}}},
        {"config": {"model": asdict(MODEL) | {"d_model": 13}}},
        {"config": []},
        {"state_dict": []},
        {"state_dict": dict.fromkeys(make_payload()["state_dict"], 7)},
        {"tokenizer": {"name": "byte"}},
        {"tokenizer": None},
        {"tokenizer": byte_tokenizer().to_dict() | {"pattern": "."}},
    ],
    ids=[
        *("weights", "no-model", "unknown-field", "no-width", "width", "config", "no-weights", "numbers"),
        *("tokenizer", "no-tokenizer", "tokenizer-hash"),
    ],
)
def test_parts_that_do_not_fit(tmp_path, changes):
    """A checkpoint whose parts are not those of one model is refused in one line."""
    path = tmp_path / "last.ckpt"
    save(make_payload() | changes, path)
    with pytest.raises(UserError) as caught:
        to_model(load(path))
    assert "\n" not in str(caught.value)


def test_raw_pickle_is_never_run(tmp_path):
    """A pickle that would run code is refused and not run."""
    path, trace = tmp_path / "last.ckpt", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    assert "another format" in refusal(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # the bomb is a live one


def test_pickle_in_an_archive_is_never_run(tmp_path):
    """A pickle inside an archive that has everything a checkpoint has is refused and not run."""
    path, trace = tmp_path / "last.ckpt", tmp_path / "trace"
    save(make_payload() | {"bomb": Bomb(trace)}, path)
    assert "objects other than tensors and plain types" in refusal(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()
