"""Several processes: their ranks, their process group, and that none outlives the others."""

import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.training import distributed, stop_signals
from gpt.training.config import load_config, parse_config
from gpt.training.distributed import init_process_group, resolve_devices
from gpt.training.resume import with_devices
from harness import (
    ROOT,
    SAMPLES,
    Process,
    begin_run,
    differences,
    free_port,
    import_or_skip,
    python_program,
    read_tensorboard,
    refusal,
    start_ranks,
    tiny_arguments,
    tiny_config,
    torchrun_variables,
    train,
    train_in_subprocess,
    train_on_ranks,
    wait_for_file,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8"}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "3"}


@pytest.fixture(scope="module")
def settings(corpus_folder) -> list[str]:
    return tiny_arguments(corpus_folder, "trainer.device=cpu")


@pytest.fixture
def set_variables(monkeypatch):
    """Set environment variables as a launcher does."""
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


# --- ranks ---


@pytest.mark.parametrize(
    ("variables", "numbers"),
    [
        (TORCHRUN, (3, 6, 1, 2, 3)),
        (SRUN | TORCHRUN, (3, 6, 1, 2, 3)),  # torchrun under srun
        (KUBERNETES | OPEN_MPI | MPICH | TORCHRUN, (3, 6, 1, 2, 3)),
        (dict.fromkeys(TORCHRUN, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, (0, 1, 0, 1, 1)),
        ({}, (0, 1, 0, 1, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, 1)),  # the only pod
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0, 1, 1)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1, 0, 1, 1)),  # in an allocation, without srun
    ],
)
def test_ranks_come_from_torchruns_variables(set_variables, variables, numbers):
    set_variables(variables)
    functions = ("rank", "world_size", "local_rank", "local_world_size", "num_nodes")
    assert tuple(getattr(distributed, name)() for name in functions) == numbers
    assert distributed.is_main_process() == (numbers[0] == 0)


