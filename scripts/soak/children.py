"""The processes that a process of the soak has started, by the modules that they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def children_that_run(module: str, parent: int, *, recursive: bool = False) -> Iterator[psutil.Process]:
    """Yield the children of a process that run a module, without those that end meanwhile.

    Raise psutil.NoSuchProcess if there is no such parent.
    """
    for child in psutil.Process(parent).children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):  # also raised for zombies
            if module in child.cmdline():
                yield child
