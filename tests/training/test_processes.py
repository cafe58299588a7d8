"""Several processes: who they are, how they meet, and that none outlives the others."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from lightning import Callback
from torch import distributed

from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.training import following, processes, signals
from gpt.training.config import read, validate
from gpt.training.fitting import Environment
from gpt.training.plan import Plan
from gpt.training.processes import JOIN_SECONDS, Follower, Leader, lead_or_follow
from gpt.training.ranks import Ranks, as_launched, launched
from gpt.training.requeue import begin_or_continue
from gpt.training.resuming import on_devices
from gpt.training.session import Session, _job
from harness import CONCERNS, ROOT, TINY, command, read_curves, tiny_config, train, wait_for_file, write_corpus

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ENDED: list[threading.Thread] = []  # those that would have ended their process
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "3",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a corpus and its prepared text."""
    folder = tmp_path_factory.mktemp("processes")
    write_corpus(folder)
    Session.begin(tiny_config(folder, "horizon=1steps", f"run_dir={folder / 'first'}"))
    return folder


@pytest.fixture
def settings(folder) -> list[str]:
    return [*TINY, "trainer.device=cpu", f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}"]


@pytest.fixture
def variables(monkeypatch):
    """Set the variables of a launcher."""

    def call(given: dict[str, str]) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return call


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


# --- who they are ---


def test_ranks_of_torchrun(variables):
    variables(TORCHRUN)
    ranks = launched()
    assert ranks == Ranks(3, 6, 1, 2, "torchrun")
    assert ranks.num_nodes == 3


def test_ranks_of_srun(variables):
    variables(SRUN)
    ranks = launched()
    assert ranks == Ranks(5, 6, 2, 3, "srun")
    assert ranks.num_nodes == 2


def test_torchrun_within_srun(variables):
    """One task of srun on each machine, which starts torchrun there."""
    variables(SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"} | TORCHRUN)
    assert launched() == Ranks(3, 6, 1, 2, "torchrun")


@pytest.mark.parametrize(
    "given", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "1"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}]
)
def test_one_process(variables, given):
    """A single process, and one within an allocation of SLURM's, is no rank of several."""
    variables(given)
    assert launched() is None
    assert as_launched(None, None) == (1, 1)
    assert as_launched(5, None) == (5, 1)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"WORLD_SIZE": "2"}, "RANK= WORLD_SIZE=2"),
        (TORCHRUN | {"RANK": "6"}, "RANK=6 WORLD_SIZE=6"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2: not what torchrun sets"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4: .* as many processes on every machine"),
        (SRUN | {"SLURM_PROCID": "one"}, "SLURM_PROCID=one .*: not what srun sets"),
    ],
)
def test_variables_that_do_not_fit(variables, given, shown):
    variables(given)
    with pytest.raises(UserError, match=f"{shown}.*(unset WORLD_SIZE|unset SLURM_STEP_NUM_TASKS)"):
        launched()


def test_address_of_srun(variables, monkeypatch):
    """The first machine of the list, and a port that follows from the job and the step."""
    variables(SRUN | {JOIN_SECONDS: "0"})
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "to be removed")  # so that both are removed again at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(processes.socket, "create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(
        UserError, match=r"process 5 of 6 did not meet .* MASTER_ADDR=gpu07 MASTER_PORT=18459 within 0 s"
    ):
        lead_or_follow(pytest.fail, pytest.fail)


def test_configured_and_started_processes(variables, monkeypatch):
    """What the user gives must agree with the launcher; what he leaves out comes from it."""
    variables(TORCHRUN)
    with pytest.raises(UserError, match=r"torchrun has started 6 processes of a program .*: have it start train\.py"):
        as_launched(None, None)
    monkeypatch.setattr("gpt.training.ranks.joined", True)
    assert as_launched(None, None) == as_launched(2, 3) == (2, 3)
    with pytest.raises(UserError, match=r"trainer\.devices=4, but torchrun has started 6 processes on 3 machines"):
        as_launched(4, None)
    with pytest.raises(UserError, match=r"trainer\.num_nodes=2, but torchrun has started 6 processes on 3 machines"):
        as_launched(None, 2)


