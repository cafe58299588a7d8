"""The parts of gpu.sh: python benchmarks/gpu.py PART ... prints a row as each figure comes.

A row has the part, what was measured, and the figure, separated by tabs. Rows go to standard output and everything else
to standard error. On a CPU each part runs in a tiny size, to test this script. Runs go to the folder WORK.
"""

import contextlib
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import train_step
from measuring import ROOT, synchronize, train_as_user, training_dtype
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

import gpt
from gpt.api import make_request, read_curves
from gpt.checkpoint import load_checkpoint
from gpt.errors import summarize_error
from gpt.hardware.device import choose_device, choose_precision, numerics
from gpt.hardware.memory import peak_memory_bytes, release_memory
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.memory_estimate import activation_bytes
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, generate
from gpt.sampling.packed import pack_weights
from gpt.sampling.scoring import eval_batch_tokens, score
from gpt.training import auto_model
from gpt.training.config import load_config
from gpt.training.forecast import forecast
from gpt.training.module import GPTModule

Row = Callable[[str, object], None]  # prints what was measured, and the figure

ON_GPU = torch.cuda.is_available()
DEVICE = choose_device()
DTYPE = getattr(torch, training_dtype())
WORK = Path(os.environ.get("WORK") or tempfile.gettempdir())
PRESET = "gpt2_small" if ON_GPU else "mini"  # of train_step.py
SHAPE = (16, 1024) if ON_GPU else (2, 32)  # of its steps: B, T
LARGE_SHAPE = (64, 1024) if ON_GPU else (3, 32)
CONFIG = train_step.make_config(PRESET)
TINY_MODEL = {"num_layers": 1, "num_heads": 2, "d_model": 16, "context_length": 16}
RUN: dict[str, Any] = {  # the settings of most runs
    "text": str(ROOT / "docs/*.md"),
    "model": {"num_layers": 6, "num_heads": 6, "d_model": 384, "context_length": 256} if ON_GPU else TINY_MODEL,
    "tokenizer": None if ON_GPU else "byte",
    "data": {"prompts": [], "cache": str(WORK / "cache")},
    "trainer": {"tokens_per_step": 16384 if ON_GPU else 64},
    "horizon": "30steps" if ON_GPU else "4steps",
}
VARIANTS = ("ours, AdamW", "nanoGPT", "ours, Muon", "ours, AdamW, not compiled", "transformers")  # of train_step.py
ATTENTION_KERNEL = re.compile("attention|attn|flash|fmha|sdpa|cudnn", re.IGNORECASE)


def train(trainer: dict | None = None, **settings: Any) -> Any:
    """Train in a new folder with the settings of `RUN` and others, as in a fresh process. Return gpt.train's result."""
    reset_device()
    run_dir = Path(tempfile.mkdtemp(dir=WORK)) / "run"
    return gpt.train(**RUN | settings | {"trainer": RUN["trainer"] | (trainer or {}), "run_dir": run_dir})


def reset_device() -> None:
    """Forget compiled code, free memory, and measure the peak of memory from here on."""
    if ON_GPU:
        torch.compiler.reset()
        release_memory()
        torch.cuda.reset_peak_memory_stats()


def time_call(function: Callable[[], Any]) -> float:
    """Return the seconds of a call, until the GPU has done its work."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def profile_call(function: Callable[[], Any]) -> list[tuple[str, float, int]]:
    """Return name, own milliseconds and count of a call's kernels, the slowest first. On a CPU: of its operations."""
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as profiler:
        time_call(function)
    kernels = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
        if microseconds and not getattr(event, "is_user_annotation", False):
            kernels.append((event.key, microseconds / 1000, event.count))
    return sorted(kernels, key=lambda kernel: -kernel[1])


@contextlib.contextmanager
def errors_in_rows(row: Row, what: str) -> Iterator[None]:
    """Print an error in this block as a row, so that what follows can still run."""
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        row(what, f"failed: {summarize_error(error)}")


def describe_peak() -> str:
    return f"{peak_memory_bytes(DEVICE) / 2**30:.2f} GiB at peak"


def describe_run(run: Any) -> str:
    metrics = run.result.metrics
    return (
        f"{metrics['val_bits_per_byte']:.4f} bits per byte after {run.result.step} steps, "
        f"{metrics['tokens_per_second']:,.0f} tokens/s, trained {metrics['train_seconds']:.1f} s, {describe_peak()}"
    )


def describe_difference(weights: dict, others: dict) -> str:
    difference = max(float((weights[name] - others[name]).abs().max()) for name in weights)
    return f"differ by up to {difference:.1e}" if difference else "equal bit for bit"


# --- correctness ---


