"""Training on CUDA: what a CPU can show of it, and what only a GPU can."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback

from gpt import hardware
from gpt.errors import NonFiniteError
from gpt.exchange import checkpoint
from gpt.sampling import scoring
from gpt.text.shards import Corpora
from gpt.training.curves import Curves
from gpt.training.guard import LateGuard
from gpt.training.loader import TrainBatches, make_batch
from gpt.training.module import GPTModule
from gpt.training.plan import Plan, make_plan
from gpt.training.session import Session, load_corpora
from gpt.training.steps import Clock
from harness import ROOT, differences, tiny_config, write_corpus

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED LOUDLY: there is no GPU")
QUIET = ["data.prompts=[]", "logger=[csv]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    write_corpus(folder)
    return folder


def begin(folder: Path, run_dir: Path, *changes: str) -> Session:
    return Session.begin(tiny_config(folder, "horizon=7steps", f"run_dir={run_dir}", *QUIET, *changes))


# --- a step that reads nothing from the device ---


def cuda_module(folder: Path, *changes: str) -> tuple[GPTModule, Plan, Corpora]:
    """A module as it is made for CUDA, still on the CPU."""
    config = tiny_config(folder, "horizon=7steps", "trainer.device=cuda", "trainer.precision=bf16", *changes)
    corpora = load_corpora(config, say=lambda line: None)
    plan = make_plan(config, corpora.train_tokens, automatic=False)
    return GPTModule(config, plan, corpora), plan, corpora


@pytest.mark.parametrize("optim", ["muon", "adamw"])
@pytest.mark.parametrize("late", [True, False])
def test_a_step_reads_nothing_from_the_device(folder, tmp_path, monkeypatch, optim, late):
    """On PyTorch's meta device, from which no number can be read, a whole step with clipping and curves runs; with the
    guard that reads at once, it does not.
    """
    module, plan, _ = cuda_module(folder, f"optim={optim}", "optim.clip=1.0")
    monkeypatch.setattr(LateGuard, "watch", lambda self, step, loss, norm: norm.isfinite())
    module.late_guard = module.late_guard if late else None
    for block in module.model.blocks:
        block.attention.fused_kernel = True
    module.to("meta")
    module._parameters_list = list(module.parameters())  # moving there makes new ones, unlike moving to a GPU
    optimizer = module.configure_optimizers()
    curves = Curves(tmp_path, Clock(), None)
    trainer = SimpleNamespace(world_size=1, is_global_zero=True)
    for step in (1, 2):
        for i in range(plan.accumulation):
            module.training_step(tuple(part.to("meta") for part in make_batch(module, 0)), i).backward()
        if not late:
            with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
                module.on_before_optimizer_step(optimizer)
            return
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        curves.on_step_end(trainer, module, step)
    assert curves._losses.is_meta


def test_batches_for_cuda_are_pinned(folder, monkeypatch):
    """In memory from which copying does not wait; for a CPU they stay where they are."""
    module, _, _ = cuda_module(folder)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(GPTModule, "trainer", SimpleNamespace(world_size=1))
    batches = TrainBatches(module)
    batches._make(0)
    assert not pinned
    monkeypatch.setattr(GPTModule, "device", torch.device("cuda"))
    assert [id(part) for part in batches._make(0)] == [id(part) for part in pinned]


# --- the guard that looks a step late, made to work on the CPU ---


class Late(Callback):
    """Gives a CPU's module the guard of a GPU's, and spoils a weight before the batches of one step."""

    def __init__(self, spoiled: int | None = None):
        self.spoiled = spoiled

    def setup(self, trainer, module, stage: str) -> None:
        module.late_guard = LateGuard(module.plan, module.config.seed)

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.spoiled:
            with torch.no_grad():
                module.model.final_norm.bias[3] = float("nan")


@pytest.mark.slow
def test_late_guard_changes_no_bits(folder, tmp_path):
    """A run with it equals one with the guard that looks at once."""
    begin(folder, tmp_path / "a", "data.prompts=[x]").fit()
    begin(folder, tmp_path / "b", "data.prompts=[x]").fit([Late()])
    assert differences(tmp_path / "b", tmp_path / "a") == []


@pytest.mark.parametrize("spoiled", [4, 5, 7])
def test_late_guard_names_the_step_and_saves_nothing_after_it(folder, tmp_path, spoiled):
    """Whether the next look is in the following step, or before a checkpoint or the last one: the error names the step
    of the gradient, and what is on disk is the last good checkpoint.
    """
    often = ["trainer.checkpoint_every=5", "trainer.validate_every=100"]
    session = begin(folder, tmp_path / "run", *often)
    session.plan = session.plan.for_steps(7, 100)
    expected = f"^step {spoiled}: the gradient is not finite, so nothing was saved after it \\(loss nan; windows "
    with pytest.raises(NonFiniteError, match=f"{expected}{(spoiled - 1) * 6} to {spoiled * 6 - 1} of"):
        session.fit([Late(spoiled)])
    last = tmp_path / "run/checkpoints/last.ckpt"
    assert last.exists() == (spoiled > 5)
    if last.exists():
        payload = checkpoint.load(last)
        assert payload["step"] == 5 and all(w.isfinite().all() for w in payload["state_dict"].values())


# --- arithmetic ---


def settings() -> tuple:
    memory = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), memory


def test_arithmetic():
    """TF32 on CUDA only, deterministic kernels where asked for; all as before in the end, even after an error."""
    before = settings()
    assert before == ("highest", False, True)
    with hardware.arithmetic("cpu", deterministic=False):
        assert settings() == ("highest", False, False)
    with pytest.raises(KeyError), hardware.arithmetic("cuda", deterministic=True):
        assert settings() == ("high", True, False)
        with hardware.arithmetic("cuda", deterministic=False):
            assert settings() == ("high", False, False)
        assert settings() == ("high", True, False)
        raise KeyError
    assert settings() == before


def test_workspace_of_cublas(monkeypatch):
    """Choosing CUDA sets what deterministic products need, before there is any; a user's own setting stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given, expected in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
        if given is None:
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        hardware.choose_device("cpu")
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == given
        hardware.choose_device("cuda")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected


