"""Several processes: who they are, how they meet, and that none outlives the others."""

import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from gpt.exchange import checkpoint
from gpt.training.config.asked import Asked
from gpt.training.config.loading import read, validate
from gpt.training.distributed.launch import as_launched, as_one_of_many, connect, ranks
from gpt.training.distributed.launchers import Ranks, meeting_point
from gpt.training.resume import on_devices, settle_auto
from gpt.training.run import signals
from harness import (
    CONCERNS,
    ROOT,
    begin_run,
    command,
    differences,
    fit,
    needs,
    read_curves,
    refusal,
    tiny_arguments,
    tiny_config,
    train_apart,
    wait_for_file,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2", "SLURM_STEP_NUM_NODES": "2"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "3"}


@pytest.fixture(scope="module")
def settings(corpus_folder) -> list[str]:
    return tiny_arguments(corpus_folder, "trainer.device=cpu")


@pytest.fixture
def variables(monkeypatch):
    """Set the variables of a launcher."""
    return lambda given: [monkeypatch.setenv(name, value) for name, value in given.items()]


# --- who they are ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TORCHRUN, Ranks(3, 6, 1, 2)),
        (SRUN, Ranks(5, 6, 2, 3)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"} | TORCHRUN, Ranks(3, 6, 1, 2)),  # torchrun in srun
        (OPEN_MPI, Ranks(3, 6, 1, 2)),
        (PMI, Ranks(3, 6, 1, 2)),
        (KUBERNETES, Ranks(1, 3, 0, 1)),
        (KUBERNETES | TORCHRUN, Ranks(3, 6, 1, 2)),
        (SRUN | OPEN_MPI, Ranks(3, 6, 1, 2)),  # whose mpirun starts a helper on each machine with srun
        (SRUN | PMI, Ranks(3, 6, 1, 2)),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6"}, Ranks(5, 6, 2, 3)),  # srun --mpi=pmi2
        (SRUN | {"WORLD_SIZE": "6", "MASTER_ADDR": "a01"}, Ranks(5, 6, 2, 3)),  # exported in a job's script
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Ranks()),
        ({}, Ranks()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Ranks()),
        ({"LOCAL_RANK": "1"}, Ranks()),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Ranks()),  # within an allocation, but not by srun
    ],
)
def test_ranks(variables, given, expected):
    """Of each launcher's variables, also of one within another."""
    variables(given)
    assert ranks() == expected
    assert ranks().num_nodes == expected.world_size // expected.devices


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"WORLD_SIZE": "2"}, "RANK= WORLD_SIZE=2"),
        (TORCHRUN | {"RANK": "6"}, "RANK=6 WORLD_SIZE=6"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2: not what torchrun, mpirun or srun sets"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4: not what torchrun, mpirun or srun sets, with as"),
        (KUBERNETES | {"LOCAL_RANK": "1"}, "RANK=1 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=: not what"),
        (KUBERNETES | {"RANK": "3"}, "RANK=3 WORLD_SIZE=3: not what"),
        (SRUN | {"SLURM_PROCID": "one"}, "SLURM_PROCID=one"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE=4: not what"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_SIZE=4 MPI_LOCALRANKID= MPI_LOCALNRANKS=: not what"),
    ],
)
def test_variables_that_do_not_fit(variables, given, shown):
    variables(given)
    assert shown in (line := refusal(ranks))
    assert any(line.endswith(f"unset {name}") for name in given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TORCHRUN | {"MASTER_ADDR": "a01", "MASTER_PORT": "29500"}, ("a01", "29500")),
        (SRUN | {"SLURM_STEP_NODELIST": "a[01-04,07],b[1-3]", "SLURM_JOB_ID": "7"}, ("a01", "15007")),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,b1", "SLURM_JOB_ID": "10007", "SLURM_STEP_ID": "2"}, ("a1", "15009")),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,b1", "MASTER_ADDR": "b1", "MASTER_PORT": "29500"}, ("b1", "29500")),
        (PMI | {"PMI_SIZE": "2", "PMI_RANK": "1"}, ("127.0.0.1", str(15_000 + os.getppid() % 10_000))),
        (KUBERNETES | {"MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}, ("job-0", "23456")),
    ],
)
def test_meeting_point(variables, given, expected):
    variables(given)
    assert meeting_point(ranks()) == expected


