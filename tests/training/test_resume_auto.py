"""`resume=auto`: a repeated command starts a run, resumes it, and ends if it is complete."""

import re
from pathlib import Path

import pytest
import yaml

from gpt.training.config.asked import Asked
from gpt.training.config.schema import Config
from gpt.training.resume import resolve_resume_auto
from gpt.training.run_directory import RunDirectory
from harness import differences, refusal, tiny_arguments, tiny_config, train


def create(folder: Path, config: Config) -> str:
    """Make the directory of a run, as its start does, and return its path."""
    run = RunDirectory.create(str(folder / "run"), "", config)
    run.close()
    return str(run.path)


def resolve(folder: Path, *changes: str) -> Asked:
    """Resolve the request of a tiny run with these changes."""
    return resolve_resume_auto(Asked(tiny_config(folder, *changes)))


@pytest.fixture
def arguments(corpus_folder, tmp_path):
    """The command of a job in a queue, which a restarted job repeats."""
    changes = ["data.prompts=null", "resume=auto", "horizon=5steps", "trainer.checkpoint_every=2"]
    return tiny_arguments(corpus_folder, *changes, f"run_dir={tmp_path / 'run'}")


def test_command_starts_resumes_and_completes_a_run(arguments, tmp_path):
    """A run that lost its last checkpoints ends like one that never stopped. Then nothing is left to do."""
    train(*arguments)
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    stored = yaml.safe_load((whole / "config.yaml").read_text())
    assert (stored["resume"], stored["run_dir"]) == (None, str(tmp_path / "run"))
    assert len(stored["data"]["prompts"]) == 2  # taken from the text

    # A kill at the start leaves only the lock and a half-written file.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/.config.yaml.4321").touch()
    started = train(*arguments)
    assert started.stderr == ""
    assert "continuing" not in started.stdout
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    resumed = train(*arguments)
    assert re.search(r"continuing \S+/run at step \d of 5", resumed.stdout)
    assert differences(tmp_path / "run", whole) == []
    complete = train(*arguments)
    assert complete.stderr == ""
    assert "is complete: it has trained all of its 5 steps" in complete.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=3", "seed=3 here, and 1 in the run of run_dir="),
        ("model.num_layers=1", "model.num_layers=1 here, and 2 in the run"),
        ("horizon=7steps", "horizon=7steps here, and 5steps in the run of"),
        ("data.prompts=[once]", "data.prompts=['once'] here, and ['', 'beta'] in the run of"),
        ("trainer.micro_batch_size=2", "trainer.micro_batch_size=2 here, and 3 in the run of"),
    ],
)
def test_command_with_other_settings_is_refused(corpus_folder, tmp_path, change, line):
    """The line has the key, both values and the remedy."""
    config = tiny_config(corpus_folder, "horizon=5steps", "data.prompts=['',beta]")
    requested = tiny_config(corpus_folder, "horizon=5steps", "data.prompts=null")
    run_dir = create(tmp_path, config.as_decided_from(requested))
    words = ["data.prompts=null", "resume=auto", f"run_dir={run_dir}", "horizon=5steps"]
    message = refusal(resolve_resume_auto, Asked(tiny_config(corpus_folder, *words, change)))
    assert line in message and "resume=" in message
    assert resolve(corpus_folder, *words).config.resume == run_dir


def test_choices_of_the_run_are_no_differences(corpus_folder, tmp_path):
    """They are what stood as `auto`, and a model that came with its weights. A run_dir is needed."""
    requested = tiny_config(corpus_folder, "horizon=2h", "init_from=gpt2")
    config = tiny_config(corpus_folder, "horizon=2h", "init_from=gpt2", "model.num_layers=7")
    run_dir = create(tmp_path, config.as_decided_from(requested))
    words = ["resume=auto", "init_from=gpt2", "trainer.micro_batch_size=auto", "horizon=2h"]
    assert resolve(corpus_folder, *words, f"run_dir={run_dir}").config.resume == run_dir
    dropout = tiny_config(corpus_folder, *words, f"run_dir={run_dir}", "model.dropout=0.2")
    assert "model.dropout=0.2 here" in refusal(resolve_resume_auto, Asked(dropout))
    assert "add run_dir=DIR" in refusal(resolve_resume_auto, Asked(tiny_config(corpus_folder, *words)))


