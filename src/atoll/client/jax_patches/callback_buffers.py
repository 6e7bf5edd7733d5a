"""Arguments of JAX's `buffer_callback` in the client's process.

Such a callback writes its results into buffers, which are XLA's memory in plain JAX. On Atoll, arguments and results
are arrays of a call. The classes here replace jaxlib's buffers and context on a CPU, with the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from atoll.host_services.calls.call_messages import Array
from atoll.transfers.dtypes import numpy_dtype

_CPU = (1, 0)  # DLPack's device type and ID


class Buffer:
    """Replaces `jax.experimental.buffer_callback.Buffer`."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def writeable(self) -> bool:
        return self._array.flags.writeable

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._array, dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("stream", None)
        if not self.writeable and not options.get("max_version"):  # DLPack before 1.0 has no read-only arrays
            return self._array.copy().__dlpack__()
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class Context:
    """Replaces `jax.experimental.buffer_callback.ExecutionContext` on a CPU."""

    @property
    def stage(self) -> Any:
        from jax._src.lib import ffi

        return ffi.ExecutionStage.EXECUTE

    @property
    def stream(self) -> int:
        from jax.errors import JaxRuntimeError

        raise JaxRuntimeError("UNIMPLEMENTED: XLA FFI GPU context is not available")


def on_arrays(
    callback: Callable[..., Any], results: Sequence[tuple[str, tuple[int, ...]]], aliases: Mapping[int, int]
) -> Callable[..., list[Array]]:
    """Convert a callback on buffers to one that takes arrays and returns arrays of these dtypes and shapes.

    Result i is initialized with argument `aliases[i]` and shares its memory; other results are initialized with zeros.
    """

    def call(*arguments: Array) -> list[Array]:
        copies = {position: arguments[position].copy() for position in aliases.values()}
        written = [
            copies[aliases[i]].view() if i in aliases else np.zeros(shape, numpy_dtype(dtype))
            for i, (dtype, shape) in enumerate(results)
        ]
        for copy in copies.values():
            copy.flags.writeable = False
        given = [copies.get(position, argument) for position, argument in enumerate(arguments)]
        callback(Context(), *map(Buffer, given), *map(Buffer, written))
        return written

    return call
