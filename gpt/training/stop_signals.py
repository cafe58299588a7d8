"""Stopping on request: the first signal stops after the current step, the second at once."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# One request to stop may arrive twice; within this many seconds, a second signal is the first once more.
REPEATED_SIGNAL_SECONDS = 0.1  # `timeout` signals its child, and then the group that its child is in
TORCHRUN_REPEATED_SIGNAL_SECONDS = 1.0  # Ctrl-C reaches all processes, and torchrun passes its own on to them

# SIGHUP is what a lost connection sends, and the next three what queues send before they kill. Windows has SIGBREAK
# instead, for Ctrl-Break and a console that is closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
STOP_SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class StopSignals:
    """Takes over the signals between `install` and `restore`; `received_signal` is the first that arrived, or 0.

    One that was ignored, as SIGHUP is after `nohup`, stays so, but not SIGINT: a shell ignores it for what a script
    starts with `&`, and who sends it there means it. Outside of the main thread there are no signals to take.
    """

    def __init__(self) -> None:
        self.received_signal, self._at = 0, 0.0
        self._handlers: dict[int, Any] = {}  # from before

    def install(self) -> None:
        """Take the signals over, from whoever has them now; what `restore` brings back is what the first call found."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
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
        now, again = time.monotonic(), self.received_signal != 0
        if not again:
            self.received_signal, self._at = number, now
        if os.environ.get("RANK", "0") != "0":  # rank 0 says so, and decides whether all stop at once
            return
        if again and now - self._at < (
            TORCHRUN_REPEATED_SIGNAL_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else REPEATED_SIGNAL_SECONDS
        ):
            return
        if again:
            sys.exit(128 + number)
        with suppress(OSError):  # print is not safe here: the signal may have interrupted a print
            os.write(2, b"\nstopping after this step (once more to stop at once)\n")
