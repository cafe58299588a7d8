"""The report at the end of a run: its metrics, samples, and commands that fit the outcome."""

from pathlib import Path

import pytest
from tqdm.utils import disp_len

from gpt.api import next_calls
from gpt.console import format_duration
from gpt.training.report import fit_on_line, format_report, next_commands, shorter_horizon

FIGURES = {
    "train_loss": 2.45678,
    "val_loss": 2.91684,
    "val_nats_per_byte": 1.05398,
    "val_bits_per_byte": 1.52057,
    "best_val_loss": 2.81,
    "best_step": 700,
    "steps": 1100,
    "tokens": 1126400,
    "epochs": 1.2217,
    "train_seconds": 7265.84,
    "tokens_per_second": 155.03,
    "parameters": 1006336,
    "peak_memory_bytes": 558345748,
    "baselines": {"unigram": 3.51234, "xz -9e": 1.50004},
    "beaten_at_step": {"unigram": 100, "xz -9e": None},
    "corpus_bits_per_byte": {"docs": 1.25, "book": 2.0625},
    "corpus_epochs": {"docs": 2.5, "book": 0.125},
}


def test_report_has_every_metric_and_three_samples(monkeypatch):
    """Columns are aligned, and a sample has at most two lines."""
    monkeypatch.setenv("COLUMNS", "47")
    samples = ["of the first prompt", "Once\n\nupon a time", "x" * 30 + " " + "y" * 40 + " " + "z" * 30, "\ta\x1b[31m"]
    assert (
        "\n".join(format_report(FIGURES, samples))
        == """
trained            1100  steps: 1,126,400 tokens, 1.22 epochs
time             7265.8  seconds (2h01m): 155 tokens/s, 0.52 GiB at peak
training loss    2.4568  nats per token
validation loss  2.9168  nats per token
best validation  2.8100  nats per token, at step 700, in best.ckpt
validation       1.5206  bits per byte
  docs           1.2500  bits per byte, after 2.50 epochs
  book           2.0625  bits per byte, after 0.12 epochs
  unigram        3.5123  bits per byte, beaten at step 100
  xz -9e         1.5000  bits per byte, not beaten

samples after step 1100, more in samples.md:
- Once ⏎ upon a time
- xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
  yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy …
- a<1b>[31m"""
    )


def test_missing_metrics_are_left_out():
    """A run may have no training loss, samples, peak memory, second corpus or baselines."""
    changes = {"peak_memory_bytes": 0, "baselines": {}, "beaten_at_step": {}, "best_step": 1100, "train_seconds": 3.21}
    figures = FIGURES | changes
    for key in ("train_loss", "corpus_bits_per_byte", "corpus_epochs"):
        del figures[key]
    lines = list(format_report(figures, []))
    assert "time                3.2  seconds: 155 tokens/s" in lines
    assert "best validation  2.8100  nats per token, at step 1100, the last" in lines
    assert len(lines) == 6


@pytest.mark.parametrize(("copied", "passage"), [(0, ""), (59, ""), (256, ", and a copied passage of 256 characters")])
def test_model_that_memorizes_gets_a_line(copied, passage):
    """The line has both losses, and the length of a copied passage if it is long."""
    losses = f"0.10 nats per token on it, {FIGURES['val_loss']:.2f} on other text{passage}; docs/reading.md"
    assert losses in list(format_report(FIGURES | {"train_loss": 0.1}, [], copied))[-1]
    assert "memorizes" not in "\n".join(format_report(FIGURES, [], copied))


@pytest.mark.parametrize(
    ("shorter", "longer", "line", "call"),
    [
        ("", "2200steps", "python train.py resume=runs/a horizon=2200steps", "lm.resume(horizon='2200steps')"),
        ("", "", "python train.py resume=runs/a", "lm.resume()"),
        (
            "500steps",
            "2200steps",
            "python train.py horizon=500steps",
            "gpt.train(..., horizon='500steps')",
        ),
    ],
    ids=["longer", "stopped", "shorter"],
)
def test_last_command_and_call_continue_or_repeat_the_run(shorter, longer, line, call):
    assert list(next_commands(Path("runs/a"), "", shorter, longer))[-1][1] == line
    assert list(next_calls(Path("runs/a"), "", shorter, longer))[-1][1] == call


def test_commands_and_calls_are_quoted():
    run, prompt = Path("runs/a b"), "-it's"
    commands, calls = dict(next_commands(run, prompt, "", "")), dict(next_calls(run, prompt, "", ""))
    sample_command = """python generate.py --checkpoint 'runs/a b' --prompt='-it'"'"'s'"""
    assert commands["sample it"] == sample_command
    assert commands["continue"] == "python train.py 'resume=runs/a b'"
    assert calls["sample it"] == """print(gpt.load('runs/a b').generate("-it's"))"""
    assert calls["see why"] == """gpt.load('runs/a b').insight("-it's").save('page.html')"""


UNBEATEN = {"baselines": {"unigram": 3.5}, "beaten_at_step": {"unigram": None}}


@pytest.mark.parametrize(
    ("changes", "horizon"),
    [
        ({}, "500steps"),
        ({"best_val_loss": FIGURES["val_loss"] / 1.009}, ""),  # less is noise
        ({"train_loss": 0.09, "val_loss": 8.01, "best_val_loss": 8.01, "steps": 145}, "72steps"),
        ({"train_loss": 0.09, "val_loss": 8.01, "best_val_loss": 8.01, "steps": 1}, "1steps"),
        ({"train_loss": 3.0, "val_loss": 3.9, "best_val_loss": 3.9} | UNBEATEN, "500steps"),
        ({"train_loss": 3.0, "val_loss": 3.7, "best_val_loss": 3.7} | UNBEATEN, ""),
        ({"train_loss": 3.0, "val_loss": 3.9, "best_val_loss": 3.9, "beaten_at_step": {}}, ""),
    ],
)
def test_shorter_run_is_suggested_if_the_model_overfits_or_memorizes(changes, horizon):
    """The validation loss has risen, or is far above the training loss; less far if no baseline was beaten."""
    assert shorter_horizon(FIGURES | changes, 500) == horizon


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [
        ("\n one  two \n\n  three\n", 23, "one  two ⏎ three"),
        ("thirteen char", 11, "thirteen c…"),
        ("tab\tbell\x07\x9b·\u202e", 31, "tab→bell<07><c2><9b>·<e2><80><ae>"[:30] + "…"),
        ("犬も歩けば棒に当たる", 11, "犬も歩けば…"),
        ("", 7, ""),
    ],
)
def test_sample_fits_on_a_line(text, width, line):
    """Line ends and control characters have signs, and a wide character takes two columns."""
    assert fit_on_line(text, width) == line
    assert disp_len(line) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (86399, "23h59m"), (277777, "3d05h")],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text
