"""Tests of arrays made from values of the script: all ways, types and sizes give the arrays of stock JAX.

The functions run in a child on Atoll, and here on stock JAX. Each small array is made several times there, because
small arrays of a frequent type are sent differently.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.transfers.shared_slots import SLOT_BYTES
from tests.end_to_end.remote_python import RemotePython

FEW_DTYPES = ("int64", "int4")
OTHER_DTYPES = (
    *("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint2", "float4_e2m1fn"),
)
LARGE_BYTES = 1 << 20  # from this size, contents are sent from the memory of an array
TREE_BYTES = 1 << 14  # up to this size, arrays of a tree are made together
TIMES = 3  # small arrays use slots from the third one on

Make = Callable[[Any], Any]


class Subclass(np.ndarray[Any, Any]):
    pass


def of_type(dtype: Any, size: int) -> Any:
    return (np.arange(size) % 7 - 3).astype(np.int8).astype(dtype)


def sized(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield arrays of these types, with sizes around the limits between different ways to send contents."""
    for name in names:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        for nbytes in (0, SLOT_BYTES, SLOT_BYTES + 32, TREE_BYTES + 32, 2 * LARGE_BYTES):
            yield f"{name} {nbytes}", of_type(dtype, nbytes // dtype.itemsize)


def few_sized() -> Iterator[tuple[str, Any]]:
    return sized(FEW_DTYPES)


def others_sized() -> Iterator[tuple[str, Any]]:
    return sized(OTHER_DTYPES)


def unusual() -> Iterator[tuple[str, Any]]:
    """Yield small and large values of unusual types, which JAX may reject."""
    for size, columns in (("small", 8), ("large", 1 << 16)):
        x = np.arange(6 * columns, dtype=np.float32).reshape(6, columns)
        yield f"{size} Fortran order", np.asfortranarray(x)
        yield f"{size} transposed", x.T
        yield f"{size} strided", np.repeat(x, 2, axis=0)[::2]
        yield f"{size} reversed", x[::-1]
        yield f"{size} broadcast", np.broadcast_to(x[:1], x.shape)
        yield f"{size} not aligned", np.frombuffer(b"x" + x.tobytes(), np.float32, offset=1)
        fixed = x.copy()
        fixed.flags.writeable = False
        yield f"{size} read-only", fixed
        with tempfile.TemporaryFile() as file:
            file.write(x.tobytes())
            file.flush()
            yield f"{size} memmap", np.memmap(file, np.float32, "r+", shape=x.shape)
        yield f"{size} subclass", x.view(Subclass)
    yield "swapped bytes", np.arange(8, dtype=">f4")
    yield "masked", np.ma.masked_array(np.arange(8), np.arange(8) > 3)
    yield "records", np.zeros(2, [("a", np.int32)])
    yield "objects", np.array([1, None], object)
    yield "text", np.array(["a", "bc"])
    yield "dates", np.array(["2026-01-01"], "M8[D]")
    yield "float0", np.zeros(2, jax.dtypes.float0)
    yield "0-d", np.array(3.5)
    for number in (True, 3, -5, 2.5, 1e300, 1 + 2j, 2**40, 2**70, None, "a", b"a", (1, [2.0, None]), (), {}):
        yield f"{number!r}", number
    for dtype in (
        np.bool_,
        np.int8,
        np.uint64,
        np.float16,
        np.float64,
        np.complex128,
        ml_dtypes.bfloat16,
        ml_dtypes.int4,
    ):
        yield dtype.__name__, dtype(1)


def ways() -> dict[str, Make]:
    device, mesh = jax.devices()[1], Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    return {
        "device": lambda x: jax.device_put(x, device),
        "no alias": lambda x: jax.device_put(x, device, may_alias=False),
        "donate": lambda x: jax.device_put(x, donate=True, may_alias=None),
        "replicated": lambda x: jax.device_put(x, whole),
        "divided": lambda x: jax.device_put(x, split),
        "tree": lambda x: jax.device_put([x, x, x, x], device),
        "callback": lambda x: jax.make_array_from_callback(np.shape(x), split, lambda index: x[index]),
    }


def description(made: Any) -> list[Any]:
    """Return the properties of a tree's arrays, with a digest of their values on each device."""
    return [
        (
            *(x.dtype.name, x.weak_type, x.committed, x.shape, x.sharding.memory_kind),
            *[
                (each.device.id, hashlib.md5(np.asarray(each.data).tobytes()).hexdigest())
                for each in x.addressable_shards
            ],
        )
        for x in jax.tree.leaves(made)
    ]


def digest(values: Any) -> str:
    return hashlib.md5(values.tobytes()).hexdigest()


def attempt(make: Make, value: Any) -> Any:
    """Return the description of the arrays that `make` makes of a value, or the class of its error."""
    try:
        return description(make(value))
    except Exception as error:
        return type(error).__name__


def attempts(values: Callable[[], Iterable[tuple[str, Any]]], times: int) -> dict[tuple[str, str], list[Any]]:
    return {
        (name, way): [attempt(make, value) for _ in range(times if getattr(value, "nbytes", 0) < LARGE_BYTES else 1)]
        for name, value in values()
        for way, make in ways().items()
    }


def attempts_on_atoll(values: Callable[[], Iterable[tuple[str, Any]]]) -> dict[tuple[str, str], list[Any]]:
    """Make the arrays after this process shares memory with the proxy and the host."""
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    devices = jax.devices()[:2]
    until = time.monotonic() + 60
    while not (
        CLIENT_CHANNEL.has_slots(devices[0].client) and all([CLIENT_CHANNEL.sends_to(device) for device in devices])
    ):
        assert time.monotonic() < until, "no memory is shared"
        time.sleep(0.01)
    return attempts(values, TIMES)


@pytest.mark.parametrize(
    "values",
    [few_sized, pytest.param(others_sized, marks=pytest.mark.thorough), unusual],
    ids=["sizes", "sizes of other types", "unusual values"],
)
def test_arrays_of_values_of_the_script_are_those_of_stock_jax(
    atoll_python: RemotePython, values: Callable[[], Iterable[tuple[str, Any]]]
) -> None:
    found = atoll_python.call(attempts_on_atoll, values)
    expected = attempts(values, 1)
    different = {
        key: (each, expected[key][0]) for key, made in found.items() for each in made if each != expected[key][0]
    }
    assert not different
    assert found.keys() == expected.keys()
