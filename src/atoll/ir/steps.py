"""Work in steps: generators that yield after each small part of the work, and return the result.

A step is about the work for one node of a program: some ten microseconds. The caller decides how many steps it runs in
a row, so that a large program does not block other work.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice
from typing import Any, TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]

# How many cheap items a step makes or frees.
_PER_STEP = 8


def finish(steps: Steps[_T]) -> _T:
    """Run all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def collected(items: Iterable[_T]) -> Steps[list[_T]]:
    """Collect the items in a list, a few per step."""
    found: list[_T] = []
    left = iter(items)
    while some := list(islice(left, _PER_STEP)):
        found += some
        yield
    return found


def freed(*collections: list[Any] | dict[Any, Any]) -> Steps[None]:
    """Empty the collections, a few items per step. Dropping a collection would free all of its items at once."""
    for each in collections:
        while each:
            if isinstance(each, list):
                del each[-_PER_STEP:]
            else:
                for _ in range(min(_PER_STEP, len(each))):
                    each.popitem()
            yield
