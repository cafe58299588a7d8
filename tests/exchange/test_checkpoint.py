"""Checkpoints: written whole or not at all, refused in one line when damaged or foreign, and never run as code."""

import math
import os
import pickle
import random
import resource
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt.errors import UserError
from gpt.exchange.assembly import _parameters
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
        with pytest.raises(UserError, match=r"^[^\n]*last.ckpt: the disk is full: .* needs 25,532 bytes") as caught:
            save(payload, path)
        assert str(caught.value).endswith("limit on file sizes allows; earlier checkpoints are intact")
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


@pytest.mark.slow
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


WEIGHTS = make_payload()["state_dict"]
NAME = "blocks.0.feed_forward.expand.weight"
FINITE = WEIGHTS[NAME]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 0}, "model.num_heads=0 is out of range: it must be at least 1"),
        ({"num_heads": 5}, "model.d_model=14 is not divisible by model.num_heads=5"),
        ({"context_length": -4}, "model.context_length=-4 is out of range"),
        ({"dropout": math.nan}, "model.dropout=nan is out of range"),
        ({"num_layers": 10**9}, "in 1,000,000,000 layers, and there are 6,300 in 15 tensors"),
        ({"num_layers": 2}, "in 2 layers"),
        ({"d_model": 7 * 10**6}, "its configuration describes 588,001,974,000,000 weights"),
        ({"context_length": 10**12}, "its configuration describes 14,000,000,0"),
        ({"context_length": 10**600}, "its context_length is a number of 1,994 bits"),
        ({"context_length": 14}, "describes 6,314 weights in 1 layers, and there are 6,300 in 15 tensors"),
        ({"context_length": 12}, "size mismatch for position_embedding.weight"),
        ({"num_layers": True}, "its num_layers is True, of type bool"),
        ({"d_model": 14.0}, "its d_model is 14.0, of type float"),
        ({"qkv_bias": 0}, "its qkv_bias is 0, of type int"),
        ({"num_heads": "7"}, "its num_heads is '7', of type str"),
        ({"width": 7}, "its configuration has an unknown key 'width'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_shapes_that_the_weights_do_not_have(changes, reason):
    """A configuration is compared with the weights before any memory or time is spent on it."""
    payload = make_payload()
    payload["config"]["model"] |= changes
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="do not fit together") as caught:
        to_model(payload)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.perf_counter() - begin < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_masks_that_do_not_fit_into_memory():
    """Few weights may describe a long context, whose masks are the square of it."""
    model = asdict(MODEL) | {"context_length": 10**7, "d_model": 1, "num_heads": 1}
    weights = {f"{i}": torch.empty(10**7 + 300) for i in range(13)}
    with pytest.raises(UserError, match=r"the causal masks of 1 layers for a context of 10,000,000 need 200,000,000,0"):
        to_model(make_payload() | {"config": {"model": model}, "state_dict": weights})


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_parameters_are_counted_without_a_model(qkv_bias):
    """The count that is compared with the weights is that of the model."""
    config = GPTConfig(**asdict(MODEL) | {"qkv_bias": qkv_bias, "num_layers": 3}, vocab_size=257)
    assert _parameters(config) == GPT(config).num_parameters()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (FINITE.to(torch.complex64), "objects other than tensors and plain types"),
        (FINITE.to_sparse(), "objects other than tensors and plain types"),
        (FINITE.to("meta"), "objects other than tensors and plain types"),
        (torch.nn.Parameter(FINITE), "objects other than tensors and plain types"),
        (FINITE.to(torch.float8_e4m3fn), "objects other than tensors and plain types"),
        (torch.zeros(1).expand(10**6, 10**6), "its tensors have 4,000,000,0"),
        (torch.zeros(1).expand(FINITE.shape[0], 10**5), "its tensors have 22,4"),
        (2 * [FINITE], "its weights are not tensors with names"),
        (FINITE.int(), f"its {NAME} is of type torch.int32"),
        (FINITE > 0, f"its {NAME} is of type torch.bool"),
        (FINITE * math.nan, f"its {NAME} is not finite"),
        (torch.where(FINITE > 0.01, math.inf, FINITE), f"its {NAME} is not finite"),
        (torch.where(FINITE > 0.01, -1e300, FINITE.double()), f"its {NAME} is not finite"),
        (FINITE.T, f"size mismatch for {NAME}"),
        (torch.cat([FINITE, FINITE]), f"size mismatch for {NAME}"),
        (FINITE[0], "its configuration describes 6,300 weights in 1 layers, and there are 5,530 in 15 tensors"),
    ],
    ids=[
        *("complex", "sparse", "meta", "parameter", "fp8", "expanded", "expanded-a-little", "list"),
        *("integer", "bool", "nan", "inf", "inf-in-fp32", "transposed", "larger", "smaller"),
    ],
)
def test_foreign_weights(tmp_path, weight, reason):
    """Weights that are not finite floating-point numbers of the right shape, each in memory of its own."""
    path = tmp_path / "last.ckpt"
    save(make_payload() | {"state_dict": WEIGHTS | {NAME: weight}}, path)
    with pytest.raises(UserError) as caught:
        to_model(load(path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({7: FINITE}, "its weights are not tensors with names"),
        (WEIGHTS | {7: FINITE}, "its weights are not tensors with names"),
        ({(2, 3): FINITE}, "objects other than"),
        (WEIGHTS | {"lora.weight": FINITE}, 'Unexpected key(s) in state_dict: "lora.weight"'),
        (
            {name: w for name, w in WEIGHTS.items() if name != NAME} | {"a": FINITE},
            f'Missing key(s) in state_dict: "{NAME}"',
        ),
    ],
    ids=["integer", "one-integer", "tuple", "extra", "missing"],
)
def test_foreign_names_of_weights(tmp_path, weights, reason):
    """Names that are no names, that the model does not have, or that it lacks."""
    path = tmp_path / "last.ckpt"
    save(make_payload() | {"state_dict": weights}, path)
    with pytest.raises(UserError) as caught:
        to_model(load(path))
    assert reason in str(caught.value)


