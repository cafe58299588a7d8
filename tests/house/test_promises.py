"""Each promise that docs/runs.md makes under "Nothing is lost", and docs/security.md, and the tests that hold it.

A new sentence there needs a test, or it is withdrawn.
"""

import re
import shutil
from pathlib import Path

import pytest

from gpt.errors import UserError
from gpt.prepare import main
from gpt.text.cache import read_json, write_json
from gpt.text.corpus.corpus import DataConfig
from gpt.text.prepare.prepare import prepare
from gpt.text.prepared import open_folder
from gpt.text.tokenizer import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
TESTS = {  # "test_faults.py::test_full_disk" for each test, whatever its folder
    f"{file.name}::{name}"
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M)
}

# The page, the beginning of a sentence -> the tests that fail if it is not true.
PROMISES: dict[str, dict[str, list[str]]] = {
    "docs/runs.md": {
        "A resumed run continues bit for bit": [
            "test_faults.py::test_stopped_and_killed_again_and_again",
            "test_catalogue.py::test_other_environments",
            "test_thousand_kills.py::test_killed_at_random",
        ],
        "This is promised for a horizon in steps": ["test_faults.py::test_stopped_and_killed_again_and_again"],
        "With a time as horizon": ["test_stopping.py::test_stopped_and_resumed_it_ends_in_time"],
        "Tests show this on CPUs": ["test_faults.py::test_killed_before_the_first_checkpoint"],
        "On CUDA, `trainer.deterministic=true`": [],  # which nobody has tried, as the next sentence but one says
        "Without it, a resumed run": [],
        "Neither has ever been tried": [],
        "A checkpoint is verified by its checksum": [
            "test_faults.py::test_damaged_checkpoint",
            "test_resuming.py::test_is_refused_before_anything_changes",
        ],
        "`resume=` takes the intact checkpoint": [
            "test_faults.py::test_damaged_checkpoint",
            "test_run.py::test_newest_is_of_the_greatest_step",
            "test_catalogue.py::test_going_back_is_refused",
        ],
        "One that the disk cannot read": ["test_run.py::test_what_the_disk_cannot_read"],
        "Ctrl-C, SIGTERM, a lost connection": [
            "test_catalogue.py::test_signals",
            "test_callbacks.py::test_first_signal_asks_and_second_ends",
        ],
        "An ignored signal": ["test_catalogue.py::test_ignored_signals_stay_so"],
        "A run survives a closed terminal": ["test_errors.py::test_output_ends_no_training"],
        "A failure outside of a step": [
            "test_catalogue.py::test_what_fails_beside_a_step_loses_none",
            "test_remote.py::test_away_for_a_while",
        ],
        "A run continues from any folder": ["test_run.py::test_text_that_has_moved"],
        "Every version continues what earlier": ["test_earlier_formats.py::test_a_run_continues"],
        "A run that continues with other code": ["test_run.py::test_other_code_is_told"],
        "A power cut leaves what was synced": ["test_below_python.py::test_power_cut"],
        "A NaN or infinite gradient": [
            "test_faults.py::test_weights_that_are_not_finite",
            "test_train.py::test_weights_that_an_update_has_spoilt",
            "test_fp16.py::test_gradient_that_stays_broken",
        ],
        "On CUDA, in bf16 and fp32": ["test_gpu.py::test_late_check_names_the_steps_and_saves_nothing_after_them"],
        "A full disk, running out of memory, or a second process": [
            "test_checkpoint.py::test_full_disk",
            "test_catalogue.py::test_limited_file_size",
            "test_faults.py::test_out_of_memory",
            "test_faults.py::test_two_runs_in_one_directory",
            "test_session.py::test_micro_batch_shrinks",
        ],
    },
    "docs/security.md": {
        "No checkpoint, weight file or text can run code": [
            "test_checkpoint.py::test_pickle_in_an_archive_is_never_run"
        ],
        "Checkpoints load with `weights_only=True`": [
            "test_checkpoint.py::test_pickle_in_an_archive_is_never_run",
        ],
        "Configurations in checkpoints are data": ["test_config.py::test_stored_configurations_are_literal"],
        "Hugging Face weights are read from safetensors": ["test_huggingface.py::test_pickles_are_not_read"],
        "A tokenizer whose tokens are longer": ["test_huggingface_vocabulary.py::test_letters_that_are_doubled"],
        "A run that you resume reads the text": ["test_loggers.py::test_wandb"],
        "A checkpoint that disagrees": ["test_resuming.py::test_another_configuration"],
        "A run writes only files of its own": ["test_run.py::test_links_out_of_a_run"],
        "Commands print no escape sequences": ["test_errors.py::test_no_escape_codes_on_a_terminal"],
        "Checkpoints are verified by their checksums": ["test_faults.py::test_damaged_checkpoint"],
        "Each file of prepared text": [
            "test_prepared.py::test_damage_is_named",
            "test_prepared.py::test_a_small_text_is_hashed_whenever_it_is_opened",
            "test_checks.py::test_a_file_is_hashed_once_and_when_it_changes",
            "test_checks.py::test_a_copy_is_hashed_when_it_changes",
        ],
        "A manifest is refused if": [
            "test_promises.py::test_names_in_a_manifest_are_not_followed",
            "test_checks.py::test_the_shape_of_a_manifest",
            "test_checks.py::test_ids_are_in_the_vocabulary",
        ],
        "Downloads are only what you name": ["test_remote.py::test_wrong_hash", "test_loading.py::test_hub"],
        "Lightning releases that were malicious": ["test_promises.py::test_unsafe_releases_are_excluded"],
        "Not promised": [],
    },
}


