"""Mutated checkpoints and Hugging Face folders: the same model as before, or one line; nothing else ever happens."""

import contextlib
import copy
import json
import math
import pickle
import resource
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.errors import UserError
from gpt.exchange import checkpoint, huggingface
from gpt.exchange.opening import open_model, open_tokenizer
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.text.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow
MODEL = ModelConfig(context_length=13, d_model=14, num_layers=2, num_heads=7)
OFTEN = settings(
    max_examples=250,
    deadline=20_000,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SLACK = 300_000_000  # bytes of memory beyond twice the file

NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 13, 14, 2**31, 2**63, 10**9, 10**30, 10**600, 0.5, math.nan, math.inf, -0.0])
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from([None, True, False, "", "7", "x" * 100_000, "\x00", "\ud800", [], {}, (), [[]], {"a": 1}, {3: 5}]),
    st.sampled_from([b"bytes", {2, 3}, 2 + 3j, range(3), torch.float32, torch.Size([2]), slice(3)]),
)


def tensors(old: torch.Tensor) -> st.SearchStrategy:
    """Other tensors in the place of one."""
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda w: w.clone(),
        lambda w: w.double(),
        lambda w: w.bfloat16(),
        lambda w: w.to(torch.float8_e4m3fn),
        lambda w: w.int(),
        lambda w: w > 0,
        lambda w: w.to(torch.complex64),
        lambda w: w * math.nan,
        lambda w: w / 0.0,
        lambda w: w.double() * 1e200,
        lambda w: w.to_sparse(),
        lambda w: w.to("meta"),
        lambda w: torch.nn.Parameter(w),
        lambda w: w.clone().requires_grad_(),
        lambda w: w.T if w.dim() == 2 else w[None],
        lambda w: w.T.contiguous().T if w.dim() == 2 else w,
        lambda w: w[:-1],
        lambda w: w[None],
        lambda w: w.flatten(),
        lambda w: torch.cat([w, w]),
        lambda w: w[:1].expand(w.shape),
        lambda w: torch.zeros(1).expand(10**6, 10**6),
        lambda w: torch.zeros(0),
        lambda w: torch.tensor(2.0),
        lambda w: w.tolist(),
        lambda w: torch.nested.nested_tensor([w.flatten(), w.flatten()[:1]]),
        lambda w: w.untyped_storage(),
    ]

    def changed(change: Callable[[torch.Tensor], Any]) -> Any:
        with warnings.catch_warnings(action="ignore"):  # of what is deprecated, or loses a part
            return change(old)

    return st.sampled_from(changes).map(changed)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a nested structure, but the root."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return [path]
    return ([path] if path else []) + [place for key, inner in pairs for place in places(inner, (*path, key))]


def mutate(payload: dict, data: st.DataObject) -> None:
    """Change one to three places of a structure: replace, remove, rename, double or move a value."""
    for _ in range(data.draw(st.integers(1, 3))):
        *path, key = data.draw(st.sampled_from(places(payload)))
        parent: Any = payload
        for step in path:
            parent = parent[step]
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "rename", "share", "nest", "itself"]))
        old = parent[key]
        if kind == "replace":
            parent[key] = data.draw(tensors(old) if isinstance(old, torch.Tensor) else VALUES)
        elif kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[data.draw(st.sampled_from([7, "", "x", (2, 3), None, "a" * 10_000, 2.0, f"{key}_"]))] = parent.pop(
                key
            )
        elif kind == "share":
            other = data.draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
            parent[other] = old
        elif kind == "nest":
            for _ in range(data.draw(st.sampled_from([1, 50, 300]))):
                parent[key] = [parent[key]]
        elif kind == "itself" and isinstance(old, dict | list):
            parent[key] = parent


def outcome(open_it: Callable[[], GPT], *files: Path) -> str | dict[str, torch.Tensor]:
    """The one line of a refusal, or the weights of the model; anything else fails, and so does a changed file."""
    before = {file: file.read_bytes() for file in files}
    size = sum(map(len, before.values()))
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        result: str | dict = open_it().state_dict()
    except UserError as error:
        result = str(error)
        assert "\n" not in result
        assert len(result) < 1000
    assert time.perf_counter() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory < 2 * size + SLACK
    assert {file: file.read_bytes() for file in files} == before
    return result


def require_same(result: str | dict, expected: dict[str, torch.Tensor]) -> None:
    """A model that did open has the bits of the original."""
    if isinstance(result, dict):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def make_payload() -> dict:
    torch.manual_seed(3)
    weights = {name: w.detach() for name, w in GPT(GPTConfig(vocab_size=257, **asdict(MODEL))).state_dict().items()}
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(11, 7)}, 1: {"momentum": torch.randn(5)}}
    group = {"lr": 0.003, "betas": (0.9, 0.95), "params": [0, 1]}
    return {
        "format": 1,
        "state_dict": weights,
        "config": {"model": asdict(MODEL), "seed": 3, "prompts": ["2 3 5", "é"]},
        "tokenizer": byte_tokenizer().to_dict(),
        "optimizer_states": [{"state": state, "param_groups": [group]}],
        "step": 11,
    }


