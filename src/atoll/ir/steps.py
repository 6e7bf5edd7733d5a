"""Work that is done in steps: generators that yield after each small part of it, and return its result.

One step is about the work for one node of a program: some ten microseconds. The caller decides how many steps to do in
a row, so that the work of a large program never holds up others.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]


def finish(steps: Steps[_T]) -> _T:
    """Do all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
