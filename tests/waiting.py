"""Waits with a deadline, which is far beyond what a busy machine needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0


def until(holds: Callable[[], bool], pause: float = 0.001) -> None:
    """Return when `holds` returns true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"it does not hold after {PATIENCE_SECONDS:.0f} s"
        time.sleep(pause)


async def until_async(holds: Callable[[], bool], *tasks: asyncio.Task[object], pause: float = 0.001) -> None:
    """Return when `holds` returns true. Raise the error of a task that fails in the meantime."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(pause)
