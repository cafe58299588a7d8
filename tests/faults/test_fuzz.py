"""Files are changed at random. The result is the same bits or one line, never another error, and no other file changes.

A few examples run with the slow tests. pytest -m faults tries hundreds.
"""

import contextlib
import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.checkpoint import load_checkpoint, save_checkpoint
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import Tokenizer, TokenizerConfig
from gpt.errors import UserError
from gpt.interop.huggingface import load_huggingface_weights
from gpt.loading import open_model
from gpt.model.transformer import GPT, GPTConfig
from harness import train
from models import gpt2_twin, make_trained_checkpoint

RUN = ["horizon=23steps", "trainer.validate_every=7", "trainer.checkpoint_every=5", "data.prompts=[]"]
STOP = 13
MAX_EXAMPLE_SECONDS = 20

CONTENTS = [b"", b"null", b"7", b'"a"', b"[]", b"{}", b'{"seal": null}', b"\xff\xfe{", bytes(1000)]
CONTENTS += [b'{"a": 1' + b"0" * 5000 + b"}", b"\xef\xbb\xbf{}", b"NaN", b'{"splits": {}}']
INSERTIONS = st.sampled_from([b"- {", b"${oc.env:HOME}", b": [", b"9" * 30, b"\n"]) | st.binary(min_size=1, max_size=9)


def repeat(few: int, many: int) -> pytest.MarkDecorator:
    """Run a test with a few examples, and with -m faults with many."""
    counts = [pytest.param(few, marks=pytest.mark.slow), pytest.param(many, marks=pytest.mark.faults)]
    return pytest.mark.parametrize("examples", counts)


def fuzz(examples: int, attack: Callable[[Callable], bool]) -> None:
    """Call `attack` with a function that draws values. Both of its results must occur: True, or False if it is refused.

    Args:
        examples: the number of calls.
        attack: the function.
    """
    results = []

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def run(data):
        start = time.monotonic()
        results.append(attack(data.draw))
        assert time.monotonic() - start < MAX_EXAMPLE_SECONDS

    run()
    assert len(results) >= examples * 0.8
    assert min(results.count(True), results.count(False)) > examples // 60


def mutate_bytes(content: bytes, draw: Callable) -> bytes:
    """Return bytes with one change."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    change = draw(st.sampled_from(["flip", "cut", "insert", "remove", "overwrite", "double", "replace"]))
    if change == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if change == "cut":
        return content[:at]
    if change == "insert":
        return content[:at] + draw(INSERTIONS) + content[at:]
    if change == "remove":
        return content[:at] + content[at + draw(st.integers(1, 99)) :]
    if change == "overwrite":
        new = draw(INSERTIONS)
        return content[:at] + new + content[at + len(new) :]
    return content * 2 if change == "double" else draw(st.sampled_from(CONTENTS))


def mutate(file: Path, draw: Callable) -> None:
    """Make one change to the bytes of a file, or put nothing, a folder or a broken link in its place."""
    content = file.read_bytes()
    change = draw(st.sampled_from(["bytes"] * 10 + ["nothing", "folder", "link"]))
    file.unlink()  # two checkpoints may be one file
    if change == "bytes":
        file.write_bytes(mutate_bytes(content, draw))
    elif change == "folder":
        file.mkdir()
    elif change == "link":
        file.symlink_to("nowhere")


# --- prepared text ---


@contextlib.contextmanager
def small_parts() -> Iterator[pytest.MonkeyPatch]:
    """Let a small text have many chunks, tasks and shards, be read twice, and be remembered at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt.data.split.SAMPLE_BYTES", 2003)
        patch.setattr("gpt.data.shards.TASK_CHARS", 199)
        patch.setattr("gpt.data.scan.SHARD_BYTES", 1511)
        patch.setattr("gpt.data.file_hashes.REMEMBERED_BYTES", 11)
        patch.setattr("gpt.data.file_hashes.time", SimpleNamespace(time=lambda: time.time() + 60))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield patch


def prepare_text(folder: Path, cache: Path) -> TokenDataset:
    """Prepare the first text of a folder, or both for a cache named "mixed"."""
    if cache.name.startswith("mixed"):
        data = DataConfig("mix", [str(folder / "one"), str(folder / "two")], [1, 2])
        tokenizer = TokenizerConfig("bpe", 307)
    else:
        data = DataConfig("text", str(folder / "one"))
        tokenizer = TokenizerConfig("byte")
    return prepare(data, tokenizer, 13, cache, print_line=[].append)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Return a folder with two texts, and their caches: prepared, interrupted and mixed."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("one", "two"):
        (folder / name).mkdir()
        for i in range(3):
            documents = [f"The {name} text number {j} of file {i} says café. " * (1 + j % 3) for j in range(29)]
            lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
            (folder / name / f"{i}.jsonl").write_text(lines)
    encode_chunk = Tokenizer.encode_chunk
    chunks = []

    def interrupted(tokenizer, chunk):
        chunks.append(chunk)
        if len(chunks) == 67:
            raise MemoryError
        return encode_chunk(tokenizer, chunk)

    with small_parts() as patch:
        prepare_text(folder, folder / "prepared")
        prepare_text(folder, folder / "mixed")
        patch.setattr(Tokenizer, "encode_chunk", interrupted)
        with pytest.raises(MemoryError):
            prepare_text(folder, folder / "interrupted")
    return folder


def read_files(folder: Path, pattern: str = "*") -> dict[Path, bytes]:
    """Return the content of all files in a folder, also in its folders."""
    return {file: file.read_bytes() for file in folder.rglob(pattern) if file.is_file()}


