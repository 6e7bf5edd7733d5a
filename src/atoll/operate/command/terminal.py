"""Messages of commands to people, and the exit of commands."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from rich.console import Console

from atoll.cluster.processes.process_runtime import ending_signals

_REPEAT_SECONDS = 0.05

terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def echo(text: str) -> None:
    """Write a line for people to standard error, because standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with one line of explanation and an exit status."""
    echo(f"atoll: {message}")
    sys.exit(status)


def end_on_signals() -> None:
    """Handle the other `ending_signals` like Ctrl-C."""
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)


def repeat_dropped_interrupts() -> None:
    """Raise a KeyboardInterrupt again if Python has dropped it.

    Python only prints an exception that is raised while a `__del__` or the callback of a weak reference runs, and the
    command would continue.
    """

    def dropped(exception: sys.UnraisableHookArgs) -> None:
        if issubclass(exception.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS)
        else:
            sys.__unraisablehook__(exception)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = dropped