def check_kernels(row: Row) -> None:
    """Name the attention kernels of training, validation and sampling."""
    model = GPT(CONFIG).set_compute_dtype(DTYPE).to(DEVICE)
    idx, targets = train_step.tokens(PRESET, DEVICE.type, SHAPE)

    def row_of_call(what: str, function: Callable[[], Any]) -> None:
        names = [name[:120] for name, *_ in profile_call(function) if ATTENTION_KERNEL.search(name)]
        row(what, "; ".join(names) or "no kernel with attention in its name")

    row_of_call("training", lambda: chunked_next_token_loss(*model.features_and_head(idx), targets).backward())
    row_of_call("validation", lambda: score(model, [(idx, targets)], 1))
    pack_weights(model, choose_precision("auto", DEVICE))
    for what, pad_lengths in (("one prompt", [0]), ("two prompts, one padded", [0, 5])):
        prompts = idx[: len(pad_lengths), :16]
        steps = generate(model, prompts, 2, SamplingParams(temperature=0.0), pad_lengths=pad_lengths)
        row_of_call(f"{what}: the prompt", partial(next, steps))
        row_of_call(f"{what}: a decode step", partial(next, steps))
    row("priority after these calls", [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()])


def check_generate(row: Row) -> None:
    """Time `python generate.py` in fresh processes, with cuDNN's attention and without."""
    model = "gpt2_small" if ON_GPU else TINY_MODEL
    tokenizer = "gpt2" if ON_GPU else "byte"
    run = train({"compile": "false"}, model=model, tokenizer=tokenizer, horizon="2steps")
    command = [sys.executable, "generate.py", "--checkpoint", str(run.run_dir), "--max-new-tokens", "100"]
    deprioritized = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    for variables in ({}, deprioritized) if ON_GPU else ({},):
        process = partial(subprocess.run, command, cwd=ROOT, env=os.environ | variables, stdin=subprocess.DEVNULL)
        seconds = time_call(partial(process, check=True))
        row("100 tokens in a fresh process" + "".join(f", {name}=1" for name in variables), f"{seconds:.1f} s")


