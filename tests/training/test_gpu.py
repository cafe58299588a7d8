"""Training on CUDA: tests that run on a CPU, and tests that need a GPU."""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpt
from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.data.token_dataset import TokenDataset
from gpt.errors import NonFiniteError
from gpt.hardware.device import choose_device, numerics
from gpt.model.transformer import TransformerBlock
from gpt.training import loop
from gpt.training.batch_loader import read_micro_batches
from gpt.training.config import with_values
from gpt.training.loop import train_step
from gpt.training.module import GPTModule
from gpt.training.schedule import Schedule
from gpt.training.start import load_dataset
from harness import StopAt, Training, begin_run, fit, resume_run, tiny_config

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED LOUDLY: there is no GPU")
QUIET = ["data.prompts=[]", "logger=[csv]"]


def begin(folder: Path, run_dir: Path, *changes: str) -> Training:
    """Begin a run of seven steps that validates every `trainer.validate_every` steps."""
    training = begin_run(tiny_config(folder, "horizon=7steps", f"run_dir={run_dir}", *QUIET, *changes))
    schedule = replace(training.schedule, validate_every=training.config.trainer.validate_every)
    training.spec = replace(training.spec, schedule=schedule)
    return training


# --- a step that reads nothing from the device ---


def cuda_module(folder: Path, *changes: str) -> tuple[GPTModule, TokenDataset]:
    """Return a module configured for CUDA, on the CPU."""
    config = tiny_config(folder, "horizon=7steps", "trainer.device=cuda", "trainer.precision=bf16", *changes)
    config.optim = config.optim.for_model(config.model)
    dataset = load_dataset(config)
    return GPTModule(config, dataset.tokenizer, Schedule.plan(config, dataset.train_tokens)), dataset


@pytest.mark.parametrize("optim", ["muon", "adamw"])
@pytest.mark.parametrize("checks_each_step", [False, True])
def test_a_step_reads_nothing_from_the_device(corpus_folder, optim, checks_each_step):
    """Two steps with clipping run on PyTorch's meta device, which has no numbers to read.

    They fail if each gradient is checked before its update.
    """
    module, dataset = cuda_module(corpus_folder, f"optim={optim}", "optim.clip=1.0")
    assert not module.checks_each_step
    module.checks_each_step = checks_each_step
    for block in module.model.blocks:
        block.attention.fused_kernel = True
    module.to("meta")
    module._weights = list(module.parameters())  # moving there makes new ones, unlike moving to a GPU
    fabric = SimpleNamespace(  # the real one has no meta device
        device=torch.device("meta"),
        no_backward_sync=lambda *_, **__: contextlib.nullcontext(),
        to_device=lambda batch: [part.to("meta") for part in batch],
        backward=lambda loss: loss.backward(),
    )
    model = SimpleNamespace(module=module, training_step=module.training_step)
    optimizer = module.build_optimizer()
    with contextlib.nullcontext() if not checks_each_step else pytest.raises(RuntimeError, match="meta"):
        for step in (0, 1):
            batches = read_micro_batches(module.config, dataset, step, module.config.model.context_length)
            train_step(fabric, model, optimizer, batches, step, 1.0, before_update=lambda: None)
    assert optimizer.param_groups[0]["step"] == (0 if checks_each_step else 2)


def test_batches_for_cuda_are_pinned(corpus_folder, monkeypatch):
    """`pin` copies all tensors into pinned memory."""
    module, dataset = cuda_module(corpus_folder)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    for pin in (False, True):
        batches = read_micro_batches(module.config, dataset, 0, module.config.model.context_length, pin=pin)
        parts = [part for batch in batches for part in batch]
        assert list(map(id, pinned)) == (list(map(id, parts)) if pin else [])


# --- gradients that are checked at points of the curves, tried on a CPU ---


class LateChecks:
    """Makes a module on the CPU check its gradients as on a GPU."""

    def on_train_start(self, module: GPTModule) -> None:
        module.checks_each_step = False


def spoil_weight(patch: pytest.MonkeyPatch, step: int) -> None:
    """Set a weight to `nan` before the first batch of a step."""
    training_step = GPTModule.training_step

    def spoiled(self, batch, batch_idx):
        if batch_idx == (step - 1) * self.config.accumulation_steps:
            with torch.no_grad():
                self.model.final_norm.bias[3] = float("nan")
        return training_step(self, batch, batch_idx)

    patch.setattr(GPTModule, "training_step", spoiled)


