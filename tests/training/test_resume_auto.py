"""`resume=auto`: a repeated command starts a run, resumes it, and ends if it is complete."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import gpt
from gpt.training.config import with_values
from gpt.training.request import Request, parse_request
from gpt.training.resume import resolve_resume_auto
from gpt.training.run_directory import RunDirectory
from harness import differences, refusal, tiny_arguments, tiny_config, train


def tiny_request(folder: Path, *changes: str) -> Request:
    """Return the request of `python train.py` with the arguments of a tiny run and these changes."""
    arguments = dict(argument.split("=", 1) for argument in tiny_arguments(folder, *changes))
    groups = {key: arguments.pop(key) for key in ("data", "tokenizer")}
    dotted = arguments | {f"{group}.name": name for group, name in groups.items()}
    values = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}" for key, value in dotted.items()]))
    return parse_request(values, arguments | groups)


def create(folder: Path, request: Request) -> str:
    """Make the directory of a run, as its start does, and return its path."""
    run = RunDirectory.create(str(folder / "run"), "", request.config, request.command)
    run.close()
    return str(run.path)


@pytest.fixture
def arguments(corpus_folder, tmp_path):
    """The command of a job in a queue, which a restarted job repeats."""
    changes = ["data.prompts=null", "resume=auto", "horizon=5steps", "trainer.checkpoint_every=2"]
    return tiny_arguments(corpus_folder, *changes, f"run_dir={tmp_path / 'run'}")


@pytest.mark.slow
def test_command_starts_resumes_and_completes_a_run(arguments, tmp_path):
    """A run that lost its last checkpoints ends like one that never stopped. Then nothing is left to do."""
    train(*arguments)
    reference = (tmp_path / "run").rename(tmp_path / "whole")
    stored = yaml.safe_load((reference / "config.yaml").read_text())
    assert (stored["resume"], stored["run_dir"]) == (None, str(tmp_path / "run"))
    assert len(stored["data"]["prompts"]) == 2  # taken from the text

    # A kill at the start leaves only the lock, the command and a half-written file.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/.config.yaml.4321").touch()
    (tmp_path / "run/command.txt").touch()
    started = train(*arguments)
    assert started.stderr == ""
    assert "continuing" not in started.stdout
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    resumed = train(*arguments)
    assert re.search(r"continuing \S+/run at step \d of 5", resumed.stdout)
    assert differences(tmp_path / "run", reference) == []
    complete = train(*arguments)
    assert complete.stderr == ""
    assert "is complete: it has trained all of its 5 steps" in complete.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=3", "seed=3 here, and 1 in the run of run_dir="),
        ("horizon=7steps", "horizon=7steps here, and 5steps in the run of"),
        ("data.prompts=[once]", "data.prompts=['once'] here, and ['', 'beta'] in the run of"),
        ("trainer.micro_batch_size=2", "trainer.micro_batch_size=2 here, and 3 in the run of"),
        ("", "optim.lr=None here, and 0.003 in the run of"),
    ],
)
def test_command_with_other_settings_is_refused(corpus_folder, tmp_path, change, line):
    """The line has the key, both values and the remedy. A command may also lack a setting of the run."""
    words = ["data.prompts=['',beta]", "horizon=5steps", "optim.lr=0.003"]
    run_dir = create(tmp_path, tiny_request(corpus_folder, *words))
    words += ["resume=auto", f"run_dir={run_dir}"]
    if change == "":
        words.remove("optim.lr=0.003")
    message = refusal(resolve_resume_auto, tiny_request(corpus_folder, *words, *filter(None, [change])))
    assert line in message and "run_dir" in message


def test_final_values_of_the_run_are_no_differences(corpus_folder, tmp_path):
    """Only what the user set is compared. A value may be written out that the run has anyway."""
    request = tiny_request(corpus_folder, "horizon=2h", "trainer.micro_batch_size=auto")
    final = with_values(request.config, {"trainer.micro_batch_size": 3, "optim.lr": 0.01, "model.qkv_bias": False})
    run_dir = create(tmp_path, replace(request, config=final))
    words = ["horizon=2h", "resume=auto", f"run_dir={run_dir}", "trainer.micro_batch_size=auto"]
    for changes in ([], ["optim.lr=null"], ["optim.lr=0.01"]):
        assert resolve_resume_auto(tiny_request(corpus_folder, *words, *changes)).config.resume == run_dir
    line = refusal(resolve_resume_auto, tiny_request(corpus_folder, *words, "optim.lr=0.02"))
    assert "optim.lr=0.02 here, and 0.01 in the run of" in line


def test_first_command_of_a_changed_run_may_be_repeated(corpus_folder, tmp_path):
    """The run got another horizon meanwhile, or other devices and so smaller micro-batches."""
    first = tiny_request(corpus_folder, "horizon=5steps", "trainer.micro_batch_size=3")
    changes = {"horizon": "9steps", "trainer.micro_batch_size": 1, "trainer.devices": 2}
    run_dir = create(tmp_path, replace(first, config=with_values(first.config, changes)))
    words = ["resume=auto", f"run_dir={run_dir}", "trainer.micro_batch_size=3"]
    for horizon in ("horizon=5steps", "horizon=9steps"):
        request = resolve_resume_auto(tiny_request(corpus_folder, *words, horizon))
        assert (request.config.resume, request.overrides) == (run_dir, {})
    request = resolve_resume_auto(tiny_request(corpus_folder, *words, "horizon=5steps", "trainer.devices=2"))
    assert (request.config.resume, request.config.trainer.devices) == (run_dir, 2)
    line = refusal(resolve_resume_auto, tiny_request(corpus_folder, *words, "horizon=7steps"))
    assert "horizon=7steps" in line


@pytest.mark.slow
def test_python_and_the_command_line_continue_each_other(arguments, corpus_folder, tmp_path):
    """Both set the same keys, and `gpt.train` writes the command that would do the same."""
    train(*arguments)
    model = {"context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 3, "dropout": 0.1}
    trainer = {"tokens_per_step": 96, "micro_batch_size": 3, "short_sequences": 8}
    trainer |= {"log_every": 3, "validate_every": 17, "checkpoint_every": 2}
    settings = {"model": model, "trainer": trainer, "tokenizer": "byte", "horizon": "5steps"}
    data = {"name": "text", "cache": str(corpus_folder / "cache"), "prompts": None}
    text, run_dir = str(corpus_folder / "corpus.txt"), str(tmp_path / "run")
    settings |= {"text": text, "data": data, "run_dir": run_dir, "resume": "auto"}
    assert gpt.train(**settings).spec is None  # it is complete
    assert "seed=3 here, and 1 in" in refusal(gpt.train, **settings, seed=3)
    gpt.train(**settings | {"run_dir": str(tmp_path / "other")})
    (line,) = (tmp_path / "other/command.txt").read_text().splitlines()
    assert line.startswith("python train.py ") and f"data.path={text}" in line
    assert "is complete" in train(*shlex.split(line)[2:]).stdout
    assert differences(tmp_path / "run", tmp_path / "other") == []


def test_run_of_two_machines_resumes_on_one(corpus_folder, tmp_path):
    """It then has as many processes as each machine had."""
    on_two = tiny_config(corpus_folder, "trainer.devices=2", "trainer.num_nodes=2", "trainer.tokens_per_step=192")
    run_dir = create(tmp_path, Request(on_two))
    resumed = tiny_config(corpus_folder, f"resume={run_dir}", "trainer.devices=null")
    assert Request(resumed).num_processes == 1  # a launcher starts four of it
    resumed.trainer.num_nodes = 1
    assert Request(resumed).num_processes == 2