def test_great_weights_are_finite():
    """Weights whose sum overflows are finite all the same."""
    weight = torch.full_like(FINITE, 3e38)
    model, _ = to_model(make_payload() | {"state_dict": WEIGHTS | {NAME: weight}})
    assert torch.equal(model.state_dict()[NAME], weight)


def test_half_precision_and_metadata_are_taken(tmp_path):
    """Weights in 16 or 64 bits, and the ordered dictionary of `Module.state_dict`, load as ever."""
    path, model = tmp_path / "last.ckpt", GPT(GPTConfig(vocab_size=257, **asdict(MODEL)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        expected = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
        save(make_payload() | {"state_dict": model.to(dtype).state_dict()}, path)
        loaded = to_model(load(path))[0].state_dict()
        assert same(dict(loaded), {name: weight.float() for name, weight in expected.items()})


def write_archive(path: Path, pickled: bytes, packing: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    """An archive as torch writes it, but for its pickle."""
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", content)
    return path


DEEP = 300_000
HOSTILE = {
    "lists": b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "tuples": b"\x80\x02)" + b"\x85" * DEEP + b".",
    "a-tuple-as-a-key": b"\x80\x02})" + b"\x85" * DEEP + b"Ns.",  # hashing it would overflow the stack
    "tuples-by-memo": b"\x80\x02})" + b"\x85q\x00h\x00" * DEEP + b"Ns.",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "dictionaries-in-themselves": b"\x80\x02}q\x00K\x01h\x00s.",
    "doubling": b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b".",
    "many": b"\x80\x02](" + b"}" * 1_500_000 + b"e.",
    "a-great-string": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "quantized": b"\x80\x02ctorch._utils\n_rebuild_qtensor\n)R.",
    "bytearray": b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.",
    "storage": b"\x80\x02ctorch\nUntypedStorage\nJ\x00\x00\x00\x7f\x85R.",
    "storage-of-floats": b"\x80\x02ctorch\nFloatStorage\nJ\x00\x00\x00\x7f\x85R.",
    "tensor": b"\x80\x02ctorch\nTensor\nJ\x00\x00\x00\x7f\x85R.",
    "function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.",
    "set": b"\x80\x04\x8f.",
    "nothing": b"",
    "underflow": b"\x80\x02a.",
    "attributes": b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.",
    "a-great-number": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("error")
def test_hostile_pickles(tmp_path, name):
    """Pickles that nest or grow without end, or call for gigabytes, are refused in a moment."""
    path = write_archive(tmp_path / "last.ckpt", HOSTILE[name])
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refusal(path)
    assert "not a checkpoint of this project" in message
    assert len(message) < 500
    assert time.perf_counter() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KB


@pytest.mark.filterwarnings("error")
def test_hostile_archives(tmp_path):
    """Packed records, which may be bombs, two of one name, and programs for PyTorch are refused."""
    path, empty = tmp_path / "last.ckpt", pickle.dumps({}, protocol=2)
    write_archive(path, empty, zipfile.ZIP_DEFLATED, **{"data/0": bytes(50_000_000)})
    assert path.stat().st_size < 60_000
    assert "its records are packed, or larger than the file" in refusal(path)
    write_archive(path, empty)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data.pkl", pickle.dumps({"format": 1}, protocol=2))
    assert "two of its records have the same name" in refusal(path)
    assert "not a checkpoint" in refusal(write_archive(path, empty, **{"constants.pkl": empty}))


def test_sizes_that_the_records_do_not_have(tmp_path, written):
    """A tensor that claims more numbers than its record holds would show other memory: it is refused."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(written)
    with zipfile.ZipFile(path) as archive:
        records = {name.removeprefix("archive/"): archive.read(name) for name in archive.namelist()}
    pickled = records.pop("data.pkl")
    assert same(load(write_archive(path, pickled, **records)), make_payload())
    refused = 0
    for place in range(len(pickled) - 1):
        if pickled[place : place + 1] in (b"K", b"M") and 2 <= pickled[place + 1] < 250:
            mutated = pickled[: place + 1] + bytes([pickled[place + 1] + 3]) + pickled[place + 2 :]
            try:
                load(write_archive(path, mutated, **records))
            except UserError as error:
                refused += "larger" in str(error) or "size" in str(error) or "bounds" in str(error)
    assert refused > 20


def test_nothing_is_imported(tmp_path, monkeypatch):
    """A module that a checkpoint names is not imported, which would run it."""
    (tmp_path / "bait.py").write_text("raise SystemExit('caught')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for pickled in (b"\x80\x02cbait\nhook\n.", b"\x80\x04\x8c\x04bait\x8c\x04hook\x93.", b"\x80\x02(ibait\nhook\n."):
        assert "not a checkpoint of this project" in refusal(write_archive(tmp_path / "last.ckpt", pickled))
        assert "bait" not in sys.modules


def test_not_a_file(tmp_path):
    """A pipe or a device is refused rather than waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "not a checkpoint; name a file or a run" in refusal(tmp_path / "pipe")
    assert "not a checkpoint; name a file or a run" in refusal(Path("/dev/zero"))
    assert "cannot be read (Too many levels of symbolic links)" in refusal(tmp_path / "loop")
    assert "cannot be read (File name too long)" in refusal(tmp_path / ("a" * 300))


def test_save_makes_no_run_directory(tmp_path):
    """The folder of the checkpoints is made, but not the run directory: that was there, and somebody has deleted it."""
    gone = tmp_path / "run"
    with pytest.raises(
        UserError, match=r"^[^\n]*last.ckpt: cannot be written, because its folder was deleted or moved"
    ):
        save(make_payload(), gone / "checkpoints/last.ckpt")
    assert not gone.exists()
    gone.mkdir()
    save(make_payload(), gone / "checkpoints/last.ckpt")
    assert os.listdir(gone / "checkpoints") == ["last.ckpt"]


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
