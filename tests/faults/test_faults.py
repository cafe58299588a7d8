"""Whatever happens to a run, it continues bit for bit as if nothing had happened, or one line has the reason."""

import json
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from gpt.checkpoint import load_checkpoint
from gpt.errors import NonFiniteError
from gpt.training.run_directory import RunDirectory
from harness import Process, differences, fit, resume_run, train, train_refusal, wait_for_file

RUN, STOP = ["horizon=101steps"], 29


@pytest.mark.slow
def test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference(settings, reference, tmp_path):
    """It gets SIGTERM, SIGINT once and twice, and SIGKILL during a save."""
    run_dir, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    process = Process([*settings, f"run_dir={run_dir}"], {"TMPDIR": "/dev/shm"})
    wait_for_file(folder / "last.ckpt")
    process.send(signal.SIGTERM)
    assert process.end() == 143
    assert f"continue with: python train.py resume={run_dir}" in process.output

    resume = [f"resume={run_dir}"]
    for times in (1, 2):
        process = Process(resume)
        assert process.wait_for("/101  train")  # the line of a validation
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
def test_run_killed_before_its_first_checkpoint_starts_again(settings, reference, tmp_path):
    """It needs only its configuration."""
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
def test_damaged_checkpoint_is_replaced_by_the_one_before(hurt, damage, words, capsys):
    """A warning has the file and the reason."""
    last = hurt / "checkpoints/last.ckpt"
    if last.samefile(hurt / "checkpoints/best.ckpt"):
        (hurt / "checkpoints/best.ckpt").unlink()
    damage(last)
    with RunDirectory.open(hurt) as run:
        file, _ = run.load_newest()
    assert file.name == "previous.ckpt"
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(last) in warning
    assert words in warning
    assert "resuming from previous.ckpt of step" in warning
    assert last.with_suffix(".ckpt.damaged").exists() == (words != "is missing")


def test_run_without_an_intact_checkpoint_is_refused(hurt):
    """The line has the first of the damaged ones."""
    for file in hurt.glob("checkpoints/*.ckpt"):
        empty(file)
    line = train_refusal(f"resume={hurt}")
    assert re.search(r"last\.ckpt: .*; and no other checkpoint of the run can be read$", line)


class BreakGradient:
    """Makes the gradient of one bias NaN from the step after `step` on. The weights stay finite."""

    def __init__(self, step: int):
        self.step = step

    def on_train_step_end(self, step, module) -> None:
        if step == self.step:
            module.model.final_norm.bias.register_hook(lambda gradient: gradient * float("nan"))


def test_broken_gradient_ends_the_run_and_saves_nothing(hurt):
    """The message has the step, the layers and the remedy. No update is made, and no checkpoint changes.

    The step before is complete and not saved yet. After any other exception it would be.
    """
    before = {file.name: file.read_bytes() for file in hurt.glob("checkpoints/*")}
    step = load_checkpoint(hurt / "checkpoints/last.ckpt")["step"]
    with pytest.raises(NonFiniteError) as end:
        fit(resume_run(hurt), [BreakGradient(step + 2)])
    message, norms = str(end.value).splitlines()
    assert re.match(rf"step {step + 3}: the gradient is not finite, so no update was made \(loss \d\.\d+\); ", message)
    assert "init_from=" in message
    assert re.match(r"  gradient norms: token_embedding \d.*, blocks.0 \d.*, final_norm nan", norms)
    assert {file.name: file.read_bytes() for file in hurt.glob("checkpoints/*")} == before


@pytest.mark.slow
def test_second_process_in_a_directory_is_refused(hurt):
    """The line has the process id of the first."""
    first = Process([f"resume={hurt}"])
    assert first.wait_for("continuing")
    assert f"process {first.process.pid} is training in it" in train_refusal(f"resume={hurt}")
    first.send(signal.SIGKILL)
    first.end()


def test_resuming_with_other_settings_is_refused(stopped):
    """They are for a new run, and the line has the command for it."""
    line = train_refusal(f"resume={stopped}", "optim.lr=0.1")
    assert "optim.lr=0.1 would change it" in line
    assert f"init_from={stopped}" in line


def test_corrupt_tokens_are_refused(settings, tmp_path):
    """The line has the file with the flipped bit, and the remedy."""
    cache = tmp_path / "cache"
    arguments = [a for a in settings if not a.startswith(("data.cache", "horizon"))] + [f"data.cache={cache}"]
    arguments += ["horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    train(*arguments)
    shutil.rmtree(tmp_path / "run")
    file = next(cache.glob("*/train-*.bin"))
    flip_a_bit(file)
    line = train_refusal(*arguments)
    assert line.startswith(f"train.py: {file}: cannot be read (its SHA-256")
    assert f"delete {file.parent}" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_run_on_a_mixture_continues_bit_for_bit(settings, tmp_path):
    """After a kill, it has the sequences, the BPE-dropout, the validation and the epochs of each corpus."""
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
    assert list(json.loads((hurt / "metrics.json").read_text())["corpus_epochs"]) == ["corpus", "more"]


LARGE = ["model.d_model=384", "model.num_layers=4", "model.context_length=512", "model.dropout=0.0"]
LARGE += ["trainer.tokens_per_step=4096", "trainer.precision=fp32", "horizon=2steps", "data.prompts=[]", "logger=[]"]


def train_large(settings, micro_batch, run_dir) -> Process:
    """Start to train on `micro_batch` sequences at once, in a process whose memory is the same every time.

    With more than one arena, glibc reserves 64 MB for each thread that happens to allocate while another one does.
    """
    arguments = [*settings, *LARGE, f"trainer.micro_batch_size={micro_batch}", f"run_dir={run_dir}"]
    return Process(arguments, {"MALLOC_ARENA_MAX": "1"})


def measure_peak_memory(process: Process) -> int:
    """Wait for the end of a process, and return its largest address space in bytes."""
    peak = 0
    while process.process.poll() is None:
        if match := re.search(r"VmPeak:\s+(\d+) kB", Path(f"/proc/{process.process.pid}/status").read_text()):
            peak = 1024 * int(match[1])
        time.sleep(0.01)
    assert process.end() == 0, process.output
    return peak


@pytest.fixture(scope="module")
def enough_for_four(settings, tmp_path_factory) -> int:
    """An amount of address space in bytes that suffices for four sequences at once, and not for eight."""
    folder = tmp_path_factory.mktemp("runs")
    one, eight = (measure_peak_memory(train_large(settings, size, folder / str(size))) for size in (1, 8))
    assert eight - one > 200_000_000
    return (one + 2 * eight) // 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="SKIPPED LOUDLY: memory can be limited on Linux only")
@pytest.mark.parametrize("micro_batch", ["auto", "8"])
def test_lack_of_memory_shrinks_an_automatic_micro_batch(settings, enough_for_four, tmp_path, micro_batch):
    """The tokens of a step stay the same. A size that the user gave is refused, with the next one to try."""
    process = train_large(settings, micro_batch, tmp_path / "run")
    assert process.wait_for("writing to")
    resource.prlimit(process.process.pid, resource.RLIMIT_AS, (enough_for_four,) * 2)
    code = process.end()
    if micro_batch == "auto":
        assert code == 0, process.output
        assert "out of memory at trainer.micro_batch_size=8: continuing with 4 and as" in process.output
        assert load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["step"] == 2
    else:
        assert code == 2, process.output
        assert "out of memory at trainer.micro_batch_size=8: try trainer.micro_batch_size=4" in process.output
        assert "Traceback" not in process.output
