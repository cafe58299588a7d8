"""The closing report of a run: its figures are those of metrics.json, and its commands fit the outcome."""

from pathlib import Path

import pytest
from tqdm.utils import disp_len

from gpt.training.report import fit_on_line, format_duration, format_report

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


def test_a_run_that_turned(monkeypatch):
    """Every figure once, aligned; at most three samples, of two lines each; the commands are quoted."""
    monkeypatch.setenv("COLUMNS", "47")
    samples = ["of the first prompt", "Once\n\nupon a time", "x" * 30 + " " + "y" * 40 + " " + "z" * 30, "\ta\x1b[31m"]
    lines = list(format_report(FIGURES, samples, "-it's", 500, "2200steps", Path("runs/a b")))
    assert (
        "\n".join(lines)
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
- a<1b>[31m

the run:      runs/a b
sample it:    python generate.py --checkpoint 'runs/a b' --prompt='-it'"'"'s'
see why:      the same with --insight page.html
its curves:   tensorboard --logdir runs, and http://localhost:6006/?smoothing=0
run shorter:  python train.py horizon=500steps"""
    )


def test_what_is_not_known_is_left_out():
    """The report needs no training loss, samples, peak memory, second corpus or baselines."""
    missing = {"peak_memory_bytes": 0, "baselines": {}, "beaten_at_step": {}, "best_step": 1100, "train_seconds": 3.21}
    figures = {
        key: value
        for key, value in FIGURES.items()
        if key not in ("train_loss", "corpus_bits_per_byte", "corpus_epochs")
    } | missing
    lines = list(format_report(figures, [], "", 500, "2200steps", Path("runs/a")))
    assert "time                3.2  seconds: 155 tokens/s" in lines
    assert "best validation  2.8100  nats per token, at step 1100, the last" in lines
    assert lines[6:8] == ["", "the run:      runs/a"]
    assert "sample it:    python generate.py --checkpoint runs/a --prompt ''" in lines


@pytest.mark.parametrize(("copied", "passage"), [(0, ""), (59, ""), (256, ", and a copied passage of 256 characters")])
def test_memorising_in_words(copied, passage):
    """A model that memorizes gets one line: both losses, a long copied passage if any, and where to read more."""
    figures = FIGURES | {"train_loss": 0.1, "longest_copy": copied}
    line = (
        f"the model learns its training text by heart: 0.10 nats per token on it, {FIGURES['val_loss']:.2f} on other "
    )
    line += f"text{passage}; docs/reading.md says what helps"
    printed = "\n".join(format_report(figures, [], "x", 500, "", Path("runs/a")))
    assert f"\n\n{line}\n\n" in printed
    assert "by heart" not in "\n".join(format_report(FIGURES, [], "x", 500, "", Path("runs/a")))


@pytest.mark.parametrize(
    ("best", "longer", "command"),
    [
        (1100, "2200steps", "train longer: python train.py resume=runs/a horizon=2200steps"),
        (1100, "", "go on:        python train.py resume=runs/a"),
        (700, "", "run shorter:  python train.py horizon=500steps"),
    ],
    ids=["still falling", "stopped", "turned"],
)
def test_the_last_command_fits_the_outcome(best, longer, command):
    """Train longer while validation falls, continue a stopped run, and run shorter once validation rises."""
    turned = {} if best == 700 else {"best_val_loss": FIGURES["val_loss"] / 1.009}  # less is noise
    figures = FIGURES | {"best_step": best} | turned
    assert list(format_report(figures, [], "", 500, longer, Path("runs/a")))[-1] == command


UNBEATEN = {"baselines": {"unigram": 3.5}, "beaten_at_step": {"unigram": None}}


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"train_loss": 0.09, "val_loss": 8.01, "steps": 145}, "python train.py horizon=72steps"),
        ({"train_loss": 0.09, "val_loss": 8.01, "steps": 2000}, "python train.py horizon=500steps"),
        ({"train_loss": 0.09, "val_loss": 8.01, "steps": 1}, "python train.py horizon=1steps"),
        ({"train_loss": 1.0, "val_loss": 1.9}, "resume=runs/a horizon=2200steps"),
        ({"train_loss": 3.0, "val_loss": 3.9} | UNBEATEN, "python train.py horizon=500steps"),
        ({"train_loss": 3.0, "val_loss": 3.7} | UNBEATEN, "resume=runs/a horizon=2200steps"),
        ({"train_loss": 3.0, "val_loss": 3.9, "beaten_at_step": {}}, "resume=runs/a horizon=2200steps"),
    ],
)
def test_a_run_that_memorises_is_not_made_longer(changes, command):
    """A training loss far below validation is enough for a shorter run, and sooner if no baseline was beaten."""
    figures = FIGURES | {"best_step": 1100} | changes
    figures |= {"best_val_loss": figures["val_loss"]}
    assert list(format_report(figures, [], "", 500, "2200steps", Path("runs/a")))[-1].endswith(f" {command}")


@pytest.mark.parametrize(
    ("text", "width", "line"),
    [
        ("\n one  two \n\n  three\n", 23, "one  two ⏎ three"),
        ("thirteen char", 13, "thirteen char"),
        ("thirteen char", 11, "thirteen c…"),
        ("tab\tbell\x07\x9b·\u202e", 31, "tab→bell<07><c2><9b>·<e2><80><ae>"[:30] + "…"),
        ("犬も歩けば棒に当たる", 11, "犬も歩けば…"),
        ("犬も歩けば棒に当たる", 20, "犬も歩けば棒に当たる"),
        ("", 7, ""),
    ],
)
def test_one_line(text, width, line):
    """Ends of lines and control characters have signs, and no line is wider than it may be, in columns."""
    assert fit_on_line(text, width) == line
    assert disp_len(line) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (86399, "23h59m"), (277777, "3d05h")],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("best", "longer", "call"),
    [
        (1100, "2200steps", "train longer: lm.resume(horizon='2200steps')"),
        (1100, "", "go on:        lm.resume()"),
        (700, "2200steps", "run shorter:  gpt.train(..., horizon='500steps')"),
    ],
)
def test_calls(best, longer, call):
    """After `gpt.train`, the report suggests calls instead of commands."""
    figures = FIGURES | {"best_step": best, "best_val_loss": FIGURES["val_loss"] if best == 1100 else 2.81}
    lines = list(format_report(figures, [], "it's", 500, longer, Path("runs/a b"), in_python=True))
    assert lines[-1] == call
    assert lines[-4:-2] == [
        """sample it:    print(gpt.load('runs/a b').generate("it's"))""",
        """see why:      gpt.load('runs/a b').insight("it's").save('page.html')""",
    ]