def test_key_that_came_later_is_no_difference(corpus_folder, tmp_path):
    """The run began before the key existed. Another value than the one of that time is refused."""
    config = tiny_config(corpus_folder, "horizon=5steps")
    run_dir = create(tmp_path, config.as_decided_from(config))
    file = Path(run_dir) / "config.yaml"
    stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    del stored["data"]["bpe_dropout"]
    file.write_text(yaml.safe_dump(stored), encoding="utf-8")
    words = ["horizon=5steps", "resume=auto", f"run_dir={run_dir}"]
    assert resolve(corpus_folder, *words).config.resume == run_dir
    dropout = tiny_config(corpus_folder, *words, "data.bpe_dropout=0.1")
    assert "data.bpe_dropout=0.1 here, and 0.0 in the run of" in refusal(resolve_resume_auto, Asked(dropout))


@pytest.mark.parametrize(
    ("is_old", "requested", "may_resume"),
    [(True, 128, True), (True, 256, True), (True, 64, False), (False, 256, False)],
)
def test_default_that_changed_is_no_difference(corpus_folder, tmp_path, is_old, requested, may_resume):
    """`mini` once had a context of 128. Its default is 256 now, and any other context is refused."""

    def config(length: int, *changes: str) -> Config:
        step = ["trainer.tokens_per_step=1024", "trainer.micro_batch_size=8", "trainer.short_window=null"]
        return tiny_config(corpus_folder, f"model.context_length={length}", *step, *changes)

    run_dir = create(tmp_path, config(128).as_decided_from(config(128)))
    file = Path(run_dir) / "config.yaml"
    stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    if is_old:
        del stored["trainer"]["short_window"]
    file.write_text(yaml.safe_dump(stored), encoding="utf-8")
    request = Asked(config(requested, "resume=auto", f"run_dir={run_dir}"))
    if may_resume:
        assert resolve_resume_auto(request).config.resume == run_dir
    else:
        line = refusal(resolve_resume_auto, request)
        assert f"model.context_length={requested} here, and 128 in the run of" in line


def test_first_command_of_a_changed_run_may_be_repeated(corpus_folder, tmp_path):
    """The run got another horizon meanwhile, or other devices and so smaller micro-batches."""
    first = tiny_config(corpus_folder, "horizon=5steps", "trainer.micro_batch_size=6")
    changes = ["horizon=9steps", "trainer.micro_batch_size=3", "trainer.devices=2"]
    changed = tiny_config(corpus_folder, *changes).amending(first, 4)
    assert {line.partition("=")[0] for line in changed.amended} == {line.partition("=")[0] for line in changes}
    run_dir = create(tmp_path, changed)
    words = ["resume=auto", f"run_dir={run_dir}", "trainer.micro_batch_size=6"]
    for horizon in ("horizon=5steps", "horizon=9steps"):
        request = resolve(corpus_folder, *words, horizon)
        assert (request.config.resume, request.given) == (run_dir, {})
    line = refusal(resolve_resume_auto, Asked(tiny_config(corpus_folder, *words, "horizon=7steps")))
    assert "horizon=7steps" in line


def test_run_of_two_machines_resumes_on_one(corpus_folder, tmp_path):
    """It then has as many processes as each machine had."""
    on_two = tiny_config(corpus_folder, "trainer.devices=2", "trainer.num_nodes=2", "trainer.tokens_per_step=192")
    run_dir = create(tmp_path, on_two)
    resumed = tiny_config(corpus_folder, f"resume={run_dir}", "trainer.devices=null")
    assert Asked(resumed).processes == 1  # a launcher starts four of it
    resumed.trainer.num_nodes = 1
    assert Asked(resumed).processes == 2
