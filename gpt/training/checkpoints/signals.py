"""Stopping on request: the first SIGINT, SIGTERM or SIGHUP stops after the current step, the second at once."""

import os
import signal
import sys
import time
from contextlib import suppress

SWEEP = "MINI_GPT_SWEEP"  # a variable that names the folder for notes of the jobs of a sweep
STARTERS = ("TORCHELASTIC_RUN_ID", SWEEP)  # variables of what starts several processes, and passes signals on
TOGETHER = 1.0  # seconds within which a signal counts once there: a terminal may have sent it to all processes

# SIGHUP is what a lost connection sends. Windows has SIGBREAK instead, for Ctrl-Break and a console that is closed.
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]


class StopSignals:
    """Takes over the signals between `install` and `restore`; `received` is the first that arrived, or 0."""

    def __init__(self) -> None:
        self.received, self._at = 0, 0.0
        self._handlers: dict[int, object] = {}  # from before

    def install(self) -> None:
        """Take the signals over, from whoever has them now; what `restore` brings back is what the first call found."""
        for number in SIGNALS:
            self._handlers.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Leave the signals as they were before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()

    def _on_signal(self, number: int, frame) -> None:
        now, again = time.monotonic(), self.received != 0
        if not again:
            self.received, self._at = number, now
        if os.environ.get("RANK", "0") != "0":  # rank 0 says so, and decides whether all stop at once
            return
        if again and any(name in os.environ for name in STARTERS) and now - self._at < TOGETHER:
            return
        if again:
            sys.exit(128 + number)
        with suppress(OSError):  # print is not safe here: the signal may have interrupted a print
            os.write(2, b"\nstopping after this step (once more to stop at once)\n")
