"""The progress bar and the printed lines, on terminals of any width, and in a log."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from tqdm import tqdm
from tqdm.utils import disp_len

from gpt.console import print_line
from gpt.sampling.scoring import Score
from gpt.training.config import Config
from gpt.training.progress import BAR_FORMAT, ProgressDisplay
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState
from harness import ROOT, command, python_program, tiny_arguments

FACTS = ["train 2.500 val 3.000", "2.164 bits/byte", "12.3k tok/s"]


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def line_at(step: int, width: int, total: int = 4000) -> str:
    """Return the bar on a terminal of this width after a step, at ten steps a second."""
    with tqdm(total=total, file=Terminal(), ncols=width, bar_format=BAR_FORMAT, postfix="  ".join(FACTS)) as line:
        line.n = step
        line.start_t -= step / 10
        return str(line)


def test_the_line_fits_every_width():
    """The bar takes the remaining columns. A narrow terminal cuts it first, and the steps last."""
    full_line = "500/4000 12%  05:50 left, train 2.500 val 3.000  2.164 bits/byte  12.3k tok/s  "
    assert line_at(500, len(full_line)) == full_line
    assert line_at(500, len(full_line) + 24) == full_line + f"{'###':24}"
    assert line_at(500, 25) == "500/4000 12%  05:50 left,"
    assert line_at(9, 60, total=7).startswith("9/? ")  # more steps than expected
    for width in range(1, 131):
        assert disp_len(line_at(500, width)) <= width


SCHEDULE = Schedule(total_steps=4000)


def make_progress(
    train_loss: float | None = None, tokens_per_second: float = 0.0
) -> tuple[ProgressDisplay, TrainState]:
    """Return the display and the state of a run of 4,000 steps."""
    spec, state = RunSpec(Config(), SCHEDULE, dataset=None), TrainState(train_loss=train_loss)
    return ProgressDisplay(spec, state, SimpleNamespace(tokens_per_second=tokens_per_second)), state


@pytest.mark.parametrize("terminal", [True, False])
def test_report_of_a_validation(tmp_path, monkeypatch, terminal):
    """A terminal and a log get two lines: the figures, and the last sample."""
    monkeypatch.setenv("COLUMNS", "41")
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress, _ = make_progress(2.5, 12345.6)
    progress.open(tmp_path, 0, 4000)
    samples = ["of another prompt", "Once upon\n\na time there were three little pigs"]
    progress.print_validation(500, Score(nats=30.0, tokens=10, bytes=20), samples)
    progress.close()
    assert out.getvalue() == f"step 500/4000  {'  '.join(FACTS)}\n    Once upon ⏎ a time there were three …\n"


@pytest.mark.parametrize(
    ("loss", "steps", "facts"),
    [
        (None, None, "train     - val     -      - bits/byte      - tok/s"),  # not known yet
        (2.5, 500, "train 2.500 val 2.917  1.521 bits/byte"),
        (10.8254, 501, "train 10.83 val     -      - bits/byte"),
    ],
)
def test_figures_of_the_bar(tmp_path, monkeypatch, capsys, loss, steps, facts):
    """A resumed run shows its last validation, unless a kill has left a validation after the checkpoint.

    At the end the bar is cleared, so that an error message does not follow half a bar.
    """
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "stderr", Terminal())
    figures = {"steps": steps, "val_loss": 2.91684, "val_bits_per_byte": 1.52063}
    if steps:
        (tmp_path / "metrics.json").write_text(json.dumps(figures))
    progress, state = make_progress(loss)
    progress.open(tmp_path, 500, 4000)
    time.sleep(0.6)
    state.seconds += 10.0
    progress.end_step(501, is_log_point=True)
    assert re.match(r"\r501/4000 13%  [\d:]+ left, ", sys.stderr.getvalue())  # with the remaining time
    assert facts in sys.stderr.getvalue()
    progress.close()
    assert re.search(r"\r +\r$", sys.stderr.getvalue())
    assert capsys.readouterr().out == ""


def test_a_terminal_of_no_width(tmp_path, monkeypatch, capsys):
    """It shows no bar, so the remaining time is printed once, as in a log."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (23, 0))
    progress, state = make_progress()
    with os.fdopen(end, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        progress.open(tmp_path, 0, 4000)
        for step in (100, 200):
            state.seconds += 10.0
            progress.end_step(step, is_log_point=True)
        progress.close()
    os.close(terminal)
    assert capsys.readouterr().out == "about 6m30s to go at this machine's speed, besides validations\n"


def test_a_line_above_the_bar(monkeypatch):
    """The bar is cleared, the line is written, and the bar is drawn again below it."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=7, file=screen, ncols=26, leave=False, bar_format=BAR_FORMAT):
        before = len(screen.getvalue())
        print_line("a warning", screen)
        assert re.fullmatch(r"\r +\ra warning\n\r0/7  0%  \? left + *", screen.getvalue()[before:])


def columns(raw: str) -> list[str]:
    """Return the pieces of a terminal's output that each begin in its first column."""
    return [piece for piece in re.split(r"[\r\n]+", raw) if piece.strip()]


@pytest.mark.slow
def test_on_a_terminal(corpus_folder, tmp_path):
    """Nothing is wider than the terminal, samples are printed above the bar, and the bar is cleared at the end."""
    changes = ["horizon=40steps", "trainer.validate_every=10", "data.prompts=[a\tb]", f"run_dir={tmp_path / 'run'}"]
    script = [python_program(), *command(*tiny_arguments(corpus_folder, *changes))[1:]]
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (23, 79))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    shown = b""
    with subprocess.Popen(script, cwd=ROOT, stdout=end, stderr=end, env=environment) as process:
        os.close(end)
        while True:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # of Linux, at the end
                break
    os.close(terminal)
    assert process.returncode == 0, shown.decode()
    raw = shown.decode()
    assert "\x1b" not in raw
    bars = [piece for piece in columns(raw) if re.match(r" *\d+/40 ", piece)]
    steps = [piece for piece in columns(raw) if piece.startswith("step ")]
    samples = [piece for piece in columns(raw) if piece.startswith("    [")]
    assert [piece for piece in bars if "tok/s" in piece]
    assert max(disp_len(piece.rstrip()) for piece in [*bars, *steps, *samples]) <= 79
    assert [re.match(r"step (\d+)/40  train +[\d.-]+ val \d", line)[1] for line in steps] == ["10", "20", "30", "40"]
    assert [line[:9] for line in samples] == ["    [a→b]"] * 4
    after = raw[raw.rindex(samples[-1]) :]
    assert re.search(r"tok/s.*\r +\r\r\ntrained +40  steps: ", after), after[:500]  # in place of the bar, spaces


def test_no_semaphore():
    """Lines and bars create no semaphore. Python 3.14 would report it as leaked when the program is killed."""
    code = """
import tqdm.std
from gpt.console import import_tqdm, print_line
print_line("a line")
list(import_tqdm()(range(3), disable=False))
print(hasattr(tqdm.std.TqdmDefaultWriteLock, "mp_lock"))
"""
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed.splitlines() == ["a line", "False"]