@pytest.mark.promise("runs.md#On CUDA, in bf16 and fp32", "runs.md#No checkpoint or validation")
@pytest.mark.parametrize(
    ("step", "log_every", "message"),
    [
        (4, 3, r"step 5: the update has left weights that are not finite \("),
        (6, 3, r"steps 4 to 6: the gradient is not finite, so nothing was saved after it \(loss nan\)"),
        (7, 1, r"step 7: the gradient is not finite, so nothing was saved after it \(loss nan\)"),
    ],
)
def test_late_check_names_the_steps_and_saves_nothing_after_them(
    corpus_folder, tmp_path, monkeypatch, step, log_every, message
):
    """The next check is at a checkpoint or at a point of the curves. The error names the steps since the last check.

    The last good checkpoint stays on disk.
    """
    spoil_weight(monkeypatch, step)
    intervals = ["trainer.checkpoint_every=5", "trainer.validate_every=100", f"trainer.log_every={log_every}"]
    with pytest.raises(NonFiniteError, match=f"^{message}"):
        fit(begin(corpus_folder, tmp_path / "run", *intervals), [LateChecks()])
    last = tmp_path / "run/checkpoints/last.ckpt"
    assert last.exists() == (step > 5)
    if last.exists():
        stored = load_checkpoint(last)
        assert stored["step"] == 5 and all(w.isfinite().all() for w in stored["state_dict"].values())


# --- compiled blocks, on a CPU ---


class Graphs:
    """Compiles blocks on a CPU, each as one graph, and runs them uncompiled. Records the shapes of all graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.shapes: list[tuple] = []  # the input's (B, T, C), and whether it is for training
        self.on_compile = lambda: None
        monkeypatch.setattr(
            TransformerBlock,
            "compile",
            lambda block, **options: torch.nn.Module.compile(block, backend=self.backend, fullgraph=True, **options),
        )

    def backend(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.on_compile()
        examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert not any(isinstance(example, torch.SymInt) for example in examples), "a graph for several shapes"
        (shape,) = {tuple(tensor.shape) for tensor in inputs if tensor.dim() == 3}
        self.shapes.append((shape, torch.is_grad_enabled()))
        return graph.forward

    def take(self) -> list[tuple]:
        """Return the recorded shapes in order, and begin to record again. Compiling one twice is an error."""
        shapes, self.shapes = self.shapes, []
        assert len(shapes) == len(set(shapes))
        return sorted(shapes, key=lambda shape: (not shape[1], shape[0]))  # those for training first


def compiled_run(training: Training) -> Training:
    training.spec = replace(training.spec, config=with_values(training.config, {"trainer.compile": "true"}))
    return training


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_one_graph_for_each_shape(corpus_folder, tmp_path, monkeypatch, checkpointing):
    """No graph is for several shapes, broken, or compiled again.

    That holds for short sequences, a run that resumes, one that begins with the validation of its initial weights, and
    one that continues with smaller micro-batches.
    """
    graphs = Graphs(monkeypatch)
    monkeypatch.setattr("gpt.sampling.scoring.MIN_BATCH_TOKENS", 160)  # the validation text has several batches
    changes = ["trainer.short_sequences=8", "trainer.validate_every=3", "trainer.micro_batch_size=6"]
    changes += [f"trainer.activation_checkpointing={checkpointing}", "model.dropout=0.1"]
    training = compiled_run(begin(corpus_folder, tmp_path / "run", *changes))
    C = training.config.model.d_model
    validation, short_validation = ((10, 16, C), False), ((20, 8, C), False)
    fit(training, [StopAt(5)])
    train_shapes = [((6, 16, C), True), ((12, 8, C), True)]
    assert graphs.take() == [*train_shapes, short_validation]
    fit(resume_run(training.path))
    assert graphs.take() == [*train_shapes, validation]

    whole = ["trainer.short_sequences=0", "trainer.micro_batch_size=auto", *changes[1:2], *changes[3:]]
    tuned = compiled_run(begin(corpus_folder, tmp_path / "tuned", f"init_from={training.path}", *whole))
    at_size = {}
    loss = GPTModule.loss

    def limited(self, idx, targets):
        if not at_size and self.grad_norm:  # after the first step
            at_size[len(idx)] = graphs.take()
            raise torch.OutOfMemoryError("imitated")
        return loss(self, idx, targets)

    monkeypatch.setattr(GPTModule, "loss", limited)
    fit(tuned)
    assert at_size == {6: [((6, 16, C), True), validation]}
    assert graphs.take() == [((3, 16, C), True), validation]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_the_clock_does_not_count_compilation(corpus_folder, tmp_path, monkeypatch):
    """A run for a time warms up, though compiling takes longer than the whole time. It draws no random numbers."""
    changes = ["horizon=10s", "trainer.short_sequences=8", "trainer.log_every=1", "model.dropout=0.1"]
    training = compiled_run(begin(corpus_folder, tmp_path / "run", *changes))
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr("gpt.training.training_clock.time", clock)
    graphs = Graphs(monkeypatch)

    def take_time() -> None:
        now[0] += 20.0

    graphs.on_compile = take_time
    train_step = loop.train_step

    def timed_step(*arguments):
        now[0] += 0.5
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", timed_step)
    states = []
    compile_all_lengths = loop.compile_all_lengths

    def unseen(fabric, model, *arguments):
        states.append(torch.random.get_rng_state())
        compile_all_lengths(fabric, model, *arguments)
        assert graphs.shapes and all(p.grad is None for p in model.parameters())
        assert torch.equal(states[-1], torch.random.get_rng_state())

    monkeypatch.setattr(loop, "compile_all_lengths", unseen)
    fit(training)
    assert len(states) == 1
    assert training.metrics["steps"] == 20
    optim = training.config.optim
    rates = [rate / optim.lr for _, rate in read_curves(training.path)["train/lr"]]
    schedule = Schedule(seconds=10.0)
    assert rates == pytest.approx([schedule.lr_multiplier(step, step / 20, optim) for step in range(20)])


class AttentionFlags:
    """Records whether cuDNN's attention is allowed, in training and otherwise."""

    def __init__(self) -> None:
        self.flags: dict[bool, set[bool]] = {True: set(), False: set()}

    def on_train_start(self, module: GPTModule) -> None:
        module.model.blocks[0].attention.register_forward_pre_hook(self.record)

    def record(self, module: torch.nn.Module, inputs: tuple) -> None:
        self.flags[torch.is_grad_enabled()].add(torch.backends.cuda.cudnn_sdp_enabled())


