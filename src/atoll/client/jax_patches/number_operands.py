"""Keeps the Python numbers of eager operations, such as the 2 in `x / 2`, as arrays on the device.

JAX's C++ makes an array of such a number for each operation. jaxlib's client then waits until the proxy has its bytes,
and the cluster launches a transfer besides the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.direct_reads import request_contents
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.jax_patches.read_table import ArrivingContents
from atoll.client.plugin_programs import is_atoll

MAX_CONSTANTS = 256
MAX_SEEN = 1024
_MAX_INTEGER = 1 << 31
_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)


def _number_on(number: float, device: Any) -> Any:
    from atoll.client import jax_internals as internals

    return internals.number_on(number, device)


def _type_settings() -> Any:
    from atoll.client import jax_internals as internals

    return internals.type_settings()


class Constants:
    """The arrays of numbers by device, for the client of `open`. Thread-safe.

    A number gets an array when it is used for the second time, if `make` returns one. `make(number, device)` returns an
    uncommitted array with the type that JAX gives the number, which `type_settings()` may change.

    The device may fail to make an array, for example for lack of memory, after operations have used it. So each array
    is also read: `request(array)` returns the arriving contents, or None if they cannot be requested. An array whose
    contents fail is dropped, and one without contents is not kept. jaxlib has no cheaper way to learn of a failure
    without waiting, because each `is_ready` sends a request.
    """

    def __init__(
        self,
        make: Callable[[Any, Any], Any] = _number_on,
        type_settings: Callable[[], Any] = _type_settings,
        request: Callable[[Any], ArrivingContents | None] = request_contents,
    ) -> None:
        self._make = make
        self._request = request
        self._type_settings = type_settings
        self._client: Any = None
        self._losses: Callable[[], int] = lambda: 0
        self._lost = 0  # what `_losses()` was when the constants were made
        self._arrays: dict[Any, tuple[Any, ArrivingContents]] = {}
        self._drops = 0  # how often all constants were dropped
        self._seen: dict[Any, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays)

    def open(self, client: Any, losses: Callable[[], int]) -> None:
        """Keep constants for this client. Drop them whenever `losses()` changes, since its cluster has lost arrays."""
        self.drop()
        self._client, self._losses, self._lost = client, losses, losses()

    def find(self, number: float, device: Any) -> Any:
        """Return the array of a number on a device. Return None if JAX has to convert the number."""
        if number != number or (type(number) is int and not -_MAX_INTEGER <= number < _MAX_INTEGER):
            return None
        if device.client is not self._client:
            return None
        lost = self._losses()
        if lost != self._lost:
            self.drop()
            self._lost = lost
        # -0.0 and 0.0 are equal, and so are 1 and 1.0.
        key = (device.id, type(number), number or str(number), self._type_settings())
        array, contents = self._arrays.get(key, (None, None))
        if contents is None or contents.has_failed:
            return self._add(key, number, device)
        return array

    def _add(self, key: Any, number: float, device: Any) -> Any:
        with self._lock:
            drops = self._drops
            if key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > MAX_SEEN:
                    del self._seen[next(iter(self._seen))]
                return None
        array = self._make(number, device)
        if array is None:
            return None
        contents = self._request(array)
        with self._lock:
            if self._drops != drops:  # the array may be one of those that were lost
                return None
            self._arrays.pop(key, None)
            if contents is None:
                return array
            self._arrays[key] = array, contents
            if len(self._arrays) > MAX_CONSTANTS:
                del self._arrays[next(iter(self._arrays))]
        return array

    def drop(self) -> None:
        """Drop all constants."""
        with self._lock:
            self._drops += 1
            self._arrays.clear()
            self._seen.clear()

    def clear_cache(self) -> None:
        """Drop all constants and keep no others, because the client was closed."""
        self._client = None
        self.drop()


CONSTANTS = Constants()


def _operand(array: Any, number: float) -> Any:
    """Return the array of the number that an eager operation with `array` can use, or None."""
    from atoll.client import jax_internals as internals

    sharding = array.sharding
    devices = sharding._internal_device_list
    if len(devices) != 1 or not is_atoll(devices[0].client) or not internals.is_eager():
        return None
    device = devices[0]
    if sharding.memory_kind not in (None, device.default_memory().kind):
        return None
    if internals.host_to_device_guard() not in (None, "allow"):
        return None
    if internals.needs_check_special():  # JAX's C++ may check calls with numbers, and not those with arrays
        return None
    return CONSTANTS.find(number, device)


def _with_constants(operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if type(other) is not float and type(other) is not int:
            return operator(self, other)
        constant = _operand(self, other)
        if constant is None:
            return operator(self, other)
        try:
            return operator(self, constant)
        except RuntimeError:  # the user may have deleted the constant, which `jax.live_arrays` returns
            CONSTANTS.drop()
            return operator(self, other)

    return operate


PATCH = Patch(
    name="numbers in eager operations",
    enables="eager arithmetic and comparisons with Python numbers without a transfer for each operation",
    changes=tuple(
        Replacement("jaxlib._jax:ArrayImpl", f"__{name}__", _with_constants, ("self", "other")) for name in _OPERATORS
    ),
)
