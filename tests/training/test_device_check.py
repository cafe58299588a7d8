"""The numerics check of an untested device: the CPU serves as one, with correct and wrong kernels."""

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F

import gpt.model.attention
from gpt.model.transformer import TransformerBlock
from gpt.training import device_check
from gpt.training.config import with_values
from harness import begin_run, differences, fit, refusal, tiny_arguments, tiny_config, train, train_refusal

AGREES = r"^cpu with torch \S+, precision=(\w+), compile=false: agrees with the CPU, the loss to ([\d.]+)%, "
AGREES += r"the gradient to ([\d.]+)%$"
WRONG_KERNELS = {  # each changes queries, keys and values (B, H, T, D)
    "sees no scale": lambda q, k, v: (2 * q, k, v),
    "keys of another token": lambda q, k, v: (q, k.roll(1, -2), v),
    "values of another head": lambda q, k, v: (q, k, v.roll(1, 1)),
    "a fifth too large": lambda q, k, v: (q, k, 1.2 * v),
    "not a number": lambda q, k, v: (q, k, float("nan") * v),
}


@pytest.fixture
def untested(monkeypatch):
    """The CPU as an untested device."""
    monkeypatch.setattr(device_check, "TESTED_DEVICES", ())


@pytest.fixture
def arguments(corpus_folder, tmp_path) -> list[str]:
    """A run of three steps whose cache lists no device."""
    changes = (
        "trainer.precision=bf16",
        f"data.cache={tmp_path / 'cache'}",
        "horizon=3steps",
        f"run_dir={tmp_path / 'run'}",
    )
    return tiny_arguments(corpus_folder, *changes)


def test_first_run_prints_how_closely_the_device_agrees(arguments, untested, tmp_path):
    """The next run with the same precision does not check again."""
    first = train(*arguments)
    ((precision, loss, gradient),) = re.findall(AGREES, first.stdout, re.M)
    assert precision == "bf16"
    assert float(loss) < 0.1
    assert 0.1 < float(gradient) < 3
    again = train(*arguments, f"run_dir={tmp_path / 'again'}")
    assert "agrees with the CPU" not in again.stdout
    other = train(*arguments, f"run_dir={tmp_path / 'other'}", "trainer.precision=fp32")
    assert re.findall(AGREES, other.stdout, re.M) == [("fp32", "0.0000", "0.00")]


def test_check_does_not_change_the_run(arguments, untested, tmp_path, monkeypatch):
    train(*arguments)
    monkeypatch.setattr(device_check, "TESTED_DEVICES", ("cpu",))
    assert "agrees" not in train(*arguments, f"run_dir={tmp_path / 'tested'}").stdout
    assert differences(tmp_path / "run", tmp_path / "tested") == []


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_wrong_kernel_is_refused_before_the_first_step(arguments, untested, tmp_path, monkeypatch, name):
    """It is wrong only in bf16. The next run checks again."""
    for module, function in ((F, "scaled_dot_product_attention"), (gpt.model.attention, "attention")):
        real = getattr(module, function)

        def kernel(queries, keys, values, *more, real=real, **named):
            if queries.dtype == torch.bfloat16:
                queries, keys, values = WRONG_KERNELS[name](queries, keys, values)
            return real(queries, keys, values, *more, **named)

        monkeypatch.setattr(module, function, kernel)
    for _ in range(2):
        line = train_refusal(*arguments)
        assert re.search(r"precision=bf16.*off by (\d+\.\d|nan)%, of which rounding explains 4\.7%: try ", line), line
        assert list((tmp_path / "run").rglob("*.ckpt")) == []
        arguments[-1] = f"run_dir={tmp_path / 'again'}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_compiler_that_fails(corpus_folder, untested, tmp_path, monkeypatch):
    """It is one line before the first step, also where a run resumes on another machine."""

    def backend(graph, inputs):
        raise FileNotFoundError("Python.h")

    compile_block = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(TransformerBlock, "compile", compile_block)
    config = tiny_config(
        corpus_folder, f"data.cache={tmp_path / 'cache'}", "horizon=3steps", f"run_dir={tmp_path / 'a'}"
    )
    training = begin_run(config)
    compiled = with_values(training.config, {"trainer.compile": "true"})
    training.spec = dataclasses.replace(training.spec, config=compiled)
    line = refusal(fit, training)
    assert re.search(r"compile=true: compiling failed \(.*Python\.h.*\): install what is missing, or start a", line)
    assert not (tmp_path / "a/checkpoints/last.ckpt").exists()
