"""What commands say to whoever runs them, and how they end."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from rich.console import Console

terminal = Console(stderr=True, highlight=False, soft_wrap=True)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> NoReturn:
    tell(f"atoll: {message}")
    sys.exit(status)


def end_on_signals() -> None:
    """SIGTERM, and the terminal's end, work as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