@pytest.mark.parametrize(
    ("variables", "values"),
    [
        (TORCHRUN | {"RANK": "6"}, "RANK=6 WORLD_SIZE=6"),
        (TORCHRUN | {"RANK": "one"}, "RANK=one WORLD_SIZE=6"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"),
        ({"RANK": "1"}, "RANK=1 WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ],
)
def test_contradictory_variables_are_refused(set_variables, variables, values):
    set_variables(variables)
    line = refusal(distributed.rank)
    assert values in line
    assert "start train.py with torchrun, or unset them" in line


@pytest.mark.parametrize(
    ("variables", "values", "hint"),
    [
        (SRUN | MPICH, "SLURM_STEP_NUM_TASKS=6", "srun --ntasks-per-node=1 torchrun --nnodes=NODES"),
        (SRUN | OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4", "mpirun --map-by ppr:1:node --bind-to none torchrun"),
        (MPICH, "PMI_SIZE=8", "mpiexec -ppn 1 torchrun --nnodes=NODES"),
        (KUBERNETES, "WORLD_SIZE=3 RANK=1", "torchrun --nnodes=$WORLD_SIZE --nproc-per-node=GPUS --node-rank=$RANK"),
    ],
)
def test_other_launchers_must_start_torchrun(set_variables, variables, values, hint):
    set_variables(variables)
    line = refusal(distributed.rank)
    assert line.startswith(f"{values}: ")
    assert f"use {hint}" in line
    assert line.endswith(f"unset {values.partition('=')[0]} to train alone")


def test_configured_and_started_processes(set_variables):
    """The configuration must agree with torchrun. Missing values come from torchrun."""
    assert (resolve_devices(None, None), resolve_devices(5, None)) == ((1, 1), (5, 1))
    assert refusal(resolve_devices, None, 2).startswith("trainer.num_nodes=2: start train.py with torchrun")
    set_variables(TORCHRUN)
    assert resolve_devices(None, None) == resolve_devices(2, 3) == (2, 3)
    for configured in ((4, None), (None, 2)):
        assert "but 6 processes were started on 3 machines" in refusal(resolve_devices, *configured)


def test_several_devices_take_several_processes(corpus_folder, tmp_path):
    """From Python without a launcher, they are refused and nothing is written."""
    line = refusal(begin_run, tiny_config(corpus_folder, "trainer.devices=2", f"run_dir={tmp_path / 'run'}"))
    assert line.startswith("trainer.devices=2 takes 2 processes, and this is one: use python train.py, or start this")
    assert not (tmp_path / "run").exists()


# --- an existing process group ---


@pytest.fixture
def make_group():
    """Return a function that creates a process group of one process."""

    def make(backend: str) -> None:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)

    yield make
    torch.distributed.destroy_process_group()


def test_an_existing_process_group_is_used_and_left(make_group):
    """The group is neither created again nor destroyed at the end."""
    make_group("gloo")
    group = torch.distributed.group.WORLD
    with distributed.distributed_errors():
        init_process_group("auto")
        assert torch.distributed.group.WORLD is group
    assert torch.distributed.group.WORLD is group


def test_a_process_group_that_does_not_fit_is_refused(make_group, set_variables, monkeypatch):
    """The group has other ranks than the variables, or no backend for the CPU."""
    make_group("cuda:gloo")
    set_variables(TORCHRUN)
    assert refusal(init_process_group, "auto").startswith(
        "this is process 0 of 1 in its process group, and process 3 of 6 by"
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    assert refusal(init_process_group, "auto").startswith(
        "the process group has cuda:gloo, and no backend for tensors on the CPU"
    )


# --- other numbers of devices ---


def test_sequences_stay_the_same(corpus_folder):
    """Any number of devices that divides the sequences of a step trains on the same sequences."""
    config = tiny_config(corpus_folder, "trainer.tokens_per_step=192", "trainer.micro_batch_size=4")  # 12 sequences
    for devices, num_nodes, size, accumulation_steps in ((2, 1, 3, 2), (3, 1, 4, 1), (3, 2, 2, 1), (4, 3, 1, 1)):
        changed = with_devices(config, devices, num_nodes)
        assert (changed.micro_batch_size, changed.accumulation_steps) == (size, accumulation_steps)
        assert changed.trainer.world_size == devices * num_nodes
        assert parse_config(dataclasses.asdict(changed)) == changed
    assert with_devices(config, 1, 1) == config
    assert "12 sequences, which 5 devices cannot share evenly" in refusal(with_devices, config, 5, 1)


# --- signals ---


def test_signals_of_a_launcher_count_once(monkeypatch, capfd):
    """Ctrl-C reaches a process twice. Only a later signal stops at once. Ranks above 0 print nothing."""
    stop = stop_signals.StopSignals()
    stop.install()
    try:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received_signal == signal.SIGINT
        monkeypatch.setattr(stop_signals, "TORCHRUN_REPEATED_SIGNAL_SECONDS", 0.0)
        monkeypatch.setenv("RANK", "1")
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        stop.restore()
    assert capfd.readouterr().err.count("stopping after this step") == 1


# --- real processes ---

LONG = ["horizon=100000steps", "trainer.validate_every=100000"]
EXACT = [SAMPLES, "horizon=101steps", "trainer.checkpoint_every=1000", "trainer.log_every=5"]


class Training:
    """The processes of one training.

    Args:
        launcher: `devices` (of train.py), `torchrun`, `hand`, or `machines`: one torchrun for each machine.
        count: The number of ranks.
        arguments: The arguments of train.py.
    """

    def __init__(self, launcher: str, count: int, *arguments: str):
        self.launcher = launcher
        self.count = count
        if launcher == "hand":
            self.processes = start_ranks(count, *arguments)
        elif launcher == "devices":
            self.processes = [Process([*arguments, f"trainer.devices={count}"])]
        else:
            torchrun = ["-m", "torch.distributed.run"]
            machines = [f"--nnodes={count}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
            machines.append(f"--master-port={free_port()}")
            options = [[f"--nproc-per-node={count}"]]
            if launcher == "machines":
                options = [[*machines, f"--node-rank={node}"] for node in range(count)]
            self.processes = [Process(arguments, launcher=[*torchrun, *words]) for words in options]

    def ranks(self) -> list[psutil.Process]:
        """Return all ranks in order, once they have started."""
        deadline = time.monotonic() + 60
        while True:
            ranks = [psutil.Process(process.pid) for process in self.processes]
            if self.launcher != "hand":
                children = [child for process in ranks for child in process.children()]
                ranks = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
            if len(ranks) == self.count:
                return sorted(ranks, key=lambda process: process.pid)
            assert time.monotonic() < deadline, ranks
            time.sleep(0.01)

    def end(self) -> tuple[list[int], str]:
        """Return the exit codes of the processes, and what all of them have printed."""
        codes = [process.end() for process in self.processes]
        return codes, "".join(process.output for process in self.processes)


FAILING_WORKER = """
import builtins
import sys
import torch
from gpt.training.distributed import init_process_group, rank
from gpt.training.launch import launch

def fail(request):
    error, failing_ranks = request
    init_process_group("auto")
    if str(rank()) in failing_ranks:
        raise getattr(builtins, error)("the callback is broken")
    torch.distributed.barrier()

if __name__ == "__main__":
    launch(fail, sys.argv[1:], 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("error", "failing_ranks"), [("FileNotFoundError", "1"), ("RuntimeError", "01")])
def test_an_error_is_printed_once(tmp_path, error, failing_ranks):
    """An error on one rank or on all prints one traceback and the rank, and ends with exit code 1."""
    script = tmp_path / "failing_worker.py"
    script.write_text(FAILING_WORKER)
    words = [python_program(), script, error, failing_ranks]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count(f"{error}: the callback is broken") == 1
    assert 'failing_worker.py", line' in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    lines = [f"train.py: process {rank} of 2 failed with the error above; all others were ended" for rank in "01"]
    assert line in [lines[int(rank)] for rank in failing_ranks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "victim", "line"),
    [
        ("devices", 1, "process 1 of 2 died; all others were ended"),
        ("torchrun", 1, ""),  # torchrun prints a report
        ("hand", 0, "process 0 of this training has died or does not answer, and so all end"),
    ],
)
def test_no_rank_outlives_another(settings, tmp_path, launcher, victim, line):
    """If a process is killed, all end within 35 s, and one line names it."""
    run_dir = tmp_path / "run"
    training = Training(launcher, 2, *settings, *LONG, "trainer.micro_batch_size=1", f"run_dir={run_dir}")
    wait_for_file(run_dir / "checkpoints/last.ckpt", 300)
    ranks = training.ranks()
    ranks[victim].kill()
    _, alive = psutil.wait_procs(ranks, timeout=35)
    assert not alive
    codes, output = training.end()
    lines = [printed for printed in output.splitlines() if printed.startswith("train.py:")]
    assert lines == ([f"train.py: {line}"] if line else [])
    if launcher == "devices":
        assert codes == [1]
    assert launcher == "torchrun" or "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "victim"), [("devices", 1), ("hand", 0)])
def test_a_rank_that_does_not_answer(settings, tmp_path, launcher, victim):
    """A suspended process neither ends nor answers. When its time is over, all end, and one line names it."""
    run_dir = tmp_path / "run"
    training = Training(launcher, 2, *settings, *LONG, "trainer.answer_minutes=0.1", f"run_dir={run_dir}")
    wait_for_file(run_dir / "checkpoints/last.ckpt", 300)
    ranks = training.ranks()
    ranks[victim].suspend()
    _, alive = psutil.wait_procs([ranks[1 - victim]], timeout=40)
    assert not alive
    ranks[victim].kill()
    _, output = training.end()
    assert f"train.py: process {victim} of this training has died or does not answer, and so all end" in output


@pytest.mark.slow
def test_processes_without_their_parent_stop(settings, tmp_path):
    """If the process that started the ranks is killed, they save and end."""
    run_dir = tmp_path / "run"
    endless = ["horizon=100000steps", "trainer.checkpoint_every=100000", f"run_dir={run_dir}"]
    training = Training("devices", 2, *settings, *endless)
    wait_for_file(run_dir / "checkpoints/best.ckpt", 300)
    ranks = training.ranks()
    training.processes[0].send(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    _, output = training.end()
    assert f"continue with: python train.py resume={run_dir}" in output
    assert (run_dir / "checkpoints/last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (("seed=7",), "was not started like process 0, but differs in seed=7: start all with the same"),
        (("seed=7", "optim.lr=-1"), "did not meet the others"),
    ],
)
def test_processes_that_differ(settings, tmp_path, changes, line):
    """If a rank has other arguments, or never connects, rank 0 prints one line, and nothing is created."""
    code = "from gpt.training import distributed; distributed.RENDEZVOUS_TIMEOUT_SECONDS = 8; "
    code += "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"
    port = free_port()
    run_dir = tmp_path / "run"
    ranks = []
    for rank in range(2):
        words = [*settings, "horizon=2steps", f"run_dir={run_dir}", *(changes if rank else ())]
        ranks.append(Process(words, torchrun_variables(rank, 2, port), launcher=["-c", code]))
    assert [process.end() for process in ranks] == [2, 2]
    [printed] = [printed for printed in ranks[0].output.splitlines() if printed.startswith("train.py: ")]
    assert line in printed
    assert "Traceback" not in ranks[0].output
    assert not run_dir.exists()


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory) -> Path:
    """Return an uninterrupted run of two processes."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    train_on_ranks(2, *settings, *EXACT, f"run_dir={run_dir}")
    return run_dir


@pytest.mark.promise("runs.md#several devices")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("devices", signal.SIGUSR1), ("devices", signal.SIGINT), ("torchrun", signal.SIGTERM)],
)
def test_stops_and_continues(settings, tmp_path, undisturbed, launcher, number):
    """On a signal, all ranks stop after the same step. The resumed run equals an uninterrupted one bit for bit."""
    run_dir = tmp_path / "run"
    training = Training(launcher, 2, *settings, *EXACT, f"run_dir={run_dir}")
    wait_for_file(run_dir / "checkpoints/best.ckpt", 300)
    starter = training.processes[0]
    if number == signal.SIGINT:
        os.killpg(starter.pid, number)  # as Ctrl-C on a terminal, to all processes
    else:
        starter.send(number)
    codes, output = training.end()
    assert launcher == "torchrun" or codes == [128 + number]
    assert output.count("stopped at step ") == output.count("stopping after this step") == 1
    assert load_checkpoint(run_dir / "checkpoints/last.ckpt")["step"] < 101
    if number == signal.SIGUSR1:
        assert train_in_subprocess(f"resume={run_dir}").stderr == ""  # with two processes of its own
    else:
        train_on_ranks(2, f"resume={run_dir}")
    assert read_tensorboard(run_dir) == read_tensorboard(undisturbed)


@pytest.mark.slow
def test_machines_are_started_again(settings, tmp_path, undisturbed):
    """After a rank of one machine died, all end, and the same commands on two machines continue the run."""
    words = [*settings, *EXACT, f"run_dir={tmp_path / 'run'}", "resume=auto"]
    first = Training("machines", 2, *words)
    wait_for_file(tmp_path / "run/checkpoints/best.ckpt", 300)
    first.ranks()[1].kill()
    assert first.end()[0] == [1, 1]
    codes, output = Training("machines", 2, *words).end()
    assert codes == [0, 0]
    assert "continuing" in output
    trainer = load_config(tmp_path / "run/config.yaml").trainer
    assert (trainer.devices, trainer.num_nodes) == (1, 2)
    assert read_tensorboard(tmp_path / "run") == read_tensorboard(undisturbed)


@pytest.mark.slow
def test_ray_starts_a_killed_worker_again(settings, tmp_path, undisturbed):
    """In Ray's process group, the run continues from its last checkpoint and equals an uninterrupted one."""
    import_or_skip("ray")
    words = [word for word in [*settings, *EXACT] if word != "data=text"]
    words += [f"run_dir={tmp_path / 'run'}", "resume=auto"]
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes one into the home directory
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_worker.py")), str(tmp_path), *words],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "killed").exists()
    assert f"continuing {tmp_path / 'run'} at step" in done.stdout
    assert differences(tmp_path / "run", undisturbed) == []


@pytest.mark.slow
def test_the_same_curve_on_any_number_of_devices(settings, tmp_path):
    """In fp32, 1 and 2 processes agree to 1e-5 over 30 steps, and so do runs of 2 that 1 and 3 continue.

    In bf16, 3 processes agree to 0.02. Each adds up the gradients of two micro-batches before they exchange them.
    """
    same = [*settings, "optim=adamw", "model.dropout=0", "trainer.log_every=1", "horizon=30steps"]
    exact = [*same, "trainer.precision=fp32", "trainer.micro_batch_size=auto", "trainer.keep_every=20"]
    train(*exact, f"run_dir={tmp_path / '1'}")
    train_on_ranks(2, *exact, f"run_dir={tmp_path / '2'}")
    rounded = [*same, "trainer.precision=bf16", "trainer.micro_batch_size=1"]
    train_on_ranks(3, *rounded, f"run_dir={tmp_path / 'bf16'}")
    for devices in (1, 3):
        run_dir = tmp_path / f"2 then {devices}"
        (run_dir / "checkpoints").mkdir(parents=True)
        shutil.copy(tmp_path / "2/config.yaml", run_dir)
        shutil.copy(tmp_path / "2/checkpoints/step-00000020.ckpt", run_dir / "checkpoints/last.ckpt")
        if devices == 1:
            printed = train(f"resume={run_dir}", "trainer.devices=1").stdout
        else:
            printed = train_on_ranks(devices, f"resume={run_dir}")
        assert f"continuing on {devices} devices instead of 2: the same sequences in each step" in printed
        stored = load_checkpoint(run_dir / "checkpoints/last.ckpt")
        assert stored["config"]["trainer"]["devices"] == load_config(run_dir / "config.yaml").trainer.devices == devices
    expected = dict(read_curves(tmp_path / "1")["train/loss"])
    for name, tolerance in (("2", 1e-5), ("2 then 1", 1e-5), ("2 then 3", 1e-5), ("bf16", 0.02)):
        losses = dict(read_curves(tmp_path / name)["train/loss"])
        assert set(losses) == set(range(21 if "then" in name else 1, 31))
        assert max(abs(loss - expected[step]) for step, loss in losses.items()) < tolerance


@pytest.mark.slow
def test_rank_0_decides_the_horizon(settings, tmp_path):
    """With `horizon=auto` rank 0 times a few steps; with a time its clock ends the run. All train the same steps."""
    auto = tmp_path / "auto"
    timed = tmp_path / "timed"
    printed = train_on_ranks(2, *settings, "horizon=auto", "trainer.tokens_per_step=1152", f"run_dir={auto}")
    assert printed.count("horizon=31steps suits this text and this machine") == 1
    assert load_checkpoint(auto / "checkpoints/last.ckpt")["step"] == 31
    assert load_config(auto / "config.yaml").horizon == "31steps"
    train_on_ranks(2, *settings, "horizon=3s", f"run_dir={timed}")
    last = load_checkpoint(timed / "checkpoints/last.ckpt")
    assert last["state"]["total_steps"] == last["step"]
    assert last["state"]["seconds"] >= 3
