"""Tests of arrays on Atoll's devices: their values are bitwise those of stock JAX.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same

# With this many float32 numbers, each quarter is sent through shared memory.
BIG = 1 << 18


def fetched(array: Any) -> np.ndarray[Any, Any]:
    """Return the contents of an array, read from its devices and not from a copy that JAX keeps."""
    return np.array(array)


def mesh_of(order: list[int], shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()
    return Mesh(np.array([devices[i] for i in order]).reshape(shape), names)


# ---- dtypes

DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


def numbers(dtype: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray[Any, Any]:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
    if kind.kind == "c":
        return (values + 2j * values).astype(kind)
    return (values * (1 if dtype == "bool" else -1 if dtype.startswith(("int", "bf", "float16")) else 1)).astype(kind)


def round_trip(dtype: str) -> Any:
    sent = numbers(dtype)
    mesh = mesh_of([0, 1, 2, 3], (2, 2), ("x", "y"))
    single = jax.device_put(sent, jax.devices()[1])
    sharded = jax.device_put(sent, NamedSharding(mesh, P("x", "y")))
    return fetched(single), fetched(sharded), [fetched(shard.data) for shard in sharded.addressable_shards]


def computed(dtype: str) -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    value = jax.device_put(numbers(dtype), NamedSharding(mesh, P("x")))
    out = jax.jit(lambda x: jnp.concatenate([x, x[::-1]]))(value)
    return fetched(out), fetched(jax.device_put(out, jax.devices()[2]))


# Each of these is sent and computed with like another one. `test_direct_reads` reads arrays of all dtypes.
SIMILAR = (
    *("int16", "int32", "uint16", "uint32", "uint64", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


def dtypes(*left_out: str) -> Any:
    """Parametrize a test with all dtypes except these. The suite leaves out similar ones."""
    return pytest.mark.parametrize(
        "dtype",
        [
            pytest.param(each, marks=[pytest.mark.thorough] if each in SIMILAR else [])
            for each in DTYPES
            if each not in left_out
        ],
    )


@dtypes()
def test_each_dtype_comes_back_as_it_was_sent(same_as_stock: Any, dtype: str) -> None:
    same_as_stock(round_trip, dtype)


# XLA's CPU backend computes wrong values of two-bit integers (jaxlib 0.10.2).
@dtypes("int2", "uint2")
def test_each_dtype_can_be_computed_with(same_as_stock: Any, dtype: str) -> None:
    same_as_stock(computed, dtype)


def strings() -> Any:
    sent = np.array([["a", "", "äöü"], ["longer than a short string can be", "\x00", "e"]], np.dtypes.StringDType())
    array = jax.device_put(sent, jax.devices()[0])
    return fetched(array), str(array.dtype), array.shape


def test_strings_come_back_as_they_were_sent(same_as_stock: Any) -> None:
    same_as_stock(strings)


# ---- shapes, and memory on the host


def odd_shapes() -> Any:
    device = jax.devices()[3]
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    out = []
    for shape in [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (7,)]:
        sent = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        array = jax.device_put(sent, device)
        out.append((fetched(array), fetched(array + 1), fetched(jax.device_put(sent, NamedSharding(mesh, P())))))
    empty = jax.device_put(np.zeros((0, 4), np.int32), NamedSharding(mesh, P(None, "x")))
    out.append((fetched(empty), fetched(empty.sum(0)), [s.data.shape for s in empty.addressable_shards]))
    return out


def test_scalars_and_arrays_of_no_elements_come_back(same_as_stock: Any) -> None:
    same_as_stock(odd_shapes)


def host_memory(kind: str, size: int) -> Any:
    base = np.arange(size * size, dtype=np.float32).reshape(size, size)
    views = {
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "backwards": base[::-1, ::-1],
        "backwards strided": base[::-2, 4::-1],
        "broadcast": np.broadcast_to(base[0], (5, size)),
        "read-only": np.frombuffer(base.tobytes(), np.float32).reshape(size, size),
        "one column": base[:, 2:3],
        "transposed 3d": base.reshape(2, size // 2, size).transpose(2, 0, 1),
    }
    mesh = mesh_of([0, 1], (2,), ("x",))
    view = views[kind]
    single = jax.device_put(view, jax.devices()[1])
    out = [fetched(single), fetched(single * 2)]
    if view.shape[0] % 2 == 0:
        out.append(fetched(jax.device_put(view, NamedSharding(mesh, P("x")))))
    return out


KINDS = [
    "fortran",
    "transposed",
    "strided",
    "backwards",
    "backwards strided",
    "broadcast",
    "read-only",
    "one column",
    "transposed 3d",
]


@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_of_numpy_can_be_sent(same_as_stock: Any, kind: str) -> None:
    same_as_stock(host_memory, kind, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_of_numpy_can_be_sent_through_shared_memory(same_as_stock: Any, kind: str) -> None:
    same_as_stock(host_memory, kind, 512)


def big_arrays() -> Any:
    sent = np.random.default_rng(0).standard_normal(BIG).astype(np.float32)
    mesh = mesh_of([3, 1, 0, 2], (4,), ("x",))
    single = jax.device_put(sent, jax.devices()[2])
    sharded = jax.device_put(sent, NamedSharding(mesh, P("x")))
    replicated = jax.device_put(sent, NamedSharding(mesh, P()))
    copied = jnp.array(sent)
    out = fetched(single), fetched(sharded), fetched(replicated), fetched(sharded * 2)
    sent[:] = 0
    return *out, fetched(copied)


def test_arrays_larger_than_the_shared_memory_threshold_come_back(same_as_stock: Any) -> None:
    same_as_stock(big_arrays)


def sent_again() -> Any:
    sent = np.zeros(BIG, np.float32)
    arrays = []
    for i in range(6):
        sent[:] = i
        arrays.append(jax.device_put(sent.copy(), jax.devices()[i % 4]))
    arrays += [jax.jit(lambda x: x + 1, donate_argnums=0)(array) for array in arrays[:3]]
    return [fetched(array) for array in arrays[3:]]


def test_arrays_that_are_written_over_do_not_share_memory_with_others(same_as_stock: Any) -> None:
    same_as_stock(sent_again)


# ---- PRNG keys


def random_keys(name: str) -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    key = jax.random.key(7, impl=name)
    keys = jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("x")))
    drawn = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    moved = jax.device_put(keys, jax.devices()[1])
    return [
        str(keys.dtype),
        fetched(jax.random.key_data(keys)),
        fetched(drawn),
        fetched(jax.random.key_data(moved[3])),
        [fetched(jax.random.key_data(shard.data)) for shard in keys.addressable_shards],
    ]


@pytest.mark.parametrize("name", ["threefry2x32", "rbg", pytest.param("unsafe_rbg", marks=pytest.mark.thorough)])
def test_typed_keys_are_split_placed_and_drawn_from(same_as_stock: Any, name: str) -> None:
    same_as_stock(random_keys, name)


# ---- placements


def placements(order: list[int]) -> Any:
    mesh = mesh_of(order, (2, 2), ("x", "y"))
    sent = np.arange(64, dtype=np.float32).reshape(8, 8)
    out: list[Any] = []
    for spec in (P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))):
        array = jax.device_put(sent, NamedSharding(mesh, spec))
        doubled = jax.jit(lambda x: x * 2)(array)
        total = jax.jit(lambda x: x.sum(0))(array)
        out += [fetched(array), fetched(doubled), fetched(total)]
        for each in (array, doubled):
            out.append([(s.device.id, str(s.index), s.replica_id, fetched(s.data)) for s in each.addressable_shards])
    return out


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 1, 2, 3], id="sorted", marks=pytest.mark.thorough),
        pytest.param([3, 2, 1, 0], id="reversed", marks=pytest.mark.thorough),
        pytest.param([2, 0, 3, 1], id="permuted"),
    ],
)
def test_shards_lie_where_the_mesh_says(same_as_stock: Any, order: list[int]) -> None:
    same_as_stock(placements, order)


def odd_numbers_of_devices() -> Any:
    mesh = mesh_of([3, 0, 2], (3,), ("x",))
    array = jax.device_put(np.arange(9.0), NamedSharding(mesh, P("x")))
    inside = jax.jit(lambda x: jax.lax.with_sharding_constraint(x[:7], NamedSharding(mesh, P("x"))).sum())(array)
    return fetched(array), fetched(jnp.cumsum(array)), fetched(inside)


def test_a_mesh_may_take_some_of_the_devices_and_cut_unevenly(same_as_stock: Any) -> None:
    same_as_stock(odd_numbers_of_devices)


def several_meshes() -> Any:
    wide = mesh_of([0, 1, 2, 3], (4,), ("a",))
    left, right = mesh_of([1, 0], (2,), ("b",)), mesh_of([2, 3], (2,), ("c",))
    start = jax.device_put(np.arange(24.0).reshape(4, 6), NamedSharding(wide, P("a")))
    on_left = jax.device_put(start, NamedSharding(left, P(None, "b")))
    on_right = jax.device_put(jnp.sin(on_left), NamedSharding(right, P("c")))
    product = jax.jit(lambda x: x * 2 + 1)(on_right)
    back = jax.device_put(product, NamedSharding(wide, P("a", None)))
    return fetched(on_left), fetched(product), fetched(back), fetched(back + start)


def test_arrays_move_between_meshes_of_one_script(same_as_stock: Any) -> None:
    same_as_stock(several_meshes)


def made_by_hand() -> Any:
    mesh = mesh_of([1, 3, 0, 2], (4,), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    whole = np.arange(12, dtype=np.int16).reshape(4, 3)
    called = jax.make_array_from_callback((4, 3), sharding, lambda index: whole[index])
    singles = [jax.device_put(whole[i : i + 1], device) for i, device in enumerate(mesh.devices.flat)]
    assembled = jax.make_array_from_single_device_arrays((4, 3), sharding, singles)
    replicated = jax.make_array_from_single_device_arrays(
        (3,), NamedSharding(mesh, P()), [jax.device_put(whole[2], device) for device in mesh.devices.flat]
    )
    local = jax.make_array_from_process_local_data(sharding, whole)
    return [fetched(a) for a in (called, assembled, replicated, local, assembled + called)]


def test_arrays_can_be_made_shard_by_shard(same_as_stock: Any) -> None:
    same_as_stock(made_by_hand)


def mapped() -> Any:
    rows = np.arange(8.0).reshape(4, 2)
    sums = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[::-1])(rows)
    return fetched(sums), fetched(sums[2]), [fetched(s.data) for s in sums.addressable_shards]


def test_pmap_gives_and_takes_arrays(same_as_stock: Any) -> None:
    same_as_stock(mapped)


# ---- memories and layouts


def memory_kinds() -> Any:
    device = jax.devices()[1]
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    sent = np.arange(8, dtype=np.float32)
    out: list[Any] = [sorted(m.kind for m in device.addressable_memories()), device.default_memory().kind]
    for kind in out[0]:
        single = jax.device_put(sent, SingleDeviceSharding(device, memory_kind=kind))
        sharded = jax.device_put(sent, NamedSharding(mesh, P("x"), memory_kind=kind))
        back = jax.device_put(sharded, NamedSharding(mesh, P("x")))
        out += [
            (fetched(single), single.sharding.memory_kind),
            (fetched(sharded), sharded.sharding.memory_kind),
            (fetched(back), back.sharding.memory_kind),
        ]
    host = NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    offloaded = jax.jit(lambda x: x * 3, out_shardings=host)(jax.device_put(sent, NamedSharding(mesh, P("x"))))
    small = jax.device_put(sent, NamedSharding(Mesh(mesh.devices[:1], ("x",)), P(), memory_kind="pinned_host"))
    copied = jax.device_put(small, NamedSharding(mesh, P(), memory_kind="pinned_host"))  # to more devices
    kinds = [shard.data.sharding.memory_kind for shard in copied.addressable_shards]
    return [*out, fetched(offloaded), offloaded.sharding.memory_kind, fetched(copied), kinds]


def test_arrays_live_in_each_kind_of_memory(same_as_stock: Any) -> None:
    same_as_stock(memory_kinds)


def layouts() -> Any:
    device = jax.devices()[0]
    sent = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    out: list[Any] = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        format_ = Format(Layout(order), SingleDeviceSharding(device))
        array = jax.device_put(sent, format_)
        compiled = jax.jit(lambda x: x * 2, in_shardings=format_, out_shardings=format_).lower(array).compile()
        result = compiled(array)
        out += [
            array.format.layout.major_to_minor,
            fetched(array),
            result.format.layout.major_to_minor,
            fetched(result),
            fetched(jax.device_put(result, device)),
        ]
    return out


def test_arrays_have_the_layout_that_was_asked_for(same_as_stock: Any) -> None:
    same_as_stock(layouts)


# ---- deletion of arrays


def donated() -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    given = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    kept = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    out = jax.jit(lambda x, y: x + y, donate_argnums=0)(given, kept)
    moved = jax.device_put(kept, jax.devices()[0], donate=True)
    return given.is_deleted(), kept.is_deleted(), moved.is_deleted(), fetched(out), fetched(moved)


def test_a_donated_array_is_deleted_and_its_result_is_not(same_as_stock: Any) -> None:
    same_as_stock(donated)


def donated_to_itself() -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    out = []
    for sharding in (NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[1])):
        given = jax.device_put(np.arange(8.0), sharding)
        same, *others = jax.device_put([given, *(given + i for i in range(5))], sharding, donate=True)
        out += [same is given, given.is_deleted(), fetched(given), fetched(same), *map(fetched, others)]
    uncommitted = jnp.arange(8.0)
    committed = jax.device_put(uncommitted, uncommitted.sharding, donate=True)
    return [*out, uncommitted.is_deleted(), committed.committed, fetched(uncommitted), fetched(committed)]


def test_an_array_that_is_donated_to_its_own_sharding_remains(same_as_stock: Any) -> None:
    same_as_stock(donated_to_itself)


def donated_while_read() -> Any:
    sent = np.arange(BIG, dtype=np.float32)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    out = []
    array = jax.device_put(sent, jax.devices()[0])
    for _ in range(5):
        array.copy_to_host_async()
        following = step(array)
        out.append(np.array(following))
        array = following
    return out


def test_an_array_may_be_donated_while_its_contents_are_on_their_way(same_as_stock: Any) -> None:
    same_as_stock(donated_while_read)


def read_of_a_donated_array() -> Any:
    array = jax.device_put(np.arange(BIG, dtype=np.float32), jax.devices()[0])
    array.copy_to_host_async()
    for _ in range(3):
        following = jax.jit(lambda x: x * 2, donate_argnums=0)(array + 0)
    return np.array(array), np.array(following)


def test_a_pending_read_sees_the_contents_from_before(same_as_stock: Any) -> None:
    same_as_stock(read_of_a_donated_array)


def deleted() -> Any:
    array = jnp.arange(4.0) + 0
    copy = jax.device_put(array, jax.devices()[1])
    array.delete()
    try:
        array + 1
    except RuntimeError as error:
        return array.is_deleted(), copy.is_deleted(), fetched(copy), str(error)
    raise AssertionError("a deleted array was used")


def test_a_deleted_array_cannot_be_used_and_its_copies_can(same_as_stock: Any) -> None:
    same_as_stock(deleted)


def deleted_parts() -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    whole = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    parts = [shard.data for shard in whole.addressable_shards]
    whole.delete()
    return [part.is_deleted() for part in parts]


def test_the_shards_of_a_deleted_array_are_deleted(same_as_stock: Any) -> None:
    same_as_stock(deleted_parts)


def many() -> Any:
    arrays = [jax.device_put(np.float32(i), jax.devices()[i % 4]) + 1 for i in range(200)]
    jax.block_until_ready(arrays)
    live = {id(array) for array in jax.live_arrays()}
    return all(id(array) in live for array in arrays), [fetched(array) for array in arrays[:10]]


def test_many_arrays_can_be_waited_for_at_once(same_as_stock: Any) -> None:
    same_as_stock(many)


# ---- sizes


def too_large(exponent: int) -> list[str]:
    """Return the status codes of the errors if arrays have 2**exponent bytes."""
    count = 1 << exponent
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    cut, whole = (NamedSharding(mesh, P(each)) for each in ("x", None))
    calls: list[Callable[[], Any]] = [
        lambda: jnp.zeros(count, jnp.int8),
        lambda: jnp.zeros(count, jnp.int8, device=cut),
        lambda: jnp.zeros(count, jnp.int8, device=whole),
        lambda: jnp.tile(jnp.zeros(4, jnp.int8), count // 4),
        lambda: jax.device_put(np.broadcast_to(np.int8(1), count)),
        lambda: jax.device_put(np.broadcast_to(np.int8(1), count), cut),
        lambda: jax.jit(lambda x: jnp.broadcast_to(x, count))(jnp.int8(1)),
        lambda: jax.jit(lambda x: jnp.broadcast_to(x, count), out_shardings=cut)(jnp.int8(1)),
        lambda: jax.jit(lambda x: [jnp.broadcast_to(x, count // 16) + i for i in range(16)])(jnp.int8(1)),
        lambda: jax.jit(lambda x: jnp.sort(jnp.broadcast_to(x, count) * x)[5])(jnp.int8(1)),
    ]
    found = []
    for call in calls:
        try:
            found.append(str(jax.block_until_ready(call())))
        except jax.errors.JaxRuntimeError as error:
            found.append(str(error).partition(":")[0])
    return [*found, str(jnp.ones(3).sum())]


@pytest.mark.parametrize(
    "exponent", [44, *(pytest.param(each, marks=pytest.mark.thorough) for each in (50, 56)), 60, 61, 62]
)
def test_arrays_that_are_too_large_exhaust_the_memory(same_as_stock: Any, exponent: int) -> None:
    same_as_stock(too_large, exponent)


# ---- islands


def between_islands() -> Any:
    left, right = mesh_of([0, 1], (2,), ("x",)), mesh_of([3, 2], (2,), ("x",))
    sent = np.arange(BIG, dtype=np.float32).reshape(64, -1)
    here = jax.device_put(sent, NamedSharding(left, P("x")))
    there = jax.device_put(here, NamedSharding(right, P(None, "x")))
    replicas = jax.device_put(there, NamedSharding(left, P()))
    single = jax.device_put(here, jax.devices()[3])
    both = jax.device_put(sent, NamedSharding(mesh_of([0, 1, 2, 3], (4,), ("x",)), P("x")))
    donated = jax.device_put(there * 1, NamedSharding(left, P("x")), donate=True)
    keys = jax.device_put(jax.random.split(jax.random.key(1), 4), NamedSharding(right, P("x")))
    return [
        *(fetched(a) for a in (there, replicas, single, both, donated, there + 1, jax.random.key_data(keys))),
        [(s.device.id, fetched(s.data)) for s in both.addressable_shards],
    ]


def test_arrays_move_between_islands(two_islands_python: RemotePython) -> None:
    assert_same(two_islands_python.call(between_islands), between_islands())


def small_dtype_between_islands(dtype: str) -> Any:
    sent = numbers(dtype)
    here = jax.device_put(sent, NamedSharding(mesh_of([0, 1], (2,), ("x",)), P("x")))
    return fetched(jax.device_put(here, NamedSharding(mesh_of([2, 3], (2,), ("x",)), P(None, "x"))))


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint2", "float8_e4m3fn", "float4_e2m1fn", "bfloat16"])
def test_each_kind_of_dtype_moves_between_islands(two_islands_python: RemotePython, dtype: str) -> None:
    assert_same(two_islands_python.call(small_dtype_between_islands, dtype), small_dtype_between_islands(dtype))


def copies_of_what_was_computed() -> Any:
    sharding = NamedSharding(mesh_of([0, 1, 2, 3], (4,), ("x",)), P("x"))
    x = jax.jit(lambda x: x + 1)(jax.device_put(np.arange(8.0), sharding))
    x.copy_to_host_async()
    copy = jax.device_put(x, sharding, may_alias=False)
    return fetched(copy), fetched(jax.jit(lambda x: x * 2, donate_argnums=0)(x))


def test_what_a_computation_over_hosts_has_made_is_copied(two_hosts_python: RemotePython) -> None:
    assert_same(two_hosts_python.call(copies_of_what_was_computed), copies_of_what_was_computed())


def jit_over_two_islands() -> Any:
    mesh = mesh_of([0, 1, 2, 3], (4,), ("x",))
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("x")))
    return fetched(jax.jit(lambda x: x.sum())(array))


def test_one_jit_runs_on_two_islands(two_islands_python: RemotePython) -> None:
    assert_same(two_islands_python.call(jit_over_two_islands), jit_over_two_islands())
    assert_same(two_islands_python.call(between_islands), between_islands())