class Watch(Callback):
    """Notes the settings in a step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        self.seen = settings()


@pytest.mark.slow
def test_deterministic_on_a_cpu_changes_no_bits(folder, tmp_path):
    """The run is the same, samples included, except for what its configuration says."""
    watches = []
    for value in ("false", "true"):
        watches.append(Watch())
        begin(folder, tmp_path / value, "data.prompts=[x]", f"trainer.deterministic={value}").fit([watches[-1]])
    assert [watch.seen[1] for watch in watches] == [False, True]
    found = differences(tmp_path / "true", tmp_path / "false")
    assert found and all(".config.trainer.deterministic: True and False" in line for line in found)


# --- validation ---


@pytest.mark.parametrize(
    ("gib", "d_model", "ranks", "expected"),
    [(80, 768, 1, 65536), (80, 768, 8, 8192), (16, 768, 1, 32768), (24, 1600, 1, 16384), (1, 1600, 8, 4096)],
)
def test_tokens_at_once(monkeypatch, gib, d_model, ranks, expected):
    """By the memory of the GPU and the width of the model, in whole powers of two; 4,096 on a CPU."""
    weight = torch.empty(2, d_model)
    model = SimpleNamespace(token_embedding=SimpleNamespace(weight=weight))
    assert scoring.tokens_at_once(model, ranks) == 4096
    memory = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    model.token_embedding.weight = SimpleNamespace(is_cuda=True, device="cuda", shape=weight.shape)
    assert scoring.tokens_at_once(model, ranks) == expected


# --- the script that measures all of this ---


def gpu_sh(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run benchmarks/gpu.sh from another folder, as if there were no GPU."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "finds no CUDA GPU, or no PyTorch: run this where it does, or test the script with --cpu"),
        (["--cpu", "speed"], "gpu.sh: speed is not known: the first lines of this file say what it takes"),
        (["--cpu", "--text", "missing.txt"], "missing.txt: No such file"),
    ],
)
def test_script_mistakes(tmp_path, arguments, message):
    """One line, exit code 2, and nothing measured."""
    done = gpu_sh(tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out/rows.tsv").exists()


@pytest.mark.slow
def test_script(folder, tmp_path):
    """The parts that train and score run to their end, print their rows last, and leave them in a file."""
    done = gpu_sh(tmp_path, "--cpu", "--text", str(folder / "corpus.txt"), "score", "resume", "learn")
    rows = [line.split("\t") for line in (tmp_path / "out/rows.tsv").read_text().splitlines()]
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in rows] == ["machine", "resume", "learn", "score", "score", "score"]
    assert rows[1][2] == "at step 40 of 40: equals the uninterrupted run bit for bit"
    assert "nats per byte in" in rows[2][2]
    assert done.stdout.splitlines()[-1].split()[-1] == rows[-1][2].split()[-1] == "tokens/s"


# --- on a GPU ---


class Strict(Callback):
    """Has PyTorch raise if the host waits for the GPU between two steps that write no curves."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        if trainer.global_step in (1, 2):
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")


@GPU
@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_a_cuda_step_does_not_wait(folder, tmp_path, optim):
    """From its first batch to its update."""
    try:
        begin(folder, tmp_path / "run", f"optim={optim}", "trainer.compile=false", "trainer.log_every=7").fit(
            [Strict()]
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_deterministic_resume_is_exact_on_cuda(folder, tmp_path, precision, compiled):
    """A run that continues from its step 5 ends with the bits of one that was never stopped."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    fixed = ["trainer.deterministic=true", f"trainer.precision={precision}", f"trainer.compile={compiled}"]
    session = begin(folder, whole, "horizon=9steps", "trainer.keep_every=5", "data.prompts=[x]", *fixed)
    session.fit()
    shutil.copytree(whole, part)
    shutil.copy(part / "checkpoints/step-00000005.ckpt", part / "checkpoints/last.ckpt")
    for name in ("best", "previous"):
        (part / f"checkpoints/{name}.ckpt").unlink(missing_ok=True)
    resumed = Session.resume(str(part))
    assert resumed is not None
    resumed.fit()
    ends = [checkpoint.load(run / "checkpoints/last.ckpt") for run in (whole, part)]
    for name, weight in ends[0]["state_dict"].items():
        assert torch.equal(weight, ends[1]["state_dict"][name]), name


@GPU
def test_a_broken_gradient_on_cuda_is_named(folder, tmp_path):
    """As on a CPU, a step late."""
    late = Late(4)
    late.setup = lambda *_, **__: None
    with pytest.raises(NonFiniteError, match=r"^step 4: the gradient is not finite, so nothing was saved after it"):
        begin(folder, tmp_path / "run", "trainer.compile=false").fit([late])


@GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_learns_what_a_cpu_learns(folder, tmp_path, precision):
    """The same windows and rates: after 7 steps both are at the same loss, as far as rounding and dropout allow."""
    losses = []
    for device in ("cpu", "cuda"):
        changes = [f"trainer.device={device}", f"trainer.precision={precision}", "model.dropout=0"]
        session = begin(folder, tmp_path / device, *changes)
        session.fit()
        losses.append(session.metrics["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
