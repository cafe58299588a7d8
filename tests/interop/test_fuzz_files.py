"""Damaged checkpoints and Hugging Face folders give an equal model or one line, and nothing else."""

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

from gpt.checkpoint import save_checkpoint
from gpt.errors import UserError
from gpt.interop.huggingface import load_huggingface_weights
from gpt.loading import open_model
from gpt.model.transformer import GPT
from model_files import make_trained_checkpoint

pytestmark = pytest.mark.slow
FUZZING = settings(
    max_examples=250,
    deadline=20_000,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 5, 13, 14, 2**31, 2**63, 10**9, 10**600, 0.5, math.nan, math.inf, -0.0])
VALUES = st.one_of(NUMBERS, st.sampled_from([None, True, "", "7", "x" * 100_000, "\x00", [], {}]))
CHECKPOINT = make_trained_checkpoint()


def open_or_refuse(open_function: Callable[[], GPT], *files: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of the model, or None if it is refused in one line. The files must not change."""
    contents = [file.read_bytes() for file in files]
    weights = None
    try:
        weights = open_function().state_dict()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    assert [file.read_bytes() for file in files] == contents
    return weights


@FUZZING
@given(data=st.data())
def test_checkpoints(tmp_path_factory, data):
    """Bytes are changed, cut out or inserted in the file, or in its pickle, whose checksum is then corrected."""
    folder = tmp_path_factory.mktemp("bytes")
    file = folder / "last.ckpt"
    save_checkpoint(CHECKPOINT, file)
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    is_in_pickle = data.draw(st.booleans())
    content = bytearray(records["archive/data.pkl"] if is_in_pickle else file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.sampled_from([0, 1, 1, 1, 7, 1000]))
        content[start : start + length] = data.draw(st.binary(min_size=0, max_size=8))
    if is_in_pickle:
        with zipfile.ZipFile(file, "w") as archive:
            for name, record in (records | {"archive/data.pkl": bytes(content)}).items():
                archive.writestr(name, record)
    else:
        file.write_bytes(content)
    weights = open_or_refuse(lambda: open_model(file)[0], file)
    if weights is not None and not is_in_pickle:
        assert all(torch.equal(weights[name], weight) for name, weight in CHECKPOINT["state_dict"].items())
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small GPT-2 that `transformers` saved."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(5)
    GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=13, n_embd=21, n_layer=2, n_head=3)).save_pretrained(folder)
    return folder


@FUZZING
@given(data=st.data())
def test_huggingface_folders(saved, tmp_path_factory, data):
    """Values of config.json are changed, or bytes of either file."""
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("damaged"), dirs_exist_ok=True))
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    expected = load_huggingface_weights(saved).state_dict()
    is_in_config = data.draw(st.booleans())
    if is_in_config:
        config = json.loads(config_file.read_text())
        keys = ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner", "model_type"]
        for _ in range(data.draw(st.integers(1, 2))):
            config[data.draw(st.sampled_from([*keys, *config]))] = data.draw(VALUES)
        config_file.write_text(json.dumps(config))
    else:
        file = data.draw(st.sampled_from([config_file, weights_file]))
        content = bytearray(file.read_bytes())
        start = data.draw(st.integers(0, min(len(content) - 1, 4000)))
        content[start : start + data.draw(st.sampled_from([0, 1, 7]))] = data.draw(st.binary(max_size=8))
        file.write_bytes(content)
    weights = open_or_refuse(lambda: load_huggingface_weights(folder), config_file, weights_file)
    if is_in_config and weights is not None:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    shutil.rmtree(folder)
