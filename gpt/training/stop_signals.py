"""Stopping on request: the first signal stops a run after its step, the second at once."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# One request may arrive twice. A second signal within this time is not a second request.
REPEATED_SIGNAL_SECONDS = 0.1  # `timeout` sends a signal to its child, and then to the process group of the child
TORCHRUN_REPEATED_SIGNAL_SECONDS = 1.0  # Ctrl-C reaches all processes, and torchrun sends it to them again

# SIGHUP follows a lost connection. Job queues send the next three before they kill. On Windows, Ctrl-Break and closing
# the console send SIGBREAK.
SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
STOP_SIGNALS = [getattr(signal, name) for name in SIGNAL_NAMES if hasattr(signal, name)]


def is_handled(number: int) -> bool:
    """Return True unless the signal is ignored and should stay ignored, as SIGHUP is after `nohup`.

    An ignored SIGINT is handled nevertheless: shells ignore it for background jobs, but `kill -INT` should stop a run.
    """
    return signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT


class StopSignals:
    """Handles the signals between `install` and `restore`. `received_signal` is the first that arrived, or 0.

    Python handles signals only in the main thread. In other threads this class does nothing.
    """

    def __init__(self) -> None:
        self.received_signal = 0
        self._receipt_time = 0.0
        self._old_handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers. It may be called again: `restore` then restores what the first call replaced."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            old_handler = self._old_handlers.setdefault(number, signal.getsignal(number))
            if old_handler is not None and is_handled(number):  # None means a handler in C
                signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Restore the handlers that `install` replaced."""
        for number, handler in self._old_handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        self._old_handlers.clear()

    def _on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        is_first = self.received_signal == 0
        if is_first:
            self.received_signal = number
            self._receipt_time = now
        if os.environ.get("RANK", "0") != "0":  # rank 0 prints the line, and ends all ranks after a second signal
            return
        if not is_first:
            window = (
                TORCHRUN_REPEATED_SIGNAL_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else REPEATED_SIGNAL_SECONDS
            )
            if now - self._receipt_time >= window:
                sys.exit(128 + number)
            return
        with suppress(OSError):  # print is unsafe here, because the signal may have interrupted a print
            os.write(2, b"\nstopping after this step (once more to stop at once)\n")