@repeat(60, 350)
@pytest.mark.parametrize(
    ("state", "patterns"),
    [
        ("prepared", ["*/*.json", "*/*.bin", "hashes.json"]),
        ("interrupted", [".preparing-*/*"]),
        ("mixed", ["tokenizer-*.json", "*/tokenizer.json", "*/dataset.json"]),
    ],
    ids=["prepared", "interrupted", "mixed"],
)
def test_prepared_text(texts, tmp_path, state, patterns, examples):
    """The one line names the file or its folder."""
    text_files = read_files(texts, "*.jsonl")
    cache = tmp_path / state
    expected = prepare_text(texts, texts / ("mixed" if state == "mixed" else "prepared"))

    def attack(draw: Callable) -> bool:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(texts / state, cache)
        candidates = [file for pattern in patterns for file in sorted(cache.glob(pattern)) if file.is_file()]
        file = draw(st.sampled_from(candidates))
        mutate(file, draw)
        others = read_files(cache)
        others.pop(file, None)
        try:
            dataset = prepare_text(texts, cache)
        except (UserError, IsADirectoryError) as error:  # of the second, `clean_exit` makes a line as well
            assert "\n" not in str(error)
            assert str(cache) in str(error)
            dataset = None
        assert read_files(texts, "*.jsonl") == text_files
        for other, content in others.items():
            is_unfinished = ".preparing-" in str(other.parent)
            if not is_unfinished and other.suffix != ".lock" and other.name != "hashes.json":
                assert other.read_bytes() == content
        if dataset is None:
            return False
        assert dataset.key == expected.key
        for source, true in zip(dataset.sources, expected.sources, strict=True):
            assert source.train[:].tolist() == true.train[:].tolist()
            assert source.validation[:].tolist() == true.validation[:].tolist()
            assert source.metadata == true.metadata
            assert source.tokenizer.encode("the café ") == true.tokenizer.encode("the café ")
        return True

    with small_parts():
        fuzz(examples, attack)


# --- models ---

NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 13, 14, 2**31, 2**63, 10**9, 10**600, 0.5, math.nan, math.inf, -0.0])
VALUES = NUMBERS | st.sampled_from([None, True, "", "7", "x" * 100_000, "\x00", [], {}])


def open_or_refuse(open_function: Callable[[], GPT], folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of the model, or None if it is refused in one line. The files must not change."""
    files = read_files(folder)
    weights = None
    try:
        weights = open_function().state_dict()
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    assert read_files(folder) == files
    return weights


@repeat(40, 250)
def test_checkpoints(tmp_path, examples):
    """Bytes of the file are changed, or of its pickle. The checksum of the pickle is then corrected."""
    checkpoint = make_trained_checkpoint()
    file = tmp_path / "last.ckpt"
    save_checkpoint(checkpoint, file)
    intact = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}

    def attack(draw: Callable) -> bool:
        is_in_pickle = draw(st.booleans())
        content = records["archive/data.pkl"] if is_in_pickle else intact
        for _ in range(draw(st.integers(1, 3))):
            content = mutate_bytes(content, draw)
        if is_in_pickle:
            with zipfile.ZipFile(file, "w") as archive:
                for name, record in (records | {"archive/data.pkl": content}).items():
                    archive.writestr(name, record)
        else:
            file.write_bytes(content)
        weights = open_or_refuse(lambda: open_model(file)[0], tmp_path)
        if weights is not None and not is_in_pickle:
            assert all(torch.equal(weights[name], weight) for name, weight in checkpoint["state_dict"].items())
        return weights is not None

    fuzz(examples, attack)


@repeat(40, 250)
def test_huggingface_folders(tmp_path, examples):
    """Values of config.json are changed, or bytes of either file."""
    gpt2_twin(GPTConfig(13, 21, 2, 3, vocab_size=101)).save_pretrained(tmp_path)
    intact = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    expected = load_huggingface_weights(tmp_path).state_dict()
    keys = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner", "model_type"]

    def attack(draw: Callable) -> bool:
        contents = dict(intact)
        is_in_config = draw(st.booleans())
        if is_in_config:
            config = json.loads(intact["config.json"])
            for _ in range(draw(st.integers(1, 2))):
                config[draw(st.sampled_from([*keys, *config]))] = draw(VALUES)
            contents["config.json"] = json.dumps(config).encode()
        else:
            name = draw(st.sampled_from(sorted(intact)))
            start = contents[name][:4000]  # the header of the weights is here
            contents[name] = mutate_bytes(start, draw) + contents[name][4000:]
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        weights = open_or_refuse(lambda: load_huggingface_weights(tmp_path), tmp_path)
        if is_in_config and weights is not None:
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
        return weights is not None

    fuzz(examples, attack)


# --- runs ---


@repeat(20, 80)
def test_runs(reference, stopped_run, tmp_path, examples):
    """The exit code is 0 with the weights of the reference, or 2 with one line."""
    expected = load_checkpoint(reference / "checkpoints/last.ckpt")["state_dict"]
    names = [file.relative_to(stopped_run) for file in sorted(stopped_run.rglob("*")) if file.is_file()]
    run = tmp_path / "run"

    def attack(draw: Callable) -> bool:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(stopped_run, run)
        mutate(run / draw(st.sampled_from([name for name in names if name.name != ".lock"])), draw)
        done = train(f"resume={run}", code=None)
        lines = done.stderr.strip().splitlines()
        assert done.returncode in (0, 2), done.stderr
        assert len(lines) <= 1 or (len(lines) == 2 and "resuming from" in lines[0]), done.stderr
        if done.returncode == 2:
            assert lines
            return False
        weights = load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        return True

    fuzz(examples, attack)
    assert os.listdir(tmp_path) == ["run"]