ORIGINAL = make_payload()


def open_checkpoint(file: Path) -> GPT:
    """Open its tokenizer, which may be intact where the weights are not, and then the model."""
    with contextlib.suppress(UserError):
        open_tokenizer(file)
    return open_model(file)[0]


@settings(OFTEN, max_examples=400)
@given(data=st.data())
def test_structure_of_checkpoints(tmp_path, data):
    """Payloads with other values, types, names, tensors and nesting.

    A model that opens has weights that the file holds, under the names and in the shapes of its own configuration.
    """
    payload, file = copy.deepcopy(ORIGINAL), tmp_path / "last.ckpt"
    try:
        mutate(payload, data)
        torch.save(payload, file)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, RecursionError, IndexError, UnicodeError):
        reject()  # a mutation that cannot be made or written
    result = outcome(lambda: open_checkpoint(file), file)
    if isinstance(result, dict):
        held = payload["state_dict"]
        assert result.keys() == held.keys()
        assert all(torch.equal(result[name], held[name].float()) for name in held)


@OFTEN
@given(data=st.data())
def test_bytes_of_checkpoints(tmp_path_factory, data):
    """Files with bytes changed, cut out or put in, in the pickle with its checksum made right again."""
    folder = tmp_path_factory.mktemp("bytes")
    file = folder / "last.ckpt"
    checkpoint.save(ORIGINAL, file)
    within_pickle = data.draw(st.booleans())
    if within_pickle:
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        content = bytearray(records["archive/data.pkl"])
    else:
        content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place, count = data.draw(st.integers(0, len(content) - 1)), data.draw(st.sampled_from([0, 1, 1, 1, 7, 1000]))
        content[place : place + count] = data.draw(st.binary(min_size=0, max_size=8))
    if within_pickle:
        with zipfile.ZipFile(file, "w") as archive:
            for name, record in records.items():
                archive.writestr(name, bytes(content) if name == "archive/data.pkl" else record)
    else:
        file.write_bytes(content)
    result = outcome(lambda: open_checkpoint(file), file)
    if not within_pickle:
        require_same(result, ORIGINAL["state_dict"])
    shutil.rmtree(folder)


@settings(OFTEN, max_examples=100)
@given(
    operations=st.lists(
        st.sampled_from([*b"(]}ah\x85\x86tsuq\x00\x01NK\x02R.be)\x88Q", *range(0x80, 0x96)]), max_size=60
    )
)
def test_random_pickles(tmp_path, operations):
    """Any sequence of a pickle's operations is refused."""
    file = tmp_path / "last.ckpt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + bytes(operations) + b".")
        archive.writestr("archive/version", b"3\n")
    assert isinstance(outcome(lambda: open_checkpoint(file), file), str)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A small GPT-2 as `transformers` saves it."""
    folder = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(5)
    GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=13, n_embd=21, n_layer=2, n_head=3)).save_pretrained(folder)
    return folder


@OFTEN
@given(data=st.data())
def test_huggingface_folders(theirs, tmp_path_factory, data):
    """Values of config.json, tensors, and bytes of either file."""
    folder = Path(shutil.copytree(theirs, tmp_path_factory.mktemp("mutated"), dirs_exist_ok=True))
    config, weights = folder / "config.json", folder / "model.safetensors"
    expected = huggingface.load_directory(theirs).state_dict()
    kind = data.draw(st.sampled_from(["config", "config", "tensors", "bytes"]))
    try:
        if kind == "config":
            stored = json.loads(config.read_text())
            used = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner", "model_type"]
            for _ in range(data.draw(st.integers(1, 2))):
                key = data.draw(st.sampled_from([*used, *stored]))
                stored[key] = data.draw(VALUES)
            config.write_text(json.dumps(stored))
        elif kind == "tensors":
            held = load_file(weights)
            name = data.draw(st.sampled_from(sorted(held)))
            held[name] = data.draw(tensors(held[name]))
            save_file(held, weights)
        else:
            file = data.draw(st.sampled_from([config, weights]))
            content = bytearray(file.read_bytes())
            place = data.draw(st.integers(0, min(len(content) - 1, 4000)))
            content[place : place + data.draw(st.sampled_from([0, 1, 7]))] = data.draw(st.binary(max_size=8))
            file.write_bytes(content)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, OverflowError, KeyError):
        reject()  # a mutation that cannot be made or written
    result = outcome(lambda: huggingface.load_directory(folder), config, weights)
    if kind == "config" and isinstance(result, dict):
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    shutil.rmtree(folder)


def test_mutations_matter():
    """The mutations can be pickled, or the tests above would test nothing."""
    assert len(places(ORIGINAL)) > 50
    assert pickle.loads(pickle.dumps(ORIGINAL["config"])) == ORIGINAL["config"]
