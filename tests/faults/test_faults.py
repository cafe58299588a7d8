"""Whatever happens to a training, it goes on bit for bit as if nothing had happened, or says in one line why not."""

import json
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback

from gpt.errors import NonFiniteError
from gpt.exchange import checkpoint
from gpt.training.run.run import Run
from harness import Process, differences, fit, refused, resume_run, train, wait_for_file

RUN, STOP = ["horizon=101steps"], 29


@pytest.mark.slow
def test_stopped_and_killed_again_and_again(settings, reference, tmp_path):
    """SIGTERM, SIGINT once and twice, and SIGKILL, once during a save: the run ends as the reference did."""
    run_dir, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    process = Process([*settings, f"run_dir={run_dir}"], {"TMPDIR": "/dev/shm"})
    wait_for_file(folder / "last.ckpt")
    process.send(signal.SIGTERM)
    assert process.end() == 143
    assert f"continue with: python train.py resume={run_dir}" in process.output

    resume = [f"resume={run_dir}"]
    for times in (1, 2):
        process = Process(resume)
        assert process.wait_for("writing to")
        time.sleep(0.3)
        for _ in range(times):
            process.send(signal.SIGINT)
            assert process.wait_for("stopping after this step") or times == 2
        assert process.end() == 130
        assert "Traceback" not in process.output

    process = Process(resume)
    assert process.wait_for("writing to")
    deadline = time.monotonic() + 30
    while not list(folder.glob(".*.ckpt.*")) and time.monotonic() < deadline:
        pass
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL

    done = train(*resume)
    assert not list(folder.glob(".*.ckpt.*"))
    assert differences(run_dir, reference) == []
    done = train(*resume)
    assert done.stderr == ""
    assert "is complete" in done.stdout


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(settings, reference, tmp_path):
    """There is nothing to continue from but the configuration, and that suffices."""
    run_dir = tmp_path / "run"
    process = Process([*settings, f"run_dir={run_dir}"])
    wait_for_file(run_dir / "config.yaml")
    process.send(signal.SIGKILL)
    process.end()
    assert not list(run_dir.glob("checkpoints/*"))
    done = train(f"resume={run_dir}")
    assert "has no checkpoint yet: beginning at its first step" in done.stdout
    assert differences(run_dir, reference) == []


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # best.ckpt may be the same file by another name
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.unlink()
    file.touch()


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "cut short"), (flip_a_bit, "damaged"), (empty, "cut short"), (Path.unlink, "is missing")],
)
def test_damaged_checkpoint(hurt, damage, words, capsys):
    """The one before it takes its place, and a line says so."""
    last = hurt / "checkpoints/last.ckpt"
    if last.samefile(hurt / "checkpoints/best.ckpt"):
        (hurt / "checkpoints/best.ckpt").unlink()
    damage(last)
    with Run.open(hurt) as run:
        assert run.file.name == "previous.ckpt"
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(last) in warning
    assert words in warning
    assert "going on from previous.ckpt of step" in warning
    assert last.with_suffix(".ckpt.damaged").exists() == (words != "is missing")


def test_all_checkpoints_damaged(hurt):
    """Then there is nothing to go on from, and the first of them is named."""
    for file in hurt.glob("checkpoints/*.ckpt"):
        empty(file)
    line = refused(f"resume={hurt}")
    assert re.search(r"last\.ckpt: .*; and no other checkpoint of the run can be read$", line)


