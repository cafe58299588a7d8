"""Damaged checkpoints and Hugging Face folders: the same model as before, or one line; nothing else ever happens."""

import json
import math
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from gpt import checkpoint
from gpt.errors import UserError
from gpt.interop import huggingface
from gpt.loading import open_model
from gpt.model.transformer import GPT
from model_files import make_trained_checkpoint

pytestmark = pytest.mark.slow
OFTEN = settings(
    max_examples=250,
    deadline=20_000,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 13, 14, 2**31, 2**63, 10**9, 10**600, 0.5, math.nan, math.inf, -0.0])
VALUES = st.one_of(NUMBERS, st.sampled_from([None, True, "", "7", "x" * 100_000, "\x00", [], {}]))


def outcome(open_it: Callable[[], GPT], *files: Path) -> str | dict[str, torch.Tensor]:
    """The one line of a refusal, or the weights of the model; anything else fails, and so does a changed file."""
    before = {file: file.read_bytes() for file in files}
    try:
        result: str | dict = open_it().state_dict()
    except UserError as error:
        result = str(error)
        assert "\n" not in result
        assert len(result) < 1000
    assert {file: file.read_bytes() for file in files} == before
    return result


ORIGINAL = make_trained_checkpoint()


@OFTEN
@given(data=st.data())
def test_bytes_of_checkpoints(tmp_path_factory, data):
    """Files with bytes changed, cut out or put in, in the pickle with its checksum made right again."""
    folder = tmp_path_factory.mktemp("bytes")
    file = folder / "last.ckpt"
    checkpoint.save_checkpoint(ORIGINAL, file)
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
    result = outcome(lambda: open_model(file)[0], file)
    if not within_pickle:
        assert isinstance(result, str) or all(torch.equal(result[k], w) for k, w in ORIGINAL["state_dict"].items())
    shutil.rmtree(folder)


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
    """Values of config.json, and bytes of either file."""
    folder = Path(shutil.copytree(theirs, tmp_path_factory.mktemp("mutated"), dirs_exist_ok=True))
    config, weights = folder / "config.json", folder / "model.safetensors"
    expected = huggingface.load_huggingface_weights(theirs).state_dict()
    in_config = data.draw(st.booleans())
    if in_config:
        stored = json.loads(config.read_text())
        used = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner", "model_type"]
        for _ in range(data.draw(st.integers(1, 2))):
            stored[data.draw(st.sampled_from([*used, *stored]))] = data.draw(VALUES)
        config.write_text(json.dumps(stored))
    else:
        file = data.draw(st.sampled_from([config, weights]))
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, min(len(content) - 1, 4000)))
        content[place : place + data.draw(st.sampled_from([0, 1, 7]))] = data.draw(st.binary(max_size=8))
        file.write_bytes(content)
    result = outcome(lambda: huggingface.load_huggingface_weights(folder), config, weights)
    if in_config and isinstance(result, dict):
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    shutil.rmtree(folder)