def test_several_machines_take_a_launcher(folder, tmp_path):
    with pytest.raises(UserError, match=r"trainer\.num_nodes=2: start train\.py with torchrun or srun on each"):
        Session.begin(tiny_config(folder, "trainer.num_nodes=2", f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_sweeps_take_one_process(settings, variables, monkeypatch):
    variables(TORCHRUN)
    monkeypatch.setattr("gpt.training.processes.lead_or_follow", lambda main, follow: main())
    done = train("-m", *settings, "seed=1,2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: torchrun has started 6 processes, and a sweep is one: use python train.py")


class Watcher(Callback):
    """Sees what Lightning has made of a job of SLURM's."""

    def on_train_batch_end(self, trainer, *rest) -> None:
        self.handler = signal.getsignal(signal.SIGUSR1)
        self.environment = trainer._accelerator_connector.cluster_environment


def test_lightning_finds_no_slurm(folder, tmp_path, variables):
    """It takes over no signal with which to save files of its own and to requeue the job."""
    variables(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"})
    watcher = Watcher()
    Session.begin(tiny_config(folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}")).fit([watcher])
    assert watcher.handler == signal.SIG_DFL
    assert type(watcher.environment) is Environment


# --- how they meet, and how they end ---


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def exits(monkeypatch) -> Iterator[list[int]]:
    """The exit codes with which processes would have ended at once."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        ENDED.append(threading.current_thread())
        threading.Event().wait()  # its thread does nothing more

    monkeypatch.setattr(processes.os, "_exit", leave)
    monkeypatch.setattr(processes, "GRACE", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield codes
    wait_until(lambda: not [t for t in threading.enumerate() if "_listen" in t.name and t not in ENDED])


@pytest.fixture
def three(exits) -> Iterator[tuple[Leader, list[Follower]]]:
    """Three processes that have met, as threads of this one."""
    store = distributed.HashStore()
    leader = Leader(Ranks(0, 3, 0, 3, "torchrun"), store)
    followers = [Follower(Ranks(rank, 3, rank, 3, "torchrun"), store) for rank in (1, 2)]
    leader.gather()
    yield leader, followers
    leader.end(0)


def test_jobs_reach_all(three):
    leader, followers = three
    leader.send({"seed": 5})
    leader.end(0)  # and once more when the test is over
    for follower in followers:
        assert [follower.jobs.get(timeout=5), follower.jobs.get(timeout=5)] == [{"seed": 5}, {"end": 0}]


def test_a_mistake_of_one_is_an_error_of_rank_0(three, exits, capsys):
    """Rank 0 raises the first line, and all others end with the exit code of a mistake."""
    leader, followers = three
    followers[1].report("the disk is made of cheese")
    with pytest.raises(UserError, match=r"^process 2: the disk is made of cheese$"):
        leader.raise_failure()
    wait_until(lambda: exits == [2, 2])
    assert capsys.readouterr().err == ""


def test_a_death_is_noticed_by_rank_0(three, exits, capsys):
    leader, followers = three
    followers[0]._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SystemExit, match="1"):
        leader.raise_failure()
    assert capsys.readouterr().err.count("process 1 of 3 died; all others were ended\n") == 1
    wait_until(lambda: exits == [1, 1])


def test_rank_0_that_does_not_notice_a_death_is_ended(three, exits, capsys):
    """It may compute for hours, or wait for the others on a GPU."""
    _, followers = three
    followers[1]._connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(exits) == 3)
    assert set(exits) == {1}
    assert "train.py: process 2 of 3 died; all others were ended\n" in capsys.readouterr().err


def test_the_death_of_rank_0_is_told_once(three, exits, capsys):
    leader, _ = three
    leader._over.set()
    for connection in leader._others.values():
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: exits == [1, 1])
    assert capsys.readouterr().err == "train.py: process 0 of 3 died; all others were ended\n"


def test_an_error_without_a_cause_elsewhere_stays_what_it_is(three):
    three[0].raise_failure()


def test_strangers_are_not_let_in(exits):
    """Whoever connects without the secret of this training is no rank of it."""
    store = distributed.HashStore()
    leader = Leader(Ranks(0, 2, 0, 2, "torchrun"), store)
    port, _ = json.loads(store.get("control"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b'{"secret": "guessed", "rank": 1, "identity": {}, "host": "elsewhere"}\n')
        follower = Follower(Ranks(1, 2, 1, 2, "torchrun"), store)
        leader.send({"seed": 7})
        assert follower.jobs.get(timeout=5) == {"seed": 7}
    leader.end(0)


def test_processes_that_differ(exits, monkeypatch):
    """Other arguments, or other code, are named before anything is done."""
    store = distributed.HashStore()
    leader = Leader(Ranks(0, 2, 0, 2, "torchrun"), store)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=5"])
    Follower(Ranks(1, 2, 1, 2, "torchrun"), store)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=7"])
    with pytest.raises(
        UserError, match=r"process 1 on \S+ was not started like process 0, but differs in seed=5, seed=7:"
    ):
        leader.gather()
    leader.end(2)


def test_processes_that_do_not_come(exits, monkeypatch):
    monkeypatch.setenv(JOIN_SECONDS, "0.3")
    leader = Leader(Ranks(0, 3, 0, 3, "torchrun"), distributed.HashStore())
    with pytest.raises(UserError, match=r"2 of 3 processes did not come within 0 s: start all .* unset WORLD_SIZE"):
        leader.gather()
    leader.end(2)


def test_a_process_that_dies_on_its_way(exits, capsys):
    """One that rank 0 has started, and that is gone before it has connected."""
    leader = Leader(Ranks(0, 2, 0, 2), distributed.HashStore())
    leader.children = [subprocess.Popen([sys.executable, "-c", ""])]
    with pytest.raises(SystemExit, match="1"):
        leader.send({"seed": 5})
    assert capsys.readouterr().err == "train.py: process 1 of 2 died; all others were ended\n"
    leader.end(1)


def test_rank_0_alone(variables):
    """Variables of a launcher without its processes: one line, after a bounded wait."""
    variables({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", JOIN_SECONDS: "1"})
    variables({"MASTER_PORT": free_port()})
    with pytest.raises(UserError, match=r"process 0 of 2 did not meet the others at MASTER_ADDR=127.0.0.1") as caught:
        lead_or_follow(pytest.fail, pytest.fail)
    assert "\n" not in str(caught.value)


def test_rank_1_alone(variables, capfd):
    variables({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", JOIN_SECONDS: "0"})
    variables({"MASTER_PORT": free_port()})
    with pytest.raises(UserError, match=r"process 1 of 2 did not meet the others .* Connection refused"):
        lead_or_follow(pytest.fail, pytest.fail)
    assert capfd.readouterr().err == ""  # PyTorch would warn several times


def test_port_in_use(variables):
    with socket.create_server(("", 0)) as taken:
        variables({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", JOIN_SECONDS: "1"})
        variables({"MASTER_PORT": str(taken.getsockname()[1])})
        with pytest.raises(UserError, match=r"did not meet .*EADDRINUSE.*on a free port"):
            lead_or_follow(pytest.fail, pytest.fail)


def test_address_is_missing(variables, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    variables(TORCHRUN)
    with pytest.raises(UserError, match=r"did not meet the others at MASTER_ADDR= MASTER_PORT= "):
        lead_or_follow(pytest.fail, pytest.fail)


# --- what a rank above 0 refuses ---


def job_of(session: Session) -> dict:
    return json.loads(json.dumps(_job(session.config, session.plan, session.corpora, None) | session._place(None)))


@pytest.fixture
def session(folder, tmp_path) -> Session:
    return Session.begin(tiny_config(folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}"))


def refusal(session: Session, job: dict) -> str:
    with pytest.raises(UserError) as caught:
        following.take_part(SimpleNamespace(ranks=Ranks()), session.config, session.plan, job)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_a_run_that_only_some_ranks_see(session, there):
    job = job_of(session)
    file = session.run_dir / "config.yaml"
    file.unlink() if there == "nothing" else file.write_text("model: {}")
    line = refusal(session, job)
    assert line == (
        f"{session.run_dir}: on {socket.gethostname()} this run is not there: all machines must share the folder"
    )


def test_a_text_that_differs_between_machines(session):
    line = refusal(session, job_of(session) | {"text": "another"})
    assert line == f"the text on {socket.gethostname()} is not the same as for process 0: copy it there"


def test_a_machine_without_the_device(session, monkeypatch):
    monkeypatch.setattr("gpt.hardware.device_count", lambda device: 0)
    assert refusal(session, job_of(session)) == "trainer.devices=1 is more than this machine has: at most 0 of cpu"


class Told:
    """Rank 0's side, for a rank above it: the jobs it gets and what it reports."""

    def __init__(self, *jobs: dict):
        self.ranks, self.reports, self.ended = Ranks(), [], threading.Event()
        self.jobs = SimpleNamespace(get=iter(jobs).__next__)

    def report(self, line: str) -> None:
        self.reports.append(line)


@pytest.mark.parametrize(
    ("error", "report"),
    [(UserError("no"), "no"), (torch.OutOfMemoryError("CUDA out of memory"), "out of memory at .*=3: try .*=1")],
)
def test_rank_0_reports_what_ends_another(session, monkeypatch, error, report):
    """A rank above 0 tells rank 0 its line, and ends with the exit code that rank 0 gives."""
    monkeypatch.setattr(following, "take_part", lambda *_: (_ for _ in ()).throw(error))
    monkeypatch.setattr(signals, "quiet", False)
    before = signal.getsignal(signal.SIGINT)
    told = Told(job_of(session), {"end": 2})
    try:
        assert following.follow(told) == 2  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signals.quiet
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(told.reports) == 1
    assert re.fullmatch(report, told.reports[0])


# --- on other numbers of devices ---


def test_windows_stay_the_same(folder):
    """Any number of devices that divides the windows of a step has the same windows in each step."""
    config = tiny_config(folder, "trainer.tokens_per_step=192", "trainer.micro_batch_size=4")  # 12 windows
    plan = Plan(10, 12, 4, 3)
    for devices, num_nodes, size, accumulation in (
        (1, 1, 4, 3),
        (2, 1, 3, 2),
        (3, 1, 4, 1),
        (3, 2, 2, 1),
        (4, 3, 1, 1),
    ):
        changed, new = on_devices(config, plan, devices, num_nodes)
        assert (new.micro_batch_size, new.accumulation) == (size, accumulation)
        assert new.micro_batch_size * new.accumulation * devices * num_nodes == 12
        assert changed.trainer.world_size == devices * num_nodes
        assert validate(dataclasses.asdict(changed)) == changed
    assert on_devices(config, plan, 1, 1) == (config, plan)
    with pytest.raises(UserError, match="a step of this run has 12 windows, which 5 devices cannot share evenly"):
        on_devices(config, plan, 5, 1)


def test_a_run_without_checkpoints_on_other_devices(session, capsys):
    """It begins with what is now there, and its configuration says so."""
    again = Session.resume(str(session.run_dir), devices=2)
    assert again is not None
    assert (again.config.trainer.devices, again.plan.micro_batch_size, again.plan.accumulation) == (2, 3, 1)
    assert read(session.run_dir / "config.yaml") == again.config
    assert "continuing on" not in capsys.readouterr().out


def test_repeating_a_command_on_other_devices(session):
    """A job queue may give `resume=auto` other devices each time."""
    given = dataclasses.replace(session.config, resume="auto", run_dir=str(session.run_dir))
    for devices in (None, 2):
        trainer = dataclasses.replace(given.trainer, devices=devices)
        decided = begin_or_continue(dataclasses.replace(given, trainer=trainer))
        assert (decided.resume, decided.trainer.devices) == (str(session.run_dir), devices)


# --- signals ---


def test_signals_of_torchrun_count_once(monkeypatch, capfd):
    """A Ctrl-C reaches a process twice under torchrun, and once more stops at once only later."""
    stop = signals.StopSignals()
    stop.install()
    try:
        monkeypatch.setenv(signals.TORCHRUN, "none")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(signals, "TOGETHER", 0.0)
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        stop.restore()
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_signals_above_rank_0(monkeypatch, capfd):
    """Other ranks say nothing, and leave it to rank 0 to stop at once."""
    monkeypatch.setattr(signals, "quiet", True)
    stop = signals.StopSignals()
    stop.install()
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        stop.restore()
    assert (stop.received, capfd.readouterr().err) == (signal.SIGTERM, "")


# --- real processes ---


class Group:
    """Real processes of one training, started in one of three ways."""

    def __init__(self, how: str, count: int, *arguments: str):
        script = command(*arguments)
        if how == "own":
            commands = [[*script, f"trainer.devices={count}"]]
        elif how == "torchrun":
            commands = [[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *script[1:]]]
        else:
            commands = [script] * count
        self.how, self.count = how, count
        port = free_port()
        self.processes = []
        for rank, words in enumerate(commands):
            numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": count, "MASTER_PORT": port}
            numbers |= {"SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": 1}
            env = {name: str(value) for name, value in numbers.items()} if how == "srun" else {}
            self.processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )

    def ranks(self) -> list[psutil.Process]:
        """All ranks in order, once they have started."""
        while True:
            found = {}
            for process in self.processes:
                top = psutil.Process(process.pid)
                for one in [top, *top.children(recursive=True)]:
                    try:
                        names, words = one.environ(), one.cmdline()
                    except psutil.Error:
                        continue
                    if "torch.distributed.run" not in words and {"train.py", "gpt.training.following"} & set(words):
                        found[int(names.get("RANK", names.get("SLURM_PROCID", 0)))] = one
            if len(found) == self.count:
                return [found[rank] for rank in range(self.count)]
            time.sleep(0.01)

    def outputs(self) -> list[str]:
        return [CONCERNS.sub("", process.communicate(timeout=120)[0]) for process in self.processes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count", "victim", "when"),
    [
        ("own", 3, 1, "training"),
        ("own", 2, 0, "starting"),
        ("torchrun", 2, 1, "training"),
        ("srun", 2, 0, "training"),
    ],
)
def test_no_rank_outlives_another(settings, tmp_path, how, count, victim, when):
    """Whichever is killed, all are gone within 30 s, and one line says which died."""
    run_dir = tmp_path / "run"
    long = ["horizon=100000steps", "trainer.micro_batch_size=1", f"run_dir={run_dir}", "trainer.validate_every=100000"]
    group = Group(how, count, *settings, *long)
    if when == "training":
        wait_for_file(run_dir / "checkpoints/last.ckpt", 300)
    ranks = group.ranks()
    ranks[victim].kill()
    begin = time.monotonic()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert time.monotonic() - begin < 30
    output = "".join(group.outputs())
    lines = [line for line in output.splitlines() if line.startswith("train.py:")]
    assert lines == (
        [f"train.py: process {victim} of {count} died; all others were ended"] if when == "training" else []
    )  # at its start, nobody had met it yet
    if how == "own":
        assert ranks[0].returncode == (1 if victim else -signal.SIGKILL)  # psutil has waited for it
    assert how == "torchrun" or "Traceback" not in output  # torchrun prints its own


@pytest.mark.slow
def test_torchrun_stops_and_continues(settings, tmp_path):
    """On SIGTERM to torchrun, all ranks stop after the same step and save once; the run continues to the same bits."""
    exact = ["trainer.micro_batch_size=3", "horizon=200steps", "trainer.checkpoint_every=1000", "trainer.log_every=5"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(*settings, *exact, "trainer.devices=2", f"run_dir={whole}").returncode == 0
    group = Group("torchrun", 2, *settings, *exact, f"run_dir={run_dir}")
    wait_for_file(run_dir / "checkpoints/best.ckpt", 300)
    group.processes[0].send_signal(signal.SIGTERM)
    output = group.outputs()[0]
    assert output.count("stopped at step ") == 1
    assert output.count("stopping after this step") == 1
    assert checkpoint.load(run_dir / "checkpoints/last.ckpt")["step"] < 200
    done = train(f"resume={run_dir}")  # with two processes of its own
    assert done.returncode == 0, done.stderr
    assert read_curves(run_dir) == read_curves(whole)


@pytest.mark.slow
def test_the_same_curve_on_any_number_of_devices(settings, tmp_path, capsys):
    """1, 2 and 3 processes, and a run begun on 2 and continued on 1 and 3, agree to 1e-5 over 50 steps in fp32."""
    same = ["optim=adamw", "trainer.precision=fp32", "model.dropout=0", "trainer.log_every=1", "horizon=50steps"]
    same += ["trainer.micro_batch_size=auto", "trainer.keep_every=20"]
    losses = {}
    for devices in (1, 2, 3):
        done = train(*settings, *same, f"trainer.devices={devices}", f"run_dir={tmp_path / str(devices)}")
        assert (done.returncode, done.stderr) == (0, "")
        losses[f"{devices}"] = dict(read_curves(tmp_path / f"{devices}")["train/loss"])
    for devices in (1, 3):
        run_dir = tmp_path / f"2 then {devices}"
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "config.yaml").write_text((tmp_path / "2/config.yaml").read_text())
        (run_dir / "checkpoints/last.ckpt").write_bytes((tmp_path / "2/checkpoints/step-00000020.ckpt").read_bytes())
        done = train(f"resume={run_dir}", f"trainer.devices={devices}")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"continuing on {devices} devices instead of 2: the same windows in each step" in done.stdout
        losses[run_dir.name] = dict(read_curves(run_dir)["train/loss"])
        stored = checkpoint.load(run_dir / "checkpoints/last.ckpt")
        assert stored["config"]["trainer"]["devices"] == devices
        assert f"devices: {devices}\n" in (run_dir / "config.yaml").read_text()
    with capsys.disabled():
        print("\nstep " + "".join(f"{name:>12}" for name in losses))
        for step in (1, 20, 21, 35, 50):
            print(f"{step:4} " + "".join(f"{values.get(step, float('nan')):12.7f}" for values in losses.values()))
    for name, values in losses.items():
        assert set(values) == set(range(21 if "then" in name else 1, 51))
        assert max(abs(value - losses["1"][step]) for step, value in values.items()) < 1e-5
