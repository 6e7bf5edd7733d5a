"""Counts what is left for Python's garbage collector: objects in cycles to which nothing else refers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what the block leaves for the collector, by type: objects of Atoll's classes.

    The counter is filled at the end of the block. Meanwhile the collector does not run.
    """
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith("atoll."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
