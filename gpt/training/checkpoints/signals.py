"""Stopping on request: the first signal stops after the current step, the second at once."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

SWEEP = "MINI_GPT_SWEEP"  # a variable that names the folder for notes of the jobs of a sweep
STARTERS = ("TORCHELASTIC_RUN_ID", SWEEP)  # variables of what starts several processes, and passes signals on
TOGETHER = 1.0  # seconds within which a signal counts once there: a terminal may have sent it to all processes
ONCE = 0.1  # the same for a process alone: `timeout` sends SIGTERM to its child and to the group that this is in

# SIGHUP is what a lost connection sends, and the next three what queues send before they kill. Windows has SIGBREAK
# instead, for Ctrl-Break and a console that is closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class StopSignals:
    """Takes over the signals between `install` and `restore`; `received` is the first that arrived, or 0.

    One that was ignored, as SIGHUP is after `nohup`, stays so, but not SIGINT: a shell ignores it for what a script
    starts with `&`, and who sends it there means it. Outside of the main thread there are no signals to take.
    """

    def __init__(self) -> None:
        self.received, self._at = 0, 0.0
        self._handlers: dict[int, Any] = {}  # from before

    def install(self) -> None:
        """Take the signals over, from whoever has them now; what `restore` brings back is what the first call found."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            before = self._handlers.setdefault(number, signal.getsignal(number))
            if before is not None:  # None is a handler of a library's in C, which nobody could bring back
                stays = before is signal.SIG_IGN and number != signal.SIGINT
                signal.signal(number, signal.SIG_IGN if stays else self._on_signal)

    def restore(self) -> None:
        """Leave the signals as they were before."""
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        self._handlers.clear()

    def _on_signal(self, number: int, frame) -> None:
        now, again = time.monotonic(), self.received != 0
        if not again:
            self.received, self._at = number, now
        if os.environ.get("RANK", "0") != "0":  # rank 0 says so, and decides whether all stop at once
            return
        if again and now - self._at < (TOGETHER if any(name in os.environ for name in STARTERS) else ONCE):
            return
        if again:
            sys.exit(128 + number)
        with suppress(OSError):  # print is not safe here: the signal may have interrupted a print
            os.write(2, b"\nstopping after this step (once more to stop at once)\n")
