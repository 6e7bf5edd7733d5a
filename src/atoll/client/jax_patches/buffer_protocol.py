"""Exports arrays by Python's buffer protocol: `memoryview(x)`, `hashlib.sha256(x)`, `np.asarray(x, copy=False)`.

jaxlib exports the memory of arrays in its own process. Atoll's arrays are in other processes, so a consumer gets the
array's contents in the script's memory, which all reads of the array share. They are read-only, as in stock JAX, and
outlive the array.

Only Python 3.12 and later have a method for the protocol that can be replaced (PEP 688).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll

_FORMATS = frozenset("?bhilqBHILQefdFD")  # NumPy's characters of the types that jaxlib exports
_FAILURE = "_atoll_failed_export"  # attribute of an array


@dataclass(frozen=True)
class _FailedExport:
    """An export that raised an error, and the instruction of the script that asked for it."""

    error: BaseException
    frame: int
    instruction: int

    def is_of(self, frame: FrameType) -> bool:
        return (self.frame, self.instruction) == (id(frame), frame.f_lasti)


class _Exporting:
    """A block that reads `array` for an export, and keeps its error for `__array__`.

    NumPy first asks for a buffer. It ignores every error of that, also a KeyboardInterrupt during a long wait, and then
    calls `__array__`.
    """

    def __init__(self, array: Any, frame: FrameType) -> None:
        self._array = array
        self._frame = frame

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            setattr(self._array, _FAILURE, _FailedExport(error, id(self._frame), self._frame.f_lasti))


def _contents(export: Callable[[Any, int], memoryview]) -> Callable[[Any, int], memoryview]:
    def __buffer__(self: Any, flags: int) -> memoryview:
        devices = self.sharding._internal_device_list
        client = devices[0].client
        if not is_atoll(client):
            return export(self, flags)
        # These are the refusals of stock JAX. NumPy then calls `__array__`.
        if self.is_deleted():
            raise BufferError("INVALID_ARGUMENT: Array has been deleted.")
        if client.platform != "cpu":
            raise BufferError("INVALID_ARGUMENT: Python buffer protocol is only defined for CPU buffers.")
        if len(devices) != 1:
            raise BufferError(
                "INVALID_ARGUMENT: Python buffer protocol is only defined for buffers with a single shard."
            )
        # Types of other libraries have characters of their own, which may be those of NumPy's types.
        if self.dtype.isbuiltin != 1 or self.dtype.char not in _FORMATS:
            name = primitive_type(self.dtype.name)
            raise BufferError(
                f"INVALID_ARGUMENT: Buffers of type {name} are not supported by the Python buffer protocol."
            )
        if (value := self._npy_value) is not None:  # the array was read before
            return memoryview(value)
        with _Exporting(self, sys._getframe(1)):
            value = self._value
        return memoryview(value)

    return __buffer__


def _raising_what_numpy_ignores(convert: Callable[..., Any]) -> Callable[..., Any]:
    def __array__(self: Any, dtype: Any = None, context: Any = None, copy: bool | None = None) -> Any:
        failed: _FailedExport | None = getattr(self, _FAILURE, None)
        if failed is not None:
            self.__dict__.pop(_FAILURE, None)
            if failed.is_of(sys._getframe(1)):
                raise failed.error
        return convert(self, dtype, context, copy)

    return __array__


def primitive_type(name: str) -> str:
    """Return XLA's name of a type with this name in NumPy: BF16 for bfloat16, U4 for uint4."""
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("_", "")):
        name = name.replace(long, short)
    return name.upper()


PATCH = Patch(
    name="buffers",
    enables="Python's buffer protocol for arrays on one CPU device: `memoryview(x)`",
    error="Only local arrays are supported",
    changes=(
        Replacement("jaxlib._jax:ArrayImpl", "__buffer__", _contents, ("self", "flags")),
        Replacement(
            "jaxlib._jax:ArrayImpl", "__array__", _raising_what_numpy_ignores, ("self", "dtype", "context", "copy")
        ),
    ),
    since_python=(3, 12),
)