def sentences(page: str) -> list[str]:
    """The sentences of a page's last section."""
    text = (ROOT / page).read_text(encoding="utf-8").rpartition("\n\n## ")[2].split("\n", 1)[1]
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()))


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_has_its_tests(page):
    """Each sentence is listed here, in order, and the tests exist."""
    found = sentences(page)
    promises = PROMISES[page]
    assert [sentence for sentence, start in zip(found, promises, strict=True) if not sentence.startswith(start)] == []
    assert {test for tests in promises.values() for test in tests} - TESTS == set()


def test_names_in_a_manifest_are_not_followed(tmp_path):
    """Whoever writes a manifest can seal it. In the cache it names no files, in a store only those of its tokens."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    store, cache = tmp_path / "store", tmp_path / "cache"
    config = DataConfig("text", str(tmp_path / "text.txt"))
    [prepared] = prepare(config, TokenizerConfig("byte"), 8, cache).sources
    [file] = cache.glob("*/manifest.json")
    manifest = read_json(file)
    manifest["files"] = manifest["splits"]["train"]["files"] = ["/etc/passwd", "../text.txt"]
    manifest["splits"]["train"]["name"] = "../../text"
    write_json(file, manifest)
    assert open_folder(file.parent).at_hand.tolist() == prepared.at_hand.tolist()
    main(["--to", str(store), "--text", str(tmp_path / "text.txt"), "--tokenizer", "byte", "--cache", str(cache)])

    def opened() -> list[int]:
        [text] = prepare(DataConfig("prepared", str(store)), TokenizerConfig(), 8, cache).sources
        return text.train[0].tolist()

    tokens, manifest = opened(), read_json(store / "manifest.json")
    [[name, *of_name], *_] = manifest["shards"]
    secret = shutil.copy(store / name, tmp_path / "secret.bin")
    for other in ("../secret.bin", str(secret), "../store/" + name, "sub/" + name, name + "\n", "tokenizer.json", 7):
        manifest["shards"][0] = [other, *of_name]
        write_json(store / "manifest.json", manifest)
        with pytest.raises(UserError, match="is damaged"):
            opened()
    manifest["shards"][0] = [name, of_name[0], "../" * 22]  # of which a copy's name is made
    write_json(store / "manifest.json", manifest)
    with pytest.raises(UserError, match="is damaged"):
        opened()
    manifest["shards"][0] = [name, *of_name]
    write_json(store / "manifest.json", manifest)
    assert opened() == tokens
    (store / name).unlink()
    (store / name).symlink_to(secret)
    with pytest.raises(UserError, match=r"train-000000-00\.bin: cannot be read \(it is a link out of its folder\)"):
        opened()


def test_unsafe_releases_are_excluded():
    """Lightning comes after the malicious 2.6.2 and 2.6.3 and the unsafe loading up to 2.6.5.

    Resuming sets counters that are private to Lightning, so the upper bound moves only with a look at them.
    """
    (bounds,) = re.findall(r'"lightning>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    low, high = (tuple(map(int, bound.split("."))) for bound in bounds)
    assert (2, 6, 6) <= low < high <= (2, 7)
