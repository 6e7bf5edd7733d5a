"""Messages of commands to people, and the exit of commands."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from rich.console import Console

terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Write a line for people to standard error, because standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with one line of explanation and an exit status."""
    say(f"atoll: {message}")
    sys.exit(status)


def end_on_signals() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