class Spoil(Callback):
    """Makes a weight nan before the first step, as faulty memory might."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        with torch.no_grad():
            module.model.final_norm.bias[3] = float("nan")


def test_weights_that_are_not_finite(hurt):
    """Training ends before the update, names the step and the layers, and saves nothing."""
    before = {file.name: file.read_bytes() for file in hurt.glob("checkpoints/*.ckpt")}
    step = checkpoint.load(hurt / "checkpoints/last.ckpt")["step"]
    session = resume_run(str(hurt))
    with pytest.raises(NonFiniteError) as end:
        fit(session, [Spoil()])
    message, norms = str(end.value).splitlines()
    assert f"step {step + 1}: the gradient is not finite, so no update was made (loss nan); " in message
    assert "init_from=" in message
    assert re.match(r"  gradient norms: token_embedding nan, position_embedding nan, blocks.0 nan", norms)
    assert {file.name: file.read_bytes() for file in hurt.glob("checkpoints/*.ckpt")} == before


@pytest.mark.slow
def test_two_runs_in_one_directory(hurt):
    """The second is refused and names the process of the first."""
    first = Process([f"resume={hurt}"])
    assert first.wait_for("continuing")
    assert f"process {first.process.pid} is training in it" in refused(f"resume={hurt}")
    first.send(signal.SIGKILL)
    first.end()


def test_resume_takes_no_changes(stopped):
    """Other settings are a new run: the message says how to begin one."""
    line = refused(f"resume={stopped}", "optim.lr=0.1")
    assert "optim.lr=0.1 would change it" in line
    assert f"init_from={stopped}" in line


def test_corrupt_tokens(settings, tmp_path):
    """A flipped bit in the prepared text is named, with the remedy."""
    cache = tmp_path / "cache"
    arguments = [a for a in settings if not a.startswith(("data.cache", "horizon"))] + [f"data.cache={cache}"]
    arguments += ["horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    train(*arguments)
    shutil.rmtree(tmp_path / "run")
    file = next(cache.glob("*/train.bin"))
    flip_a_bit(file)
    line = refused(*arguments)
    assert line.startswith(f"train.py: {file}: cannot be read (its SHA-256")
    assert f"delete {file.parent}" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_mixture_continues(settings, tmp_path):
    """A run on several corpora, killed, goes on bit for bit: windows, split tokens, validation and epochs of each."""
    (tmp_path / "more.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(307)))
    path = next(a for a in settings if a.startswith("data.path=")).removeprefix("data.path=")
    mix = [f"data.path=[{path},{tmp_path / 'more.txt'}]", "data.weights=[2,1]", "data=mix", "tokenizer=bpe"]
    arguments = [a for a in settings if not a.startswith(("data.path=", "data=", "tokenizer="))] + mix
    arguments += ["tokenizer.vocab_size=300", "data.bpe_dropout=0.3"]
    train(*arguments, f"run_dir={tmp_path / 'whole'}")
    hurt = tmp_path / "hurt"
    process = Process([*arguments, f"run_dir={hurt}"])
    assert process.wait_for("step 17/")
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    done = train(f"resume={hurt}")
    assert "continuing" in done.stdout
    assert differences(hurt, tmp_path / "whole") == []
    assert list(json.loads((hurt / "metrics.json").read_text())["mix"]) == ["corpus", "more"]


LARGE = ["model.d_model=384", "model.num_layers=4", "model.context_length=512", "model.dropout=0.0"]
LARGE += ["trainer.tokens_per_step=4096", "trainer.precision=fp32", "horizon=2steps", "data.prompts=[]", "logger=[]"]


def train_large(settings, micro_batch, run_dir) -> Process:
    """Begin to train on `micro_batch` windows at once, in a process whose memory is the same every time.

    With more than one arena, glibc reserves 64 MB for each thread that happens to allocate while another one does.
    """
    arguments = [*settings, *LARGE, f"trainer.micro_batch_size={micro_batch}", f"run_dir={run_dir}"]
    return Process(arguments, {"MALLOC_ARENA_MAX": "1"})


def most_memory(process: Process) -> int:
    """The most address space that a process has had, to be asked for while it runs."""
    most = 0
    while process.process.poll() is None:
        if found := re.search(r"VmPeak:\s+(\d+) kB", Path(f"/proc/{process.process.pid}/status").read_text()):
            most = 1024 * int(found[1])
        time.sleep(0.01)
    assert process.end() == 0, process.output
    return most


@pytest.fixture(scope="module")
def between(settings, tmp_path_factory) -> int:
    """An amount of address space in which four windows at once can be trained on, and eight cannot."""
    folder = tmp_path_factory.mktemp("runs")
    one, eight = (most_memory(train_large(settings, size, folder / str(size))) for size in (1, 8))
    assert eight - one > 200_000_000
    return (one + 2 * eight) // 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="SKIPPED LOUDLY: memory can be limited on Linux only")
@pytest.mark.parametrize("micro_batch", ["auto", "8"])
def test_out_of_memory(settings, between, tmp_path, micro_batch):
    """An automatic micro-batch is made smaller, at the same tokens a step; one that was set is named."""
    process = train_large(settings, micro_batch, tmp_path / "run")
    assert process.wait_for("writing to")
    resource.prlimit(process.process.pid, resource.RLIMIT_AS, (between,) * 2)
    code = process.end()
    if micro_batch == "auto":
        assert code == 0, process.output
        assert "out of memory at trainer.micro_batch_size=8: going on with 4 and as" in process.output
        assert checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")["step"] == 2
    else:
        assert code == 2, process.output
        assert "out of memory at trainer.micro_batch_size=8: try trainer.micro_batch_size=4" in process.output
        assert "Traceback" not in process.output
