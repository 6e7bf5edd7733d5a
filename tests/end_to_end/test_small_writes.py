"""Tests of small arrays that the script writes: the values and types of stock JAX, without calls of jaxlib's client.

Each function without `test_` in its name runs in a child on Atoll. `values` also runs here, on stock JAX.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same

TYPES = ("bool", "int8", "uint16", "float16", "bfloat16", "float32", "int64", "complex64")


def table() -> Any:
    """Return the table of small writes, after this process shares slots with its proxy."""
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    until = time.monotonic() + 60
    while not CLIENT_CHANNEL.has_slots(jax.devices()[0].client):
        assert time.monotonic() < until, "the proxy shares no slots"
        time.sleep(0.01)
    return CLIENT_CHANNEL.small_writes


def arrays(number: int) -> list[Any]:
    x = np.arange(12).reshape(3, 4) + number
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    grid = Mesh(np.array(jax.devices()[3::-1]).reshape(2, 2).T, ("x", "y"))
    return [
        *(jax.device_put(x.astype(dtype), jax.devices()[1]) for dtype in TYPES),
        *(jax.device_put(value) for value in (np.float32(number), number, 1.5, True, np.zeros((0, 3)), x.T, x[:, ::2])),
        *(jax.device_put(x.astype(np.int32), NamedSharding(mesh, spec)) for spec in (P(), P(None, "x"))),
        *(
            jax.device_put(x[:2].T, NamedSharding(grid, spec))
            for spec in (P("y"), P(None, "x"), P("x", "y"), P(("y", "x")))
        ),
        jax.make_array_from_callback(
            (4, 4), NamedSharding(grid, P("x", "y")), lambda index: np.full((4, 4), x[0])[index]
        ),
        jnp.asarray(x),
        jnp.asarray(x, jnp.float16),
        jnp.asarray([number, 2.5]),
        jnp.asarray(np.float32(number if number < 4 else np.inf)),
        *(jnp.asarray(value) for value in (number, True, 1j, np.int64(-(2**40)), np.float64(1e300))),
        jnp.array(2.5),
        jnp.float32(number) + np.float32(1),
        jax.jit(lambda y, z: y * z)(x, np.int8(2)),
        jax.device_put(np.zeros(1025, np.float32) + number),
        jax.device_put(np.zeros(16384, np.float32) + number),
        jax.device_put(np.zeros(16385, np.float32) + number),
        jax.jit(lambda y: y * 2, donate_argnums=0)(jax.device_put(np.float32(number))),
        jax.random.key_data(jax.random.key(number)),
    ]


def values() -> list[list[Any]]:
    """Return the properties of each array, for several rounds, because the first arrays do not use slots."""
    found = []
    for number in range(5):
        made = arrays(number)
        found.append(
            [(x.dtype.name, x.weak_type, x.committed, x.shape, len(x.devices()), np.asarray(x).tolist()) for x in made]
        )
    return found


def values_of_slots() -> list[list[Any]]:
    table()
    return values()


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """Yield the results of all small writes in the block, with None for those that JAX makes."""
    found = table()
    start = found.start
    made: list[Any] = []
    found.start = lambda *write: made.append(start(*write)) or made[-1]
    try:
        yield made
    finally:
        del found.start


def writes() -> int:
    """Return how many of ten arrays on one device, and of ten sharded ones, use contents in slots."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with counted() as made:
        for number in range(10):
            assert float(jax.device_put(np.float32(number), jax.devices()[1])) == number
            x = np.arange(6, dtype=np.uint8) + number
            assert (np.asarray(jax.device_put(x, NamedSharding(mesh, P("x")))) == x).all()
    return sum(each is not None for each in made)


def arguments() -> tuple[list[Any], int]:
    """Return the results of ten calls with host values, and how many of these use contents in slots."""
    call = jax.jit(lambda x, y, z, unused: (x * y + z, z, y))
    x = jnp.arange(3.0)
    with counted() as made:
        results = [jax.device_get(call(x, i, np.full(3, i, np.int16), np.float32(1))) for i in range(10)]
    return results, sum(each is not None for each in made)


def converted() -> list[int]:
    """Return how many of ten arrays use contents in slots, for several ways to convert host values."""
    found = []
    for convert in (jnp.asarray, jnp.array, jnp.float32, lambda value: jnp.asarray(float(value))):
        with counted() as made:
            for number in range(10):
                assert float(convert(np.float32(number))) == number
        found.append(sum(each is not None for each in made))
    return found


def in_other_places() -> list[Any]:
    """Return the places of arrays converted in contexts that select devices, and the results of checks there."""
    mesh = jax.make_mesh((2,), ("x",))
    found: list[Any] = []
    for number in range(4):
        with jax.default_device(jax.devices()[1]):
            found.append([device.id for device in jnp.asarray(np.float32(number)).devices()])
        with jax.set_mesh(mesh):
            found.append(len(jnp.asarray(np.float32(number)).devices()))
        with jax.debug_nans(True), contextlib.suppress(FloatingPointError):
            found.append(jnp.asarray(np.float32(np.nan)).shape)
        found.append(jax.vmap(lambda x: x + jnp.asarray(np.float32(1)))(np.arange(3.0)).tolist())
    return found


