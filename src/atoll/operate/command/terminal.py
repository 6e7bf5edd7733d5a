"""What commands say to a person, and how they end."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from rich.console import Console

terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Writes a line for a person: to standard error, since standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command with one line of explanation and an exit status."""
    say(f"atoll: {message}")
    sys.exit(status)


def end_on_signals() -> None:
    """SIGTERM, and the terminal's end, work as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