def test_cudnn_attention_is_for_training_only(corpus_folder, tmp_path):
    """It is off in validations, samples, completions and scores, and as before afterwards."""
    recorded = AttentionFlags()
    fit(begin(corpus_folder, tmp_path / "run", "data.prompts=[x]"), [recorded])
    assert recorded.flags == {True: {True}, False: {False}}
    model = gpt.load(tmp_path / "run", device="cpu")
    flags = []
    model.model.blocks[0].attention.register_forward_pre_hook(
        lambda *_: flags.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    for _ in model.stream("a b", max_new_tokens=3, seed=1):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    model.logprobs("a b c")
    assert set(flags) == {False} and len(flags) > 3
    assert torch.backends.cuda.cudnn_sdp_enabled()


# --- arithmetic ---


def settings() -> tuple:
    memory = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), memory


def test_arithmetic():
    """TF32 is for CUDA only, and deterministic kernels are optional. An error restores all settings, too."""
    initial_settings = settings()
    assert initial_settings == ("highest", False, True)
    with numerics("cpu", deterministic=False):
        assert settings() == ("highest", False, False)
    with pytest.raises(KeyError), numerics("cuda", deterministic=True):
        assert settings() == ("high", True, False)
        with numerics("cuda", deterministic=False):
            assert settings() == ("high", False, False)
        assert settings() == ("high", True, False)
        raise KeyError
    assert settings() == initial_settings


def test_workspace_of_cublas(monkeypatch):
    """Choosing CUDA sets the variable for deterministic products, unless the user has set it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for value, expected in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value or "")
        if value is None:
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        choose_device("cpu")
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == value
        choose_device("cuda")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == expected


# --- on a GPU ---


class Strict:
    """Makes PyTorch raise an error if the host waits for the GPU in steps 2 and 3, which have no point of a curve."""

    def on_train_step_end(self, step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if step in (1, 2) else "default")


@GPU
@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_a_cuda_step_does_not_wait(corpus_folder, tmp_path, optim):
    """The host does not wait for the GPU between two points of the curves."""
    changes = [f"optim={optim}", "trainer.compile=false", "trainer.log_every=7"]
    try:
        fit(begin(corpus_folder, tmp_path / "run", *changes), [Strict()])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_deterministic_resume_is_exact_on_cuda(corpus_folder, tmp_path, precision, compiled):
    """A run that resumes from step 5 ends with the weights of an uninterrupted run, bit for bit."""
    whole = tmp_path / "whole"
    part = tmp_path / "part"
    fixed = ["trainer.deterministic=true", f"trainer.precision={precision}", f"trainer.compile={compiled}"]
    fit(begin(corpus_folder, whole, "horizon=9steps", "trainer.keep_every=5", "data.prompts=[x]", *fixed))
    shutil.copytree(whole, part)
    shutil.copy(part / "checkpoints/step-00000005.ckpt", part / "checkpoints/last.ckpt")
    for name in ("best", "previous"):
        (part / f"checkpoints/{name}.ckpt").unlink(missing_ok=True)
    fit(resume_run(str(part)))
    ends = [load_checkpoint(run / "checkpoints/last.ckpt") for run in (whole, part)]
    for name, weight in ends[0]["state_dict"].items():
        assert torch.equal(weight, ends[1]["state_dict"][name]), name


@GPU
def test_a_broken_gradient_on_cuda_is_named(corpus_folder, tmp_path, monkeypatch):
    """The next point of the curves names the steps."""
    spoil_weight(monkeypatch, 4)
    changes = ["trainer.compile=false", "trainer.validate_every=100", "trainer.device=cuda"]
    with pytest.raises(NonFiniteError, match=r"^steps 4 to 6: the gradient is not finite, so nothing was saved after"):
        fit(begin(corpus_folder, tmp_path / "run", *changes))


@GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_learns_what_a_cpu_learns(corpus_folder, tmp_path, precision):
    """With the same sequences and learning rates, both reach the same loss in 7 steps, except for rounding."""
    losses = []
    for device in ("cpu", "cuda"):
        changes = [f"trainer.device={device}", f"trainer.precision={precision}", "model.dropout=0"]
        training = begin(corpus_folder, tmp_path / device, *changes)
        fit(training)
        losses.append(training.metrics["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