def test_jobs_of_mpirun_meet_apart(variables):
    """All ranks of one find the same port, and those of another find another."""
    points = []
    for rank, job in (("2", "1239744513"), ("3", "1239744513"), ("3", "1239023617")):
        variables(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank, "MASTER_ADDR": "a01", "PMIX_NAMESPACE": job})
        points.append(meeting_point(ranks()))
    assert points[0] == points[1] != points[2]
    assert all(15_000 <= int(port) < 25_000 for _, port in points)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (OPEN_MPI | {"PMIX_NAMESPACE": "7"}, "MASTER_ADDR= MASTER_PORT=: 6 processes on 3 machines do not know where"),
        (PMI | {"MASTER_ADDR": "a01"}, "MASTER_ADDR=a01 MASTER_PORT=: 6 processes on 3 machines do not know where"),
        (KUBERNETES, "MASTER_ADDR= MASTER_PORT=: 3 processes on 3 machines do not know where to meet"),
    ],
)
def test_machines_that_cannot_know_where_to_meet(variables, given, shown):
    variables(given)
    assert (line := refusal(connect)).startswith(shown)
    assert "mpirun -x MASTER_ADDR=HOST1 -x MASTER_PORT=29500" in line


def test_configured_and_started_processes(variables):
    """What the user gives must agree with the launcher; what they leave out comes from it."""
    assert (as_launched(None, None), as_launched(5, None)) == ((1, 1), (5, 1))
    assert refusal(as_launched, None, 2).startswith("trainer.num_nodes=2: start train.py with torchrun, mpirun or srun")
    variables(TORCHRUN)
    assert as_launched(None, None) == as_launched(2, 3) == (2, 3)
    for given in ((4, None), (None, 2)):
        assert "but 6 processes were started on 3 machines" in refusal(as_launched, *given)


def test_several_devices_take_several_processes(corpus_folder, tmp_path):
    """From Python, without a launcher: one line, and nothing is written."""
    line = refusal(begin_run, tiny_config(corpus_folder, "trainer.devices=2", f"run_dir={tmp_path / 'run'}"))
    assert line.startswith("trainer.devices=2 takes 2 processes, and this is one: use python train.py, or start this")
    assert not (tmp_path / "run").exists()


class Watcher(Callback):
    """Sees what Lightning has made of a job of SLURM's."""

    def on_train_batch_end(self, trainer, *rest) -> None:
        self.handler = signal.getsignal(signal.SIGUSR1)
        self.environment = trainer._accelerator_connector.cluster_environment


