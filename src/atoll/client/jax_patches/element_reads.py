"""Reads the elements of an array together in loops such as `[float(x) for x in array]`.

JAX divides an array into its elements before the loop, 100 at a time. Each element is an array with its own read. The
first three of these reads are not changed, since many scripts read no more. The next read also reads elements that
nobody has read yet, with the request of `tree_reads`: the more elements have been read, the more.

All elements are results of one computation. Some of them have been read, so the computation has ended, and the request
waits for nothing but the contents.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from atoll.client.jax_patches.direct_reads import is_requested
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.jax_patches.tree_reads import MAX_BYTES, batches, is_readable, values_of
from atoll.client.plugin_programs import client_of, is_atoll, staging
from atoll.protocol.questions import MAX_ARRAYS

SINGLE_READS = 3  # of elements of an array, before others are read together
MIN_TOGETHER = 4  # elements; the request takes as long as about three reads
READ_AHEAD = 8  # elements that one request reads at most, per element that has been read
_ELEMENTS = "_atoll_elements"  # attribute of an element


class Elements:
    """The elements into which an array was divided, on the same devices. Keeps none of them alive. Thread-safe."""

    __slots__ = ("_reads", "_references")

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._references = tuple(map(weakref.ref, arrays))
        self._reads = 0

    def read(self, array: Any, read: Callable[[Any], Any]) -> Any:
        """Return the value of an element with `read`, which reads one array. Read others before if that is useful."""
        if self._reads >= SINGLE_READS and self._references:
            self._read_together(array)
        value = read(array)
        self._reads += 1  # if two threads count one read, the others are read together later
        return value

    def _read_together(self, array: Any) -> None:
        """Set the values of this element and of others, unless the request fails. JAX reads elements without a value.

        If another thread has staged arrays, set no values, because its request may wait for a computation.
        """
        is_staging: list[bool] = []
        try:
            is_staging.extend(map(staging.acquire, (False,)))  # one call of C: no interrupt between lock and list
            if any(is_staging):
                self._set_values(array)
        finally:
            if any(is_staging):
                staging.release()

    def _set_values(self, array: Any) -> None:
        arrays = self._unread(array)
        if len(arrays) < MIN_TOGETHER:
            return
        values = values_of(array.sharding._device_assignment, arrays)
        if not values:
            self._references = ()
        self._reads += len(values)
        for each, value in zip(arrays, values, strict=False):
            if each._npy_value is None and not each.is_deleted():
                value = value.copy()  # otherwise each value would keep the contents of all alive
                value.flags.writeable = False
                each._npy_value = value

    def _unread(self, array: Any) -> list[Any]:
        """Return this element and others that one request can read with it."""
        if not _is_unread(array):
            return []
        others = (each for reference in self._references if (each := reference()) is not None and each is not array)
        count = READ_AHEAD * self._reads - 1
        return next(batches([array, *islice(filter(_is_unread, others), count)]))


def _is_unread(array: Any) -> bool:
    return is_readable(array) and not is_requested(array)


def group(arrays: Sequence[Any]) -> None:
    """Let reads of these arrays, which one computation has made on the same devices, read the others as well."""
    elements = Elements(arrays)
    for each in arrays:
        setattr(each, _ELEMENTS, elements)


def _grouping(unstack: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def _unstack(x: Any, *arguments: Any, **options: Any) -> Any:
        elements = unstack(x, *arguments, **options)
        if (
            SINGLE_READS + MIN_TOGETHER <= len(elements) <= MAX_ARRAYS
            and isinstance(elements[0], internals.Array)  # not traced
            and elements[0].nbytes <= MAX_BYTES
            and is_atoll(client_of(x))
        ):
            group(elements)
        return elements

    return _unstack


def _reading(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from atoll.client import jax_internals as internals

    def _value(self: Any) -> Any:
        if self._npy_value is None:
            elements: Elements | None = getattr(self, _ELEMENTS, None)
            if elements is not None and internals.device_to_host_guard() in (None, "allow"):
                return elements.read(self, read)
        return read(self)

    return _value


PATCH = Patch(
    name="reads of elements",
    enables="loops over the elements of an array without a round trip for each element",
    changes=(
        Replacement("jaxlib._jax:ArrayImpl", "_unstack", _grouping, ("x",)),
        # It runs before the function of `direct_reads`, because that patch is installed first.
        Replacement("jaxlib._jax:ArrayImpl", "_value", _reading, ("self",)),
    ),
)