def in_other_places_with_slots() -> list[Any]:
    table()
    return in_other_places()


def overwritten() -> list[float]:
    """Return the values of arrays whose sources were overwritten after `device_put` had returned."""
    table()
    x = np.zeros((), np.float32)
    made = []
    for number in range(600):  # more than the number of slots
        x[...] = number
        made.append(jax.device_put(x, may_alias=False))
        x[...] = -1
    return [float(each) for each in made[3:]]


def copied() -> int:
    """Return how many arrays contain values that were written after the copying functions had returned."""
    wrong = 0
    for size in (1, 1000, 3000, 20_000, 1 << 18):
        x = np.zeros(size, np.float32)
        for number in range(10):
            x[:] = number
            made = [jnp.array(x), jnp.copy(x)]
            x[:] = -1
            wrong += sum(not (np.asarray(each) == number).all() for each in made)
    return wrong


def divided() -> list[Any]:
    """Return results of functions on several devices, each with a host value that is sharded or replicated."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    given = jax.jit(lambda w, x: (w * x).sum(), in_shardings=(split, split))
    inferred = jax.jit(lambda w, x: w * x, donate_argnums=0)
    both = jax.jit(lambda x, y: x + y, in_shardings=(split, whole), out_shardings=whole)
    w = jax.device_put(np.ones(16, np.float32), split)
    kept = jax.device_put(np.ones(16, np.float32), split)
    found = []
    for number in range(6):
        x = np.arange(16, dtype=np.float32) + number
        w = inferred(w, np.full(16, 2, np.float32))
        found.append([float(given(kept, x)), np.asarray(w).tolist(), np.asarray(both(x, np.float32(3))).tolist()])
    return found


def divided_with_slots() -> list[Any]:
    table()
    return divided()


def overflows() -> list[str]:
    """Return the errors of calls with numbers that are too large, after valid calls."""
    call = jax.jit(lambda unused, amount, tree: amount + tree["a"][0])
    found = []
    with jax.enable_x64(False):
        for number in range(5):
            call(number, number, {"a": (number,)})
        for arguments in ((0, 2**40, {"a": (1,)}), (0, 1, {"a": (-(2**40),)})):
            try:
                call(*arguments)
            except OverflowError as error:
                found.append(str(error))
    return found


def overflows_with_slots() -> list[str]:
    table()
    return overflows()


def guarded() -> str:
    table()
    for _ in range(5):
        jax.device_put(np.float32(1))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        try:
            jax.device_put(np.float32(1))
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    return "no error"


def test_the_values_and_types_are_those_of_stock_jax(atoll_python: RemotePython) -> None:
    assert atoll_python.call(values_of_slots) == values()


def test_arrays_of_a_frequent_type_are_made_of_slots(atoll_python: RemotePython) -> None:
    assert atoll_python.call(writes) >= 16


def test_arguments_of_jit_are_made_of_slots(atoll_python: RemotePython) -> None:
    results, made = atoll_python.call(arguments)
    call = jax.jit(lambda x, y, z: (x * y + z, z, y))
    assert_same(results, [jax.device_get(call(jnp.arange(3.0), i, np.full(3, i, np.int16))) for i in range(10)])
    assert made >= 14, "two of three arguments are used"


def test_host_values_that_are_converted_are_made_of_slots(atoll_python: RemotePython) -> None:
    assert min(atoll_python.call(converted)) >= 7


def test_host_values_are_converted_on_the_devices_that_stock_jax_chooses(atoll_python: RemotePython) -> None:
    assert atoll_python.call(in_other_places_with_slots) == in_other_places()


def test_contents_are_copied_before_device_put_returns(atoll_python: RemotePython) -> None:
    assert atoll_python.call(overwritten) == [float(number) for number in range(3, 600)]


def test_functions_that_copy_do_so_before_they_return(atoll_python: RemotePython) -> None:
    assert atoll_python.call(copied) == 0


def test_host_arguments_of_functions_on_several_devices_are_divided(atoll_python: RemotePython) -> None:
    assert_same(atoll_python.call(divided_with_slots), divided())


def test_a_number_that_is_too_large_is_an_error_that_names_the_argument(atoll_python: RemotePython) -> None:
    found = overflows()
    assert ["argument path is amount" in found[0], "argument path is tree['a'][0]" in found[1]] == [True, True]
    assert atoll_python.call(overflows_with_slots) == found


def test_a_guard_that_forbids_transfers_forbids_small_writes(atoll_python: RemotePython) -> None:
    assert "Disallowed host-to-device transfer" in atoll_python.call(guarded)
