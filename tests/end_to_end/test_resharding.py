"""Tests of resharding: the devices have the values of stock JAX, and this process does not read the array.

Functions without `test_` in their names run in a child, on two islands of two hosts each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.same import assert_same

LARGE_BYTES = 4 << 20  # smaller arrays of a CPU are resharded by JAX's own code


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x2x2")


def on(first: int, *spec: Any, explicit: bool = False) -> NamedSharding:
    devices = np.array(jax.devices()[first : first + 4]).reshape(2, 2)
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    return NamedSharding(Mesh(devices, ("x", "y"), axis_types=kinds), P(*spec))


def large(dtype: str) -> tuple[int, ...]:
    return LARGE_BYTES // jnp.dtype(dtype).itemsize // 512, 512


def made(dtype: str, shape: tuple[int, ...] | None = None) -> Any:
    shape = shape or large(dtype)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 97
    return jax.device_put(values.astype(jnp.dtype(dtype)), on(0, "x", "y"))


def put(dtype: str, first: int, options: dict[str, Any], explicit: bool = False) -> Any:
    x = made(dtype)
    target = on(first, "y", explicit=explicit)
    y = jax.device_put(x, target, **options)
    assert y.sharding == target
    read = x._npy_value is not None
    pieces = [np.asarray(shard.data) for shard in y.addressable_shards]
    return pieces, read, y.committed, y.weak_type, x.is_deleted()


@pytest.mark.parametrize(
    ("dtype", "first", "options", "explicit"),
    [
        ("float32", 0, {}, False),
        ("float32", 0, {}, True),
        ("float32", 0, {"may_alias": False}, False),
        ("float32", 0, {"donate": True}, False),
        ("bfloat16", 0, {}, False),
        ("uint2", 0, {}, False),  # collectives of such elements crash their process
        ("float32", 4, {}, False),
        ("complex64", 4, {"donate": True}, False),
    ],
    ids=str,
)
def test_a_large_array_gets_another_sharding_without_being_read_here(
    python: RemotePython, dtype: str, first: int, options: dict[str, Any], explicit: bool
) -> None:
    pieces, read, *facts = python.call(put, dtype, first, options, explicit)
    if dtype != "uint2":
        assert not read
    expected, _, *expected_facts = put(dtype, first, options, explicit)
    assert_same(pieces, expected)
    assert facts == expected_facts


def from_one_device(first: int) -> Any:
    shape = large("float32")
    values = np.arange(np.prod(shape)).reshape(shape).astype(np.float32)
    x = jax.device_put(values, jax.devices()[0])
    target = on(first, "y", "x")
    y = jax.device_put(x, target)
    assert y.sharding == target
    read = x._npy_value is not None
    return [np.asarray(shard.data) for shard in y.addressable_shards], read, y.committed


@pytest.mark.parametrize("first", [0, 4])
def test_a_large_array_on_one_device_is_cut_for_others(python: RemotePython, first: int) -> None:
    pieces, read, committed = python.call(from_one_device, first)
    assert not read
    expected, _, expected_committed = from_one_device(first)
    assert_same(pieces, expected)
    assert committed == expected_committed


def under(setting: str) -> Any:
    x = made("float32")
    x = x.at[0, 0].set(0)
    with jax.disable_jit() if setting == "disable_jit" else getattr(config, setting)(True):
        return np.asarray(jax.device_put(x, on(0, "y")))


@pytest.mark.parametrize("setting", ["disable_jit", "debug_nans", "no_tracing", "no_execution"])
def test_settings_that_are_about_computations_leave_it_to_jax(python: RemotePython, setting: str) -> None:
    assert_same(python.call(under, setting), under(setting))


def inside_of_jit() -> Any:
    x = made("float32")
    return np.asarray(jax.jit(lambda y: y + jax.device_put(x, on(0, "y")))(x))


def test_a_constant_of_a_jit_function_is_resharded_in_it(python: RemotePython) -> None:
    assert_same(python.call(inside_of_jit), inside_of_jit())


def deleted() -> str:
    x = made("float32")
    x.delete()
    try:
        jax.device_put(x, on(0, "y"))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_deleted_array_is_refused_as_on_stock_jax(python: RemotePython) -> None:
    assert python.call(deleted) == deleted()


def tree(first: int, explicit: bool) -> Any:
    """Move the arrays of a tree to other devices. Return them, whether any was read here, and how many programs ran."""
    from atoll.client.jax_patches import device_put_resharding

    x = {f"layer {i}": made("float32", (8, 16)) + i for i in range(6)} | {"one device": jax.device_put(np.arange(16.0))}
    targets = {name: on(first, "y", explicit=explicit) for name in x} | {"one device": on(first, "x")}
    targets["layer 5"] = on(first, "x", "y", explicit=explicit)
    made_programs = device_put_resharding._tree_program
    before = made_programs.cache_info()
    y = jax.device_put(x, targets)
    after = made_programs.cache_info()
    read = any(each._npy_value is not None for each in x.values())
    shards = {name: [np.asarray(shard.data) for shard in each.addressable_shards] for name, each in y.items()}
    facts = {name: (each.sharding == targets[name], each.committed, each.weak_type) for name, each in y.items()}
    return shards, facts, read, after.hits + after.misses - before.hits - before.misses


@pytest.mark.parametrize("explicit", [False, True])
def test_a_tree_gets_other_shardings_on_other_devices_with_one_program(python: RemotePython, explicit: bool) -> None:
    shards, facts, read, programs = python.call(tree, 4, explicit)
    expected, expected_facts, _, _ = tree(4, explicit)
    assert_same(shards, expected)
    assert facts == expected_facts
    assert (read, programs) == (False, 1)


def decisions(count: int) -> int:
    """Move a tree with arrays of two types to other devices. Return how many times an array was looked at."""
    from atoll.client.jax_patches import device_put_resharding

    looked: list[Any] = []
    look = device_put_resharding._leaves
    device_put_resharding._leaves = lambda x, sharding: looked.append(x) or look(x, sharding)
    try:
        xs = [made("float32", (8, 8 << i % 2)) for i in range(count)]
        for y in jax.device_put(xs, on(4, "x")):
            assert y.sharding == on(4, "x")
    finally:
        device_put_resharding._leaves = look
    return len(looked)


def test_one_look_at_arrays_of_a_type_decides_how_a_tree_moves(python: RemotePython) -> None:
    assert python.call(decisions, 12) == 2


def small_tree(source: tuple[Any, ...], target: tuple[Any, ...], explicit: bool) -> Any:
    """Move small arrays to other shards on one island, and say whether any was read here.

    The source () stands for one device.
    """
    values = [np.arange(128.0, dtype=np.float32).reshape(8, 16) + i for i in range(5)]
    x = [jax.device_put(each, on(0, *source) if source else jax.devices()[0]) for each in values]
    sharding = on(0, *target, explicit=explicit)
    y = jax.device_put(x, sharding)
    read = any(each._npy_value is not None for each in x)
    facts = [(each.sharding == sharding, each.committed, each.weak_type) for each in y]
    return [[np.asarray(shard.data) for shard in each.addressable_shards] for each in y], facts, read


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [(("x", "y"), ("y",)), (("x",), (None, "x")), (("x",), ()), ((), ("x",)), ((), ())],
    ids=["both axes", "another axis", "gathered", "cut", "replicated"],
)
def test_the_small_arrays_of_a_tree_get_other_shards_on_an_island_without_being_read_here(
    python: RemotePython, source: tuple[Any, ...], target: tuple[Any, ...], explicit: bool
) -> None:
    shards, facts, read = python.call(small_tree, source, target, explicit)
    expected, expected_facts, _ = small_tree(source, target, explicit)
    assert_same(shards, expected)
    assert facts == expected_facts
    assert not read


def lookups_for_a_small_tree(source: tuple[Any, ...]) -> int:
    """Return how many computations and programs are looked up for a tree of small arrays that stays on an island."""
    from atoll.client.jax_patches import device_put_resharding

    makers = device_put_resharding._compiled, device_put_resharding._tree_program
    before = [maker.cache_info() for maker in makers]
    small_tree(source, (None, "y"), explicit=False)
    after = [maker.cache_info() for maker in makers]
    return sum(new.hits + new.misses - old.hits - old.misses for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("source", [("x",), ()], ids=["several devices", "one device"])
def test_one_computation_or_program_serves_the_arrays_of_a_tree(python: RemotePython, source: tuple[Any, ...]) -> None:
    assert python.call(lookups_for_a_small_tree, source) == 1


def in_a_program() -> Any:
    import atoll

    def step(x: Any, key: Any) -> Any:
        y = jax.device_put(x, on(0, "y"))
        return y * 2, jax.device_put(y, on(0, None, ("x", "y"))), jax.random.key_data(jax.device_put(key, on(0, "y")))

    x, key = made("float32", (8, 16)), jax.device_put(jax.random.split(jax.random.key(0), 8), on(0, "x"))
    results = atoll.program(step)(x, key)
    return [np.asarray(each) for each in results], [np.asarray(each) for each in step(x, key)]


def test_a_program_reshards_to_the_same_values(python: RemotePython) -> None:
    results, expected = python.call(in_a_program)
    assert_same(results, expected)


def kinds_of_work() -> list[str]:
    import atoll

    reshard = atoll.program(lambda x: jax.device_put(jax.device_put(x, on(0, "y")), on(0, None, ("x", "y"))))
    x = made("float32", (8, 16))
    jax.block_until_ready(reshard(x))
    with atoll.trace() as spans:
        jax.block_until_ready(reshard(x))
    return sorted({span.kind for span in spans})


def test_a_program_reshards_by_collectives(python: RemotePython) -> None:
    assert python.call(kinds_of_work) == ["call"]  # no send or receive: the devices exchange the data


def donated_to_a_program() -> tuple[bool, bool]:
    import atoll

    def reshard(x: Any) -> Any:
        return jax.device_put(x, on(0, "y")) + 1

    kept, given_up = made("float32", (8, 16)), made("float32", (8, 16))
    atoll.program(reshard)(kept)
    atoll.program(reshard, donate_argnums=0)(given_up)
    return kept.is_deleted(), given_up.is_deleted()


def test_what_is_donated_to_a_program_that_reshards_it_is_gone(python: RemotePython) -> None:
    assert python.call(donated_to_a_program) == (False, True)


def put_small_with_guards(first: int) -> tuple[list[Any], bool]:
    x = made("float32", (8, 8))
    with jax.transfer_guard_device_to_host("disallow_explicit"), jax.transfer_guard_host_to_device("disallow_explicit"):
        y = jax.device_put(x, on(first, "y"))
    read = x._npy_value is not None
    return [np.asarray(shard.data) for shard in y.addressable_shards], read


@pytest.mark.parametrize("first", [0, 4], ids=["same island", "other island"])
def test_a_small_array_gets_another_sharding_if_transfers_are_forbidden(python: RemotePython, first: int) -> None:
    pieces, read = python.call(put_small_with_guards, first)
    assert not read
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert_same(pieces, [values[:4], values[4:], values[:4], values[4:]])


DTYPES_OF_64_BITS = ("int64", "float64", "complex128")


def put_64_bits(rows: int) -> list[Any]:
    """Reshard 64-bit arrays while 64-bit types are disabled. Return their types and values."""
    values = np.arange(rows * 512).reshape(rows, 512) + 2**40
    with jax.enable_x64(True):
        arrays = [jax.device_put(values.astype(dtype), on(0, "x", "y")) for dtype in DTYPES_OF_64_BITS]
    with jax.enable_x64(False):
        made = [jax.device_put(each, on(first, "y")) for first in (0, 4) for each in arrays]
        made += jax.device_put(arrays * 2, on(4, "y"))
    return [(each.dtype.name, [np.asarray(shard.data) for shard in each.addressable_shards]) for each in made]


@pytest.mark.parametrize("rows", [LARGE_BYTES // 4096, 4], ids=["large", "small"])
def test_an_array_of_64_bits_keeps_them_while_they_are_switched_off(python: RemotePython, rows: int) -> None:
    # Stock JAX truncates the values to 32 bits, in arrays whose type has 64 bits.
    upper, lower = np.split(np.arange(rows * 512).reshape(rows, 512) + 2**40, 2)
    pieces = [upper, lower, upper, lower]
    expected = [(dtype, [piece.astype(dtype) for piece in pieces]) for dtype in DTYPES_OF_64_BITS * 4]
    assert_same(python.call(put_64_bits, rows), expected)


# ---- partial sums


needs_shards = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 copies no arrays of partial sums, and gives no access to shards"
)


def partial_sums(scale: int, axes: int, across: bool) -> jax.Array:
    """Return an array whose sum over the mesh's axis x is a matrix, on devices of one island or of both."""
    devices = np.array(jax.devices())[[0, 4, 1, 5] if across else [0, 1, 2, 3]]
    mesh = Mesh(devices.reshape((2, 2)[:axes] if axes == 2 else (4,)), ("x", "y")[:axes], (AxisType.Explicit,) * axes)
    rows = "y" if axes == 2 else None
    with jax.set_mesh(mesh):
        left = jax.device_put(
            scale * np.arange(16.0, dtype=np.float32).reshape(4, 4), NamedSharding(mesh, P(rows, "x"))
        )
        right = jax.device_put(np.arange(8.0, dtype=np.float32).reshape(4, 2), NamedSharding(mesh, P("x", None)))
        return jnp.dot(left, right, out_sharding=NamedSharding(mesh, P(rows, unreduced={"x"})))