def check_resume(row: Row) -> None:
    """Compare a run that resumes halfway with an uninterrupted run, for each combination of settings."""
    context = RUN["model"]["context_length"]
    kept_step = int(RUN["horizon"].removesuffix("steps")) // 2 + 1  # more than half, so that it is the only one
    base = train().run_dir
    kinds: dict[str, dict] = {
        "short sequences": {"trainer": {"short_sequences": context // 2}},
        "init_from": {"model": None, "tokenizer": None, "init_from": base},
        "activation checkpointing": {"trainer": {"activation_checkpointing": True, "short_sequences": 0}},
    }
    # The combinations that must be equal come first.
    for deterministic, compiled, kind in product((True, False), ("false", "true"), kinds):
        what = f"{kind}, compile={compiled}, deterministic={str(deterministic).lower()}"
        if compiled == "true" and not ON_GPU:
            row(what, "left out: CPUs do not compile")
            continue
        trainer = {"compile": compiled, "deterministic": deterministic, "keep_every": kept_step}
        settings = kinds[kind] | {"trainer": trainer | kinds[kind].get("trainer", {})}
        with errors_in_rows(row, what):
            whole = train(**settings).run_dir
            part = shutil.copytree(whole, whole.with_name("part"))
            (part / "checkpoints/best.ckpt").unlink()
            (part / "checkpoints/previous.ckpt").unlink(missing_ok=True)
            (part / f"checkpoints/step-{kept_step:08}.ckpt").replace(part / "checkpoints/last.ckpt")
            reset_device()
            gpt.train(resume=part)
            ends = [load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (whole, part)]
            row(what, f"last.ckpt: {describe_difference(*ends)}")


def check_settings(row: Row) -> None:
    """Train in fp16, and with DDP in one process. Compare with a run without them."""
    default = train({"deterministic": True})
    row("default", describe_run(default))
    with errors_in_rows(row, "trainer.precision=fp16"):
        row("trainer.precision=fp16", describe_run(train({"precision": "fp16"})))
    with_ddp = train({"deterministic": True, "strategy": "ddp"})
    row("trainer.strategy=ddp", f"{torch.distributed.get_backend()}, {describe_run(with_ddp)}")
    row("weights with and without DDP", describe_difference(default.model.state_dict(), with_ddp.model.state_dict()))
    torch.distributed.destroy_process_group()


def check_memory(row: Row) -> None:
    """Compare peak memory with its estimate. Let memory run out, so that the micro-batch has to shrink."""
    for checkpointing in (False, True):
        reset_device()
        step = train_step.ours(PRESET, training_dtype(), "adamw", checkpointing, SHAPE)
        for _ in range(3):
            step()
        activations = activation_bytes(CONFIG, SHAPE[0], DTYPE, DEVICE.type, checkpointing)
        estimate = (16 * CONFIG.num_parameters + activations) / 2**30
        row(f"{PRESET}, activation checkpointing {checkpointing}", f"estimated {estimate:.2f} GiB, {describe_peak()}")
        del step

    model = {"num_layers": 2, "num_heads": 16, "d_model": 1024, "context_length": 1024} if ON_GPU else TINY_MODEL
    num_sequences = 4
    if ON_GPU:  # the smallest power of 2 that takes at least twice the memory of the GPU
        one = activation_bytes(GPTConfig(**model, vocab_size=1536), 1, DTYPE, DEVICE.type)
        num_sequences = 2 ** int(2 * torch.cuda.mem_get_info()[1] / one).bit_length()
    loss = GPTModule.loss

    def limited_loss(module: GPTModule, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(idx) > 1:
            raise torch.OutOfMemoryError("imitated on a CPU")
        return loss(module, idx, targets)

    for compiled in ("auto", "false"):
        what = f"out of memory, compile={compiled}"
        with (
            errors_in_rows(row, what),
            patch("gpt.training.finalize.choose_micro_batch", lambda *_, **__: num_sequences),
            patch.object(GPTModule, "loss", loss if ON_GPU else limited_loss),
        ):
            trainer = {"tokens_per_step": num_sequences * model["context_length"], "compile": compiled}
            run = train(trainer, model=model, horizon="2steps")
            size = load_config(run.run_dir / "config.yaml").micro_batch_size
            row(what, f"micro-batch of {num_sequences} sequences became {size}: {describe_run(run)}")


def check_predictions(row: Row) -> None:
    """Compare the predictions of plan=true and model=auto with a run. gpu.sh counts the recompilations in the log."""
    changes: dict[str, Any] = {"horizon": "300steps", "text": None} if ON_GPU else {"horizon": "20steps"}
    plan = forecast(make_request(**RUN | changes))
    row("plan=true", f"{plan['train_seconds']:.2f} s, {plan['peak_memory'] / 2**30:.2f} GiB")
    row("its run", describe_run(train(**changes)))

    describe = auto_model.describe_choice

    def describe_choice(*arguments: Any) -> str:
        line = describe(*arguments)
        row("model=auto", line.removeprefix("model=auto: "))
        return line

    if not ON_GPU:
        auto_model.MIN_PROBE_STEPS = 3
        auto_model.CANDIDATE_MODELS = auto_model.CANDIDATE_MODELS[:1]
    with patch.object(auto_model, "describe_choice", describe_choice):
        start = time.perf_counter()
        changes |= {"model": "auto", "horizon": "30s" if ON_GPU else "0.3s"}
        run = train({"tokens_per_step": 1024}, **changes)
        row("its run", f"{describe_run(run)}, {time.perf_counter() - start:.1f} s of wall clock")


class GPUTests:
    """A plugin of pytest that selects the tests that are skipped without a GPU, and prints a row for each."""

    def __init__(self, row: Row):
        self.row = row

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if any("no GPU" in str(mark.kwargs) for mark in item.iter_markers("skipif"))]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.row(report.nodeid.partition("::")[2], f"{report.outcome}, {report.duration:.1f} s")


def check_tests(row: Row) -> None:
    """Run the quick tests that are skipped without a GPU."""
    options = ["-q", "-m", "not slow", "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    files = [str(ROOT / "tests" / name) for name in ("training/test_gpu.py", "model/test_transformer.py")]
    row("exit code of pytest", int(pytest.main([*options, *files], plugins=[GPUTests(row)])))


# --- speed ---


def measure_steps(row: Row, preset: str = PRESET, shape: tuple[int, int] = SHAPE) -> None:
    """Time the training step of each of `VARIANTS`, one after the other, and ours with trainer.deterministic=true."""
    B, T = shape
    flops = train_step.make_config(preset).costs().flops_per_token(T) * B * T
    makers = {name.removesuffix(", autocast"): variant for name, *variant in train_step.list_variants(preset)}
    for name in (*VARIANTS, "ours, AdamW, deterministic") if ON_GPU else VARIANTS[:3]:
        reset_device()
        with errors_in_rows(row, name), numerics(DEVICE.type, deterministic=name.endswith("deterministic")):
            make, settings = makers[name.removesuffix(", deterministic")]
            first_seconds, seconds = time_steps(partial(make, preset, shape=shape, **settings))
            row(
                f"{preset}, {B} x {T}, {name}",
                f"{1000 * seconds:,.2f} ms, {1 / seconds:,.1f} steps/s, {B * T / seconds:,.0f} tokens/s, "
                f"{flops / seconds / 1e12:,.2f} TFLOP/s, {describe_peak()}, first step {first_seconds:.1f} s",
            )


def time_steps(make: Callable[[], Callable[[], Any]]) -> tuple[float, float]:
    """Return the seconds of the first step, with compilation, and the median of the steps of two seconds after it."""
    step = make()
    first_seconds = time_call(step)
    times = [time_call(step)]
    while ON_GPU and sum(times) < 2.0:
        times.append(time_call(step))
    return first_seconds, statistics.median(times)


def measure_mini(row: Row) -> None:
    """Time steps of 1,024 tokens of the mini model, and a run of it."""
    measure_steps(row, "mini", (8, 128) if ON_GPU else (2, 32))
    settings = {"model": "mini", "horizon": "1000steps"} if ON_GPU else {}
    row("a run in steps of 1,024 tokens", describe_run(train({"tokens_per_step": 1024}, **settings)))


def measure_profile(row: Row) -> None:
    """Print the 15 kernels that take the most time of a training step with AdamW."""
    step = train_step.ours(PRESET, training_dtype(), "adamw", shape=SHAPE)
    for _ in range(3):
        step()
    kernels = profile_call(step)
    total = sum(milliseconds for _, milliseconds, _ in kernels)
    row("all kernels", f"{total:.2f} ms, {sum(count for *_, count in kernels)} calls")
    for name, milliseconds, count in kernels[:15]:
        row(name[:120], f"{milliseconds:.2f} ms, {milliseconds / total:.1%}, {count} calls")


def measure_sampling(row: Row) -> None:
    """Time the first three calls of GPT-2 124M with 1, 8 and 64 texts at once. Do the same with `transformers`."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks/generate.py"))
    tokens = 200 if ON_GPU else 2
    variants = [("ours", "bf16"), ("hugging_face", "bfloat16")][: 2 if ON_GPU else 1]
    for num_texts, (name, precision) in product((1, 8, 64) if ON_GPU else (1,), variants):
        reset_device()
        with errors_in_rows(row, name):
            step = benchmark[name](precision, num_texts, tokens)
            for call in ("first", "second", "third"):
                speed = num_texts * tokens / time_call(step)
                row(f"{name}, {precision}, {num_texts} at once, {call} call", f"{speed:,.1f} tokens/s")


def measure_scoring(row: Row) -> None:
    """Time a validation by the size of its batches."""
    T, sizes = CONFIG.context_length, (4096, 16384, 65536) if ON_GPU else (256,)
    model = GPT(CONFIG).set_compute_dtype(DTYPE).to(DEVICE)
    row("size that a validation chooses", f"{eval_batch_tokens(model):,} tokens")
    for size in sizes:
        batch = (torch.randint(CONFIG.vocab_size, (size // T, T)), torch.randint(CONFIG.vocab_size, (size // T, T)))
        batches = [batch] * (2 * sizes[-1] // size)
        seconds = min(time_call(partial(score, model, batches, 1)) for _ in range(3))
        row(f"{size:,} tokens at once", f"{len(batches) * size / seconds:,.0f} tokens/s")


def measure_wall_clock(row: Row) -> None:
    """Compare the wall clock of `python train.py experiment=gpt2_small` with the time that it trains."""
    overrides = ["experiment=gpt2_small", "data.prompts=[]", f"data.cache={WORK / 'cache'}"]
    overrides += ["trainer.checkpoint_every=100000", f"horizon={'30s' if ON_GPU else '4steps'}"]
    if not ON_GPU:
        overrides += [f"data.path={ROOT / 'README.md'}", "tokenizer=byte", "trainer.tokens_per_step=64"]
        overrides += [f"model.{key}={value}" for key, value in TINY_MODEL.items()]
    start = time.perf_counter()
    run_dir, metrics = train_as_user(WORK, *overrides)
    seconds = time.perf_counter() - start
    row("trained", f"{metrics['train_seconds']:.1f} of {seconds:.1f} s, {metrics['tokens_per_second']:,.0f} tokens/s")
    mfu = [value for _, value in read_curves(run_dir).get("work/mfu", [])]
    row("median of work/mfu", f"{statistics.median(mfu):.3f}" if mfu else "unknown for this device")


PARTS = {
    "kernels": check_kernels,
    "generate": check_generate,
    "resume": check_resume,
    "settings": check_settings,
    "memory": check_memory,
    "predictions": check_predictions,
    "tests": check_tests,
    "steps": measure_steps,
    "large_steps": partial(measure_steps, shape=LARGE_SHAPE),
    "mini": measure_mini,
    "profile": measure_profile,
    "sampling": measure_sampling,
    "scoring": measure_scoring,
    "wall_clock": measure_wall_clock,
}


def main() -> None:
    rows = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # from here on, everything but rows goes to standard error, also from other processes
    for part in sys.argv[1:]:

        def row(what: str, figure: object, part: str = part) -> None:
            print(part, what, " ".join(str(figure).split()), sep="\t", file=rows)

        with errors_in_rows(row, "this part"):
            PARTS[part](row)


if __name__ == "__main__":
    main()
