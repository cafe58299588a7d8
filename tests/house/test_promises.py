"""Each promise of docs/security.md, and of docs/runs.md under "Nothing is lost", has tests that fail if it is broken.

A new sentence there needs a test. Without one, delete the sentence.
"""

import re
import shutil
from pathlib import Path

import pytest

from gpt.data.corpus import DataConfig
from gpt.data.dataset_cache import read_checked_json, write_checked_json
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TESTS = {  # "test_faults.py::test_full_disk" for each test, whatever its folder
    f"{file.name}::{name}"
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M)
}

# For each page, the beginning of each sentence, and the tests that fail if it is not true.
PROMISES: dict[str, dict[str, list[str]]] = {
    "docs/runs.md": {
        "A resumed run continues bit for bit": [
            "test_faults.py::test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference",
            "test_catalogue.py::test_environment_makes_no_difference",
            "test_thousand_kills.py::test_run_killed_at_random_ends_as_its_reference",
        ],
        "Weights, optimizer, curves, samples": [
            "test_faults.py::test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference",
            "test_faults.py::test_run_on_a_mixture_continues_bit_for_bit",
        ],
        "This is promised for a horizon in steps": [
            "test_faults.py::test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference"
        ],
        "If the horizon is a time": ["test_stopping.py::test_stopped_and_resumed_it_ends_in_time"],
        "Tests show this on CPUs": ["test_faults.py::test_run_killed_before_its_first_checkpoint_starts_again"],
        "On CUDA, `trainer.deterministic=true`": [],  # nobody has tried it, as the next sentence but one has it
        "Without it, a resumed run": [],
        "Neither has ever been tried": [],
        "A checkpoint is verified by its checksum": [
            "test_faults.py::test_damaged_checkpoint_is_replaced_by_the_one_before"
        ],
        "If it does not fit the run": [
            "test_resume.py::test_checkpoint_that_does_not_fit_is_refused_before_anything_changes"
        ],
        "`resume=` takes the intact checkpoint": [
            "test_faults.py::test_damaged_checkpoint_is_replaced_by_the_one_before",
            "test_run_directory.py::test_newest_checkpoint_has_the_greatest_step",
            "test_catalogue.py::test_going_back_is_refused",
        ],
        "A damaged one is renamed": [
            "test_faults.py::test_damaged_checkpoint_is_replaced_by_the_one_before",
            "test_run_directory.py::test_unreadable_checkpoint_is_kept_and_an_older_one_is_used",
        ],
        "An error that may pass": [
            "test_run_directory.py::test_unreadable_checkpoint_is_kept_and_an_older_one_is_used"
        ],
        "The tensors of a loaded checkpoint": [
            "test_resume.py::test_loaded_checkpoint_is_released",
            "test_start.py::test_initial_weights_are_released",
        ],
        "Every later version resumes a run of 1.0": ["test_formats_before_1.py::test_every_format_has_a_run"],
        "Checkpoints of 0.x": [
            "test_formats_before_1.py::test_its_model_generates_and_is_exported",
            "test_formats_before_1.py::test_its_configuration_is_read_and_its_model_evaluated",
            "test_formats_before_1.py::test_new_run_starts_from_its_weights",
        ],
        "Their training cannot be resumed": ["test_formats_before_1.py::test_resuming_is_refused"],
        "Ctrl-C, SIGTERM, a lost connection": ["test_catalogue.py::test_signal_stops_after_the_step"],
        "It saves, and its exit code": [
            "test_faults.py::test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference"
        ],
        "With several devices, it stops": ["test_distributed.py::test_stops_and_continues"],
        "A second signal stops it at once": [
            "test_stopping.py::test_first_signal_stops_after_the_step_and_second_at_once"
        ],
        "An ignored signal": ["test_catalogue.py::test_ignored_signal_stays_ignored"],
        "A run survives a closed terminal": ["test_errors.py::test_output_ends_no_training"],
        "After any other exception": ["test_catalogue.py::test_exception_saves_the_last_whole_step"],
        "An example is a store": [
            "test_catalogue.py::test_exception_saves_the_last_whole_step",
            "test_download.py::test_away_for_a_while",
        ],
        "An exception within an update": ["test_catalogue.py::test_exception_saves_the_last_whole_step"],
        "The run then continues from": ["test_catalogue.py::test_exception_saves_the_last_whole_step"],
        "A run continues from any folder": ["test_run_directory.py::test_text_may_have_moved"],
        "It does not need its text": ["test_run_directory.py::test_text_may_have_moved"],
        "A checkpoint that disagrees": [
            "test_resume.py::test_checkpoint_that_disagrees_with_the_configuration_is_refused"
        ],
        "If the code or the libraries": ["test_run_directory.py::test_resuming_with_other_code_is_reported"],
        "A power cut leaves what was synced": ["test_below_python.py::test_power_cut_leaves_what_was_synced"],
        "The logs of a run are synced": [
            "test_run_directory.py::test_logs_are_synced_before_a_checkpoint_refers_to_them"
        ],
        "A NaN or infinite gradient": [
            "test_faults.py::test_broken_gradient_ends_the_run_and_saves_nothing",
            "test_train.py::test_weights_that_an_update_broke_are_not_saved",
        ],
        "In fp16 this happens only": ["test_fp16.py::test_gradient_that_stays_broken"],
        "On CUDA, in bf16 and fp32": ["test_gpu.py::test_late_check_names_the_steps_and_saves_nothing_after_them"],
        "No checkpoint or validation comes": [
            "test_gpu.py::test_late_check_names_the_steps_and_saves_nothing_after_them"
        ],
        "A full disk, a lack of memory": [
            "test_checkpoint.py::test_full_disk",
            "test_catalogue.py::test_full_disk_is_one_line",
            "test_out_of_memory.py::test_size_that_was_given_does_not_shrink",
            "test_faults.py::test_second_process_in_a_directory_is_refused",
        ],
        "On one device with `micro_batch_size=auto`": [
            "test_faults.py::test_lack_of_memory_shrinks_an_automatic_micro_batch",
            "test_out_of_memory.py::test_micro_batch_shrinks_until_it_fits",
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
        "A checkpoint that disagrees": [
            "test_resume.py::test_checkpoint_that_disagrees_with_the_configuration_is_refused"
        ],
        "A run writes only files of its own": ["test_run_directory.py::test_link_out_of_a_run_is_refused"],
        "Commands print no escape sequences": ["test_errors.py::test_no_escape_codes_on_a_terminal"],
        "Checkpoints are verified by their checksums": [
            "test_faults.py::test_damaged_checkpoint_is_replaced_by_the_one_before"
        ],
        "Each file of prepared text": [
            "test_token_dataset.py::test_damage_is_named",
            "test_token_dataset.py::test_a_small_text_is_hashed_whenever_it_is_opened",
        ],
        "A dataset.json is refused if": [
            "test_promises.py::test_names_in_a_dataset_are_not_followed",
            "test_token_dataset.py::test_the_shape_of_the_metadata",
            "test_token_dataset.py::test_ids_are_in_the_vocabulary",
        ],
        "Token files of other programs": [
            "test_token_files.py::test_what_is_wrong_is_one_line",
            "test_token_files.py::test_what_identifies_a_dataset",
        ],
        "Downloads are only what you name": ["test_download.py::test_wrong_hash", "test_loading.py::test_hub"],
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


def test_names_in_a_dataset_are_not_followed(tmp_path):
    """Whoever writes dataset.json can seal it: it names no files but those of its tokens, in its own folder."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    made, cache = tmp_path / "made", tmp_path / "cache"
    config = DataConfig("text", str(tmp_path / "text.txt"))
    prepare(config, TokenizerConfig("byte"), 8, cache, to=made)

    def opened() -> list[int]:
        [source] = prepare(DataConfig("tokens", str(made)), TokenizerConfig(), 8, cache).sources
        return source.train[:].tolist()

    tokens, metadata = opened(), read_checked_json(made / "dataset.json")
    files = metadata["splits"]["train"]["files"]
    [[name, *described]] = files
    secret = shutil.copy(made / name, tmp_path / "secret.bin")
    names = ("../secret.bin", str(secret), "../made/" + name, "sub/" + name, name + "\n", "tokenizer.json", 7)
    for changed in (*([other, *described] for other in names), [name, described[0], "../" * 22]):  # a copy's name
        files[0] = changed
        write_checked_json(made / "dataset.json", metadata)
        with pytest.raises(UserError, match="is damaged"):
            opened()
    files[0] = [name, *described]
    write_checked_json(made / "dataset.json", metadata)
    assert opened() == tokens
    (made / name).unlink()
    (made / name).symlink_to(secret)
    with pytest.raises(UserError, match=rf"{name}: cannot be read \(it is a link out of its folder\)"):
        opened()


def test_unsafe_releases_are_excluded():
    """Lightning comes after the malicious 2.6.2 and 2.6.3 and the unsafe loading up to 2.6.5."""
    (low,) = re.findall(r'"lightning>=([\d.]+),<3"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tuple(map(int, low.split("."))) >= (2, 6, 6)