def test_lightning_finds_no_slurm(corpus_folder, tmp_path, variables):
    """It takes over no signal with which to save files of its own and to requeue the job."""
    variables(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"})
    watcher = Watcher()
    fit(begin_run(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}")), [watcher])
    assert isinstance(watcher.handler.__self__, signals.StopSignals)
    assert type(watcher.environment) is LightningEnvironment


# --- a process group that exists already ---


@pytest.fixture
def group():
    """Make a process group of one, which stays the test's own."""

    def make(backend: str) -> None:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)

    yield make
    torch.distributed.destroy_process_group()


def test_a_process_group_is_joined_and_left(group):
    """It is neither made again nor destroyed at the end."""
    group("gloo")
    before = torch.distributed.group.WORLD
    with as_one_of_many():
        connect()
        assert torch.distributed.group.WORLD is before
    assert torch.distributed.group.WORLD is before


def test_a_process_group_that_does_not_fit(group, variables, monkeypatch):
    """Other numbers than the variables', and nothing that sends what lies on the CPU."""
    group("cuda:gloo")
    variables(TORCHRUN)
    assert refusal(connect).startswith("this is process 0 of 1 in its process group, and process 3 of 6 by its var")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    assert refusal(connect).startswith("the process group has cuda:gloo, and nothing for what lies on the CPU: make")


# --- on other numbers of devices ---


def test_windows_stay_the_same(corpus_folder):
    """Any number of devices that divides the windows of a step has the same windows in each step."""
    config = tiny_config(corpus_folder, "trainer.tokens_per_step=192", "trainer.micro_batch_size=4")  # 12 windows
    for devices, num_nodes, size, accumulation in ((2, 1, 3, 2), (3, 1, 4, 1), (3, 2, 2, 1), (4, 3, 1, 1)):
        changed = on_devices(config, devices, num_nodes)
        assert (changed.micro_batch_size, changed.accumulation) == (size, accumulation)
        assert changed.trainer.world_size == devices * num_nodes
        assert validate(dataclasses.asdict(changed)) == changed
    assert on_devices(config, 1, 1) == config
    assert "12 windows, which 5 devices cannot share evenly" in refusal(on_devices, config, 5, 1)


def test_repeating_a_command_on_other_devices(corpus_folder, tmp_path):
    """A job queue may give `resume=auto` other devices each time."""
    session = begin_run(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}"))
    given = dataclasses.replace(session.config, resume="auto", run_dir=str(session.directory))
    for devices in (None, 2):
        asked = Asked(dataclasses.replace(given, trainer=dataclasses.replace(given.trainer, devices=devices)))
        decided = settle_auto(asked).config
        assert (decided.resume, decided.trainer.devices) == (str(session.directory), devices)


# --- signals ---


def test_signals_of_a_launcher_count_once(monkeypatch, capfd):
    """A Ctrl-C reaches a process twice, and once more stops at once only later; above rank 0 nothing is said."""
    stop = signals.StopSignals()
    stop.install()
    try:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(signals, "REPEATED_BY_TORCHRUN", 0.0)
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


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def slurm(rank: int, count: int, port: str) -> dict[str, str]:
    """The variables of a task that srun starts on this machine."""
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NUM_NODES": 1}
    names = {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": 1, "MASTER_PORT": port}
    return {name: str(value) for name, value in (numbers | names).items()}


def operator(rank: int, count: int, port: str) -> dict[str, str]:
    """The variables of a pod of Kubernetes' training operator."""
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}


# What a test of mpirun may need: root's consent, and more processes than cores.
MPI = {f"OMPI_{name}": "1" for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")}
MPI |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
PACKAGES = {"mpirun": "openmpi-bin", "mpiexec.hydra": "mpich"}


class Group:
    """Real processes of one training, started in one of several ways."""

    def __init__(self, how: str, count: int, *arguments: str):
        script, port = command(*arguments), free_port()
        if how == "own":
            commands = [[*script, f"trainer.devices={count}"]]
        elif how == "torchrun":
            commands = [[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *script[1:]]]
        elif how in PACKAGES:
            if shutil.which(how) is None:
                pytest.skip(f"SKIPPED LOUDLY: there is no {how}: apt-get install {PACKAGES[how]}")
            commands = [[how, "-n", str(count), *script]]
        else:
            commands = [script] * count
        self.how, self.count, apart = how, count, {"srun": slurm, "kubernetes": operator}.get(how)
        self.processes = []
        for rank, words in enumerate(commands):
            env = os.environ | MPI | (apart(rank, count, port) if apart else {})
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.processes.append(subprocess.Popen(words, cwd=ROOT, env=env, **streams))

    def ranks(self) -> list[psutil.Process]:
        """All ranks in order, once they have started; a process has its children in the order of their ranks."""
        deadline = time.monotonic() + 60
        while True:
            found = [psutil.Process(process.pid) for process in self.processes]
            if self.how != "srun":
                found = found[0].children()
                found = [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]
            if len(found) == self.count:
                return sorted(found, key=lambda one: one.pid)
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    def outputs(self) -> list[str]:
        return [CONCERNS.sub("", process.communicate(timeout=120)[0]) for process in self.processes]


DIED = "process 0 of this training has died or does not answer, and so all end"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count", "victim", "line"),
    [
        ("own", 2, 1, "process 1 of 2 died; all others were ended"),
        ("own", 2, 0, "process 0 of 2 died; all others were ended"),
        ("torchrun", 2, 1, ""),  # which prints its own report
        ("mpirun", 2, 1, ""),  # as well
        ("srun", 2, 0, DIED),
    ],
)
def test_no_rank_outlives_another(settings, tmp_path, how, count, victim, line):
    """Whichever is killed, all are gone within 35 s, and one line says which died."""
    run_dir = tmp_path / "run"
    long = ["horizon=100000steps", "trainer.micro_batch_size=1", f"run_dir={run_dir}", "trainer.validate_every=100000"]
    group = Group(how, count, *settings, *long)
    wait_for_file(run_dir / "checkpoints/last.ckpt", 300)
    everyone = group.ranks()
    everyone[victim].kill()
    _, alive = psutil.wait_procs(everyone, timeout=35)
    assert not alive
    output = "".join(group.outputs())
    lines = [found for found in output.splitlines() if found.startswith("train.py:")]
    assert lines == ([f"train.py: {line}"] if line else [])
    if how == "own":
        assert group.processes[0].returncode == 1
    assert how == "torchrun" or "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("how", "victim"), [("own", 1), ("srun", 0)])
def test_a_rank_that_does_not_answer(settings, tmp_path, how, victim):
    """One that is stopped, and so neither ends nor answers, ends all when its time is up, and is named."""
    run_dir = tmp_path / "run"
    long = ["horizon=100000steps", "trainer.answer_minutes=0.1", f"run_dir={run_dir}", "trainer.validate_every=100000"]
    group = Group(how, 2, *settings, *long)
    wait_for_file(run_dir / "checkpoints/last.ckpt", 300)
    everyone = group.ranks()
    everyone[victim].suspend()
    _, alive = psutil.wait_procs(everyone[1 - victim :][:1], timeout=40)
    assert not alive
    everyone[victim].kill()
    output = "".join(group.outputs())
    assert f"train.py: process {victim} of this training has died or does not answer, and so all end" in output


@pytest.mark.slow
def test_processes_that_are_left_alone_stop(settings, tmp_path):
    """When the process that started them is killed, the ranks save and end."""
    run_dir = tmp_path / "run"
    group = Group("own", 2, *settings, "horizon=100000steps", f"run_dir={run_dir}", "trainer.checkpoint_every=100000")
    wait_for_file(run_dir / "checkpoints/best.ckpt", 300)
    everyone = group.ranks()
    group.processes[0].kill()
    _, alive = psutil.wait_procs(everyone, timeout=60)
    assert not alive
    assert f"continue with: python train.py resume={run_dir}" in group.outputs()[0]
    assert (run_dir / "checkpoints/last.ckpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "line"),
    [
        (("seed=7",), "was not started like process 0, but differs in seed=7: start all with the same"),
        (("seed=7", "optim.lr=-1"), "did not meet the others"),
    ],
)
def test_processes_that_differ(settings, tmp_path, second, line):
    """Other arguments, and one that never comes: one line of rank 0, exit code 2, and nothing is made."""
    code = "import gpt.training.distributed.launch as launch; launch.JOIN_SECONDS = 8; "
    code += "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"
    port, run_dir = free_port(), tmp_path / "run"
    words = [sys.executable, "-c", code, "train.py", *settings, "horizon=2steps", f"run_dir={run_dir}"]
    ours = [
        subprocess.Popen(
            [*words, *(second if rank else ())],
            cwd=ROOT,
            env=os.environ | slurm(rank, 2, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [CONCERNS.sub("", process.communicate(timeout=120)[1]) for process in ours]
    assert [process.returncode for process in ours] == [2, 2]
    assert line in errors[0]
    assert errors[0].count("\n") == 1
    assert not run_dir.exists()


EXACT = ["trainer.micro_batch_size=3", "horizon=300steps", "trainer.checkpoint_every=1000", "trainer.log_every=5"]


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Path:
    """A run of two processes to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train_apart(*settings, *EXACT, "trainer.devices=2", f"run_dir={run_dir}")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("own", signal.SIGTERM),
        ("own", signal.SIGUSR1),
        ("torchrun", signal.SIGTERM),
        ("mpirun", signal.SIGUSR1),  # all that it passes on: on the others it kills
        ("mpiexec.hydra", signal.SIGUSR1),
    ],
)
def test_stops_and_continues(settings, tmp_path, whole, how, number):
    """On a signal to whatever started them, all ranks stop after the same step; the run continues to the same bits."""
    run_dir = tmp_path / "run"
    group = Group(how, 2, *settings, *EXACT, f"run_dir={run_dir}")
    wait_for_file(run_dir / "checkpoints/best.ckpt", 300)
    group.processes[0].send_signal(number)
    output = group.outputs()[0]
    assert how == "torchrun" or group.processes[0].returncode == 128 + number
    assert output.count("stopped at step ") == output.count("stopping after this step") == 1
    assert checkpoint.load(run_dir / "checkpoints/last.ckpt")["step"] < 300
    assert train_apart(f"resume={run_dir}").stderr == ""  # with two processes of its own
    assert read_curves(run_dir) == read_curves(whole)


@pytest.mark.slow
def test_pods_are_started_again(settings, tmp_path, whole):
    """Two machines of one process each, numbered as by Kubernetes' operator; one dies, and the same command goes on."""
    words = [*settings, *EXACT, f"run_dir={tmp_path / 'run'}", "resume=auto"]
    first = Group("kubernetes", 2, *words)
    wait_for_file(tmp_path / "run/checkpoints/best.ckpt", 300)
    first.processes[1].kill()
    assert "process 1 of this training has died or does not answer, and so all end" in first.outputs()[0]
    assert first.processes[0].returncode == 1
    second = Group("kubernetes", 2, *words)
    assert "continuing" in second.outputs()[0]
    assert [process.returncode for process in second.processes] == [0, 0]
    trainer = read(tmp_path / "run/config.yaml").trainer
    assert (trainer.devices, trainer.num_nodes) == (1, 2)
    assert read_curves(tmp_path / "run") == read_curves(whole)


@pytest.mark.slow
def test_ray_starts_a_killed_worker_again(settings, tmp_path, whole):
    """The run goes on from its last checkpoint, in the process group that Ray has made, to the same bits."""
    needs("ray")
    words = [word for word in [*settings, *EXACT] if word != "data=text"]
    words += [f"run_dir={tmp_path / 'run'}", "resume=auto"]
    ours = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "RAY_USAGE_STATS_ENABLED": "0"}
    ours["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or else Ray writes one into the home directory
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("on_ray.py")), str(tmp_path), *words],
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "killed").exists()
    assert f"continuing {tmp_path / 'run'} at step 34" in done.stdout
    assert differences(tmp_path / "run", whole) == []


@pytest.mark.slow
def test_the_same_curve_on_any_number_of_devices(settings, tmp_path, capsys):
    """1, 2 and 3 processes, and a run begun on 2 and continued on 1 and 3, agree to 1e-5 over 50 steps in fp32."""
    same = ["optim=adamw", "trainer.precision=fp32", "model.dropout=0", "trainer.log_every=1", "horizon=50steps"]
    same += ["trainer.micro_batch_size=auto", "trainer.keep_every=20"]
    losses = {}
    for devices in (1, 2, 3):
        done = train_apart(*settings, *same, f"trainer.devices={devices}", f"run_dir={tmp_path / str(devices)}")
        assert done.stderr == ""
        losses[f"{devices}"] = dict(read_curves(tmp_path / f"{devices}")["train/loss"])
    for devices in (1, 3):
        run_dir = tmp_path / f"2 then {devices}"
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "config.yaml").write_text((tmp_path / "2/config.yaml").read_text())
        (run_dir / "checkpoints/last.ckpt").write_bytes((tmp_path / "2/checkpoints/step-00000020.ckpt").read_bytes())
        done = train_apart(f"resume={run_dir}", f"trainer.devices={devices}")
        assert done.stderr == ""
        assert f"continuing on {devices} devices instead of 2: the same windows in each step" in done.stdout
        losses[run_dir.name] = dict(read_curves(run_dir)["train/loss"])
        stored = checkpoint.load(run_dir / "checkpoints/last.ckpt")
        assert stored["config"]["trainer"]["devices"] == read(run_dir / "config.yaml").trainer.devices == devices
    with capsys.disabled():
        print("\nstep " + "".join(f"{name:>12}" for name in losses))
        for step in (1, 20, 21, 35, 50):
            print(f"{step:4} " + "".join(f"{values.get(step, float('nan')):12.7f}" for values in losses.values()))
    for name, values in losses.items():
        assert set(values) == set(range(21 if "then" in name else 1, 51))
        assert max(abs(value - losses["1"][step]) for step, value in values.items()) < 1e-5


@pytest.mark.slow
def test_an_automatic_horizon_is_rank_0s(settings, tmp_path):
    """Rank 0 times a few steps while the others wait, and all train as many as it says."""
    run_dir = tmp_path / "run"
    changes = ["horizon=auto", "trainer.tokens_per_step=1152", "trainer.devices=2", f"run_dir={run_dir}"]
    done = train_apart(*settings, *changes)
    assert done.stderr == ""
    assert done.stdout.count("horizon=31steps suits this text and this machine") == 1
    assert checkpoint.load(run_dir / "checkpoints/last.ckpt")["step"] == 31
    assert read(run_dir / "config.yaml").horizon == "31steps"


@pytest.mark.slow
def test_a_time_as_horizon_is_rank_0s(settings, tmp_path):
    """All ranks stop after the same step, and the run ends in time."""
    run_dir = tmp_path / "run"
    done = train_apart(*settings, "horizon=3s", "trainer.devices=2", f"run_dir={run_dir}")
    assert done.stderr == ""
    payload = checkpoint.load(run_dir / "checkpoints/last.ckpt")
    assert payload["schedule"]["total_steps"] == payload["step"]
    assert 3 <= payload["state"]["seconds"] < 4