def shards_of(x: jax.Array) -> list[Any]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def copied_partial_sums(axes: int, across: bool, to_cpu: bool) -> tuple[list[Any], list[Any]]:
    """Return the shards of several arrays of partial sums, and of their copies on other devices."""
    xs = [partial_sums(scale, axes, across) for scale in range(1, 7)]
    mesh = xs[0].sharding.mesh
    devices = jax.local_devices(backend="cpu")[:4] if to_cpu else jax.devices()[4:]
    other = Mesh(np.array(devices).reshape(mesh.devices.shape), mesh.axis_names, mesh.axis_types)
    copies = jax.device_put(xs, NamedSharding(other, xs[0].sharding.spec))
    return [shards_of(x) for x in xs], [shards_of(x) for x in copies]


def value_of_partial_sums(axes: int, across: bool) -> None:
    np.asarray(partial_sums(1, axes, across))


@needs_shards
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("across", [False, True])
def test_partial_sums_are_copied_shard_by_shard(python: RemotePython, axes: int, across: bool) -> None:
    own, copies = python.call(copied_partial_sums, axes, across, False)
    assert_same(copies, own)


@needs_shards
def test_partial_sums_are_copied_to_other_clients_shard_by_shard(start_python: StartPython) -> None:
    python = start_python("1x1x4", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    for axes in (1, 2):
        own, copies = python.call(copied_partial_sums, axes, False, True)
        assert_same(copies, own)


@needs_shards
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("across", [False, True])
def test_an_array_of_partial_sums_has_no_value(python: RemotePython, axes: int, across: bool) -> None:
    with pytest.raises(RemoteError, match=r"where its shards are|UniqueIndexDomains"):
        python.call(value_of_partial_sums, axes, across)
