"""Each promise that the README makes about faults and security, and the tests that hold it.

A new sentence in those two sections needs a test, or it is withdrawn.
"""

import json
import pickle
import re
from pathlib import Path

import pytest

from gpt.errors import UserError
from gpt.exchange.opening import open_model
from gpt.text.corpus import DataConfig
from gpt.text.prepare import prepare
from gpt.text.shards import open_shards
from gpt.text.tokenizer import TokenizerConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CATALOGUE, FAULTS, TRAIN = "faults/test_catalogue.py", "faults/test_faults.py", "training/test_train.py"

# The beginning of a sentence -> the tests that fail if it is not true.
PROMISES: dict[str, dict[str, list[str]]] = {
    "Nothing is lost": {
        "A resumed run continues bit for bit": [
            f"{FAULTS}::test_stopped_and_killed_again_and_again",
            f"{CATALOGUE}::test_other_environments",
            "faults/test_thousand_kills.py::test_killed_at_random",
        ],
        "With a time as horizon": ["training/test_deadline.py::test_killed_right_after_a_correction"],
        "Tests show this on CPUs": [f"{FAULTS}::test_killed_before_the_first_checkpoint"],
        "On CUDA, `trainer.deterministic=true`": ["training/test_gpu.py::test_deterministic_resume_is_exact_on_cuda"],
        "Without it, a resumed run": [],
        "Neither has ever been tried": [],
        "A checkpoint is checked as a whole": [f"{CATALOGUE}::test_mangled_checkpoint"],
        "Ctrl-C, SIGTERM and a lost connection": [
            f"{CATALOGUE}::test_signals",
            "training/test_callbacks.py::test_first_signal_asks_and_second_ends",
        ],
        "`resume=` takes the newest intact checkpoint": [
            f"{FAULTS}::test_damaged_checkpoint",
            f"{CATALOGUE}::test_going_back_is_refused",
        ],
        "A NaN or infinite gradient": [
            f"{FAULTS}::test_weights_that_are_not_finite",
            f"{TRAIN}::test_weights_that_an_update_has_spoilt",
            "training/test_fp16.py::test_gradient_that_stays_broken",
        ],
        "On CUDA, in bf16 and fp32, the report": [
            "training/test_gpu.py::test_late_guard_names_the_step_and_saves_nothing_after_it"
        ],
        "A full disk, running out of memory, or a second process": [
            f"{FAULTS}::test_full_disk",
            f"{CATALOGUE}::test_limited_file_size",
            f"{FAULTS}::test_out_of_memory",
            f"{FAULTS}::test_two_runs_in_one_directory",
            "training/test_session.py::test_micro_batch_shrinks",
        ],
    },
    "Security": {
        "No checkpoint, weight file or text can run code": [f"{FAULTS}::test_checkpoint_that_would_run_code"],
        "Checkpoints load with `weights_only=True`": [
            f"{FAULTS}::test_checkpoint_that_would_run_code",
            "exchange/test_checkpoint.py::test_pickle_in_an_archive_is_never_run",
        ],
        "Configurations in checkpoints are data": ["training/test_config.py::test_stored_configurations_are_literal"],
        "Hugging Face weights are read from safetensors, or": [
            "exchange/test_huggingface.py::test_pickled_code",
            "test_promises.py::test_other_weights_are_not_read",
        ],
        "A run that you resume logs where its configuration says": ["training/test_loggers.py::test_wandb"],
        "Checkpoints are verified by their checksums": [
            f"{FAULTS}::test_damaged_checkpoint",
            "text/test_shards.py::test_damage_is_named",
        ],
        "Nothing is downloaded except": ["text/test_url.py::test_wrong_hash", "exchange/test_opening.py::test_hub"],
        "Paths inside cache manifests are ignored.": ["test_promises.py::test_names_in_a_manifest_are_not_followed"],
        "Lightning releases that were malicious": ["test_promises.py::test_unsafe_releases_are_excluded"],
        "Not promised": [],
    },
}


def sentences(section: str) -> list[str]:
    """The sentences of a section of the README."""
    text = README.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()))


@pytest.mark.parametrize("section", PROMISES)
def test_every_promise_has_its_tests(section):
    """Each sentence of the section is listed here, in order, and the tests exist."""
    promises = PROMISES[section]
    found = sentences(section)
    assert [sentence.startswith(start) for sentence, start in zip(found, promises, strict=True)] == [True] * len(found)
    for tests in promises.values():
        for test in tests:
            file, name = test.split("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_other_weights_are_not_read(tmp_path):
    """A folder whose only weights are a pickle is refused, and the pickle is not opened."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 1}))

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError):
        open_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_names_in_a_manifest_are_not_followed(tmp_path):
    """Token files are found by their numbers; what else a manifest names is not opened."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    config = DataConfig("text", str(tmp_path / "text.txt"))
    (prepared,) = prepare(config, TokenizerConfig("byte"), 8, tmp_path / "cache").sources
    (file,) = tmp_path.glob("cache/*/manifest.json")
    manifest = json.loads(file.read_text())
    manifest["files"] = manifest["splits"]["train"]["files"] = ["/etc/passwd", "../text.txt"]
    manifest["splits"]["train"]["name"] = "../../text"
    file.write_text(json.dumps(manifest))
    try:
        assert (open_shards(file.parent).train[:] == prepared.train[:]).all()
    except UserError as refusal:
        assert "passwd" not in str(refusal)


def test_unsafe_releases_are_excluded():
    """pyproject.toml asks for a Lightning after the malicious 2.6.2 and 2.6.3 and the unsafe loading up to 2.6.5."""
    (wanted,) = re.findall(r'"lightning>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tuple(map(int, wanted.split("."))) >= (2, 6, 6)
