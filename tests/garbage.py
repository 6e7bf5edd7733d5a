"""Count the garbage that only Python's collector can free: objects in cycles without other references."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the objects of Atoll's classes that the block leaves for the collector, by type.

    The counter is filled at the end of the block. The collector is disabled during the block.
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
