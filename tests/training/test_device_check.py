"""A device that was never tried checks itself: here the CPU stands for it, with kernels that are right and wrong."""

import re

import pytest
import torch
import torch.nn.functional as F

import gpt.model.attention
from gpt.training import device_check
from harness import differences, tiny_arguments, train, train_refusal

AGREES = r"^cpu with torch \S+, precision=(\w+), compile=false: agrees with the CPU, the loss to ([\d.]+)%, "
AGREES += r"the gradient to ([\d.]+)%$"
WRONG = {  # what a kernel makes of queries, keys and values, each (B, H, T, D), that it should not
    "sees no scale": lambda q, k, v: (2 * q, k, v),
    "keys of another token": lambda q, k, v: (q, k.roll(1, -2), v),
    "values of another head": lambda q, k, v: (q, k, v.roll(1, 1)),
    "a fifth too large": lambda q, k, v: (q, k, 1.2 * v),
    "not a number": lambda q, k, v: (q, k, float("nan") * v),
}


@pytest.fixture
def untried(monkeypatch):
    """The CPU as a device on which nobody has tried the project."""
    monkeypatch.setattr(device_check, "TESTED_DEVICES", ())


@pytest.fixture
def arguments(corpus_folder, tmp_path) -> list[str]:
    """A run of three steps whose cache knows no device."""
    own = (
        "trainer.precision=bf16",
        f"data.cache={tmp_path / 'cache'}",
        "horizon=3steps",
        f"run_dir={tmp_path / 'run'}",
    )
    return tiny_arguments(corpus_folder, *own)


def test_first_run(arguments, untried, tmp_path):
    """It says once how closely the device agrees, and trains as if nothing had been computed before."""
    first = train(*arguments)
    ((precision, loss, gradient),) = re.findall(AGREES, first.stdout, re.M)
    assert precision == "bf16"
    assert float(loss) < 0.1
    assert 0.1 < float(gradient) < 3
    again = train(*arguments, f"run_dir={tmp_path / 'again'}")
    assert "agrees with the CPU" not in again.stdout
    other = train(*arguments, f"run_dir={tmp_path / 'other'}", "trainer.precision=fp32")
    assert re.findall(AGREES, other.stdout, re.M) == [("fp32", "0.0000", "0.00")]


def test_weights_are_not_touched(arguments, untried, tmp_path, monkeypatch):
    train(*arguments)
    monkeypatch.setattr(device_check, "TESTED_DEVICES", ("cpu",))
    assert "agrees" not in train(*arguments, f"run_dir={tmp_path / 'tried'}").stdout
    assert differences(tmp_path / "run", tmp_path / "tried") == []


@pytest.mark.parametrize("how", WRONG)
def test_wrong_kernel(arguments, untried, tmp_path, monkeypatch, how):
    """A kernel that is wrong in bf16 ends the run before its first step, and the next run looks again."""
    for module, name in ((F, "scaled_dot_product_attention"), (gpt.model.attention, "attention")):
        real = getattr(module, name)

        def kernel(queries, keys, values, *more, real=real, **named):
            if queries.dtype == torch.bfloat16:
                queries, keys, values = WRONG[how](queries, keys, values)
            return real(queries, keys, values, *more, **named)

        monkeypatch.setattr(module, name, kernel)
    for _ in range(2):
        line = train_refusal(*arguments)
        assert re.search(r"precision=bf16.*off by (\d+\.\d|nan)%, of which rounding explains 4\.7%: try ", line), line
        assert list((tmp_path / "run").rglob("*.ckpt")) == []
        arguments[-1] = f"run_dir={tmp_path / 'again'}"
