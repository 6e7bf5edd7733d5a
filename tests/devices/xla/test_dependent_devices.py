"""Which devices of a compiled program communicate, read from the programs of stock JAX and from lines of HLO."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.devices.compilers.compiler_messages import Parts
from atoll.devices.xla.collective_groups import communicating_parts

AXES = ("a", "b", "c")
SUBSETS = [axes for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)]
ROWS = P(("dcn", "ici"))


def cube() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)


def islands() -> Mesh:
    """Return a mesh of two islands of four devices."""
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dcn", "ici"))


def parts_of(compiled: Any, replicas: int = 1, partitions: int = 8) -> Parts:
    (module,) = compiled.runtime_executable().hlo_modules()
    return communicating_parts(module.to_string(), replicas, partitions)


def along(axes: tuple[str, ...]) -> Parts:
    """Return the sets of devices of the cube that differ only along these axes."""
    numbers = np.arange(8).reshape(2, 2, 2)
    chosen = [AXES.index(each) for each in axes]
    rows = np.moveaxis(numbers, chosen, range(-len(chosen), 0)).reshape(-1, 2 ** len(chosen))
    return tuple(sorted(tuple(sorted(row)) for row in rows.tolist()))


def share_a_part(parts: Parts, one: int, other: int) -> bool:
    return one == other or any(one in part and other in part for part in parts)


# ---- collectives that a program names

COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, axes: jax.lax.psum(x, axes),
    "pmax": lambda x, axes: jax.lax.pmax(x, axes),
    "all_gather": lambda x, axes: jax.lax.all_gather(x, axes, tiled=True).sum() + x,
    "psum_scatter": lambda x, axes: jax.lax.psum_scatter(x, axes, tiled=True).sum() + x,
    "all_to_all": lambda x, axes: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
}


@pytest.mark.parametrize("axes", SUBSETS, ids=["".join(each) for each in SUBSETS])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_along_axes_of_a_mesh_connects_the_devices_along_them(name: str, axes: tuple[str, ...]) -> None:
    function = jax.shard_map(
        lambda x: COLLECTIVES[name](x, axes), mesh=cube(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64,), np.float32, sharding=NamedSharding(cube(), P(AXES)))
    assert parts_of(jax.jit(function).lower(x).compile()) == along(axes)


def in_a_loop(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: body(y), x)


def while_small(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Communicate in the condition only."""
    return lambda x: jax.lax.while_loop(lambda y: body(y)[0] < 100, lambda y: y + 1, x)


def in_a_branch(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.cond(jax.lax.axis_index("a") >= 0, body, lambda y: y, x)


def in_a_switch_in_a_scan(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step(y: Any, number: Any) -> Any:
        return jax.lax.switch(number, [lambda z: z, lambda z: z * 2, body], y), None

    return lambda x: jax.lax.scan(step, x, np.arange(3))[0]


def in_a_gradient(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(body(jnp.sin(y))))(x)))


@pytest.mark.parametrize("within", [in_a_loop, while_small, in_a_branch, in_a_switch_in_a_scan, in_a_gradient, jax.jit])
def test_a_collective_is_found_in_every_computation_that_is_called(within: Callable[[Any], Any]) -> None:
    body = within(lambda y: jax.lax.psum(y, ("b", "c")) * 0.1)
    function = jax.shard_map(body, mesh=cube(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    x = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(cube(), P(AXES)))
    assert parts_of(jax.jit(function).lower(x).compile()) == along(("b", "c"))


def test_a_program_with_metadata_of_a_user_connects_the_same_devices() -> None:
    """XLA prints the values of such attributes unchanged, also quotation marks."""
    confusing = 'x", channel_id=1, use_global_device_ids=true, replica_groups={{0}}, is_host_transfer=true, y="'

    def body(x: Any) -> Any:
        with set_xla_metadata(note=confusing, json='{"replica_groups={{1}}": "\n"}'):
            return jax.lax.psum(x, ("a", "b"))

    function = jax.shard_map(body, mesh=cube(), in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    x = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(cube(), P(AXES)))
    assert parts_of(jax.jit(function).lower(x).compile()) == along(("a", "b"))


# ---- collectives that XLA adds


def sharded(spec: P) -> NamedSharding:
    return NamedSharding(islands(), spec)


PARTITIONED: dict[str, tuple[Callable[[Any], Any], P, P]] = {
    "elementwise": (lambda x: jnp.sin(x) + 1, ROWS, ROWS),
    "sum of columns": (lambda x: x + x.sum(1, keepdims=True), P("dcn", "ici"), P("dcn", "ici")),
    "sum of rows": (lambda x: x + x.sum(0, keepdims=True), P("dcn", "ici"), P("dcn", "ici")),
    "sum of all": (lambda x: x + x.sum(), ROWS, ROWS),
    "mean of groups": (lambda x: x + x.reshape(2, 8, 16).mean(1).repeat(8, 0), ROWS, ROWS),
    "replicated over islands": (lambda x: x * 2, P(None, "ici"), P(None, "ici")),
    "replicated result": (lambda x: x * 2, ROWS, P()),
    "transposed": (lambda x: x.T, P("dcn", "ici"), P("dcn", "ici")),
    "reversed rows": (lambda x: x[::-1], ROWS, ROWS),
    "rolled rows": (lambda x: jnp.roll(x, 1, 0), ROWS, ROWS),
    "rolled columns": (lambda x: jnp.roll(x, 1, 1), P("dcn", "ici"), P("dcn", "ici")),
    "sorted rows": (lambda x: jnp.sort(x, 0), ROWS, ROWS),
    "sorted columns": (lambda x: jnp.sort(x, 1), P("dcn", "ici"), P("dcn", "ici")),
    "largest of columns": (lambda x: jax.lax.top_k(x, 3)[0], P("dcn", "ici"), P("dcn", None)),
    "cumulative": (lambda x: jnp.cumsum(x, 0), ROWS, ROWS),
    "product": (lambda x: x @ x.T, P("dcn", "ici"), P("dcn", "ici")),
    "convolved": (lambda x: jax.vmap(lambda c: jnp.convolve(c, np.ones(3), "same"), 1, 1)(x), ROWS, ROWS),
    "transformed": (lambda x: jnp.fft.fft(x, axis=0).real, ROWS, ROWS),
    "gathered": (lambda x: x[(jnp.arange(16) * 5) % 16], ROWS, ROWS),
    "scattered": (lambda x: jnp.zeros_like(x).at[(jnp.arange(16) * 5) % 16].add(x), ROWS, ROWS),
    "a slice": (lambda x: x + jax.lax.dynamic_slice_in_dim(x, 3, 1, 0), ROWS, ROWS),
    "a shifted half": (lambda x: x.at[:8].add(x[8:]), ROWS, ROWS),
}


@pytest.mark.parametrize("name", PARTITIONED)
def test_devices_whose_results_depend_on_one_another_are_in_one_set(name: str) -> None:
    """Change the argument's shard on each device, and see on which devices the result changes."""
    function, before, after = PARTITIONED[name]
    compiled = (
        jax.jit(function, out_shardings=sharded(after))
        .lower(jax.ShapeDtypeStruct((16, 16), np.float32, sharding=sharded(before)))
        .compile()
    )
    parts = parts_of(compiled)
    base = np.random.default_rng(1).random((16, 16), np.float32)
    places = sharded(before).devices_indices_map((16, 16))
    devices = list(islands().devices.flat)

    def shards(content: Any) -> list[bytes]:
        found = compiled(jax.device_put(content, sharded(before))).addressable_shards
        return [np.asarray(each.data).tobytes() for each in sorted(found, key=lambda each: devices.index(each.device))]

    first = shards(base)
    for source, device in enumerate(devices):
        changed = base.copy()
        changed[places[device]] += 5
        for target, (one, other) in enumerate(zip(first, shards(changed), strict=True)):
            owners = [number for number, each in enumerate(devices) if places[each] == places[device]]
            assert one == other or any(share_a_part(parts, owner, target) for owner in owners), (source, target)
    if name in ("elementwise", "replicated over islands"):
        assert parts == ()
    if name == "sum of columns":
        assert parts == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_replicas_communicate_as_those_of_a_pmap() -> None:
    function = jax.pmap(
        lambda x: x + jax.lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), axis_name="i"
    )
    compiled = function.lower(np.arange(8.0, dtype=np.float32)).compile()
    assert parts_of(compiled) == ((0, 1, 2, 3), (4, 5, 6, 7))
    (module,) = compiled.runtime_executable().hlo_modules()
    assert module is not None


# ---- lines of HLO


def parts(line: str, replicas: int, partitions: int) -> Parts:
    text = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  %p = f32[4]{{0}} parameter(0)\n  {line}\n}}\n"
    return communicating_parts(text, replicas, partitions)


ALL_OF_8 = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("attributes", "replicas", "partitions", "expected"),
    [
        # Without a channel: replicas, in each partition.
        ("replica_groups={{0,1}}", 2, 4, ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups={}", 8, 1, ALL_OF_8),
        ("replica_groups={}", 1, 8, ()),
        ("replica_groups={{0,1},{2,3}}", 4, 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        # With a channel: these replicas, in all partitions.
        ("channel_id=1, replica_groups={{0},{1}}", 2, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("channel_id=1, replica_groups={{0,1}}", 2, 4, ALL_OF_8),
        ("channel_id=1, replica_groups={}", 1, 8, ALL_OF_8),
        # With numbers of devices.
        ("channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true", 1, 8, along(("b", "c"))),
        ("channel_id=1, replica_groups={{0,5}}, use_global_device_ids=true", 2, 4, ((0, 5),)),
        ("channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true", 1, 8, along(("b", "c"))),
        ("channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true", 1, 8, along(("a",))),
        ("channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), use_global_device_ids=true", 1, 8, along(("b",))),
        ("channel_id=1, replica_groups=[8,1]<=[8], use_global_device_ids=true", 1, 8, ()),
        # In forms that are not known, or with numbers that do not exist.
        ("channel_id=1, replica_groups=of_a_later_version(8), use_global_device_ids=true", 1, 8, ALL_OF_8),
        ("channel_id=1, replica_groups={{0,9}}, use_global_device_ids=true", 1, 8, ALL_OF_8),
    ],
)
def test_groups_are_replicas_or_partitions_or_devices(
    attributes: str, replicas: int, partitions: int, expected: Parts
) -> None:
    for operation in ("all-reduce", "all-reduce-start", "all-gather-start", "reduce-scatter"):
        line = f"%r = f32[4]{{0}} {operation}(f32[4]{{0}} %p), {attributes}, to_apply=%add"
        assert parts(line, replicas, partitions) == expected


@pytest.mark.parametrize("operation", ["all-to-all", "collective-broadcast", "ragged-all-to-all"])
def test_other_collectives_with_a_channel_have_groups_of_partitions(operation: str) -> None:
    line = f"%r = (f32[2]{{0}}, f32[2]{{0}}) {operation}(f32[2]{{0}} %p, f32[2]{{0}} %p), "
    assert parts(line + "channel_id=1, replica_groups={{0,1},{2,3}}", 2, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert parts(line + "replica_groups={{0,1}}", 2, 4) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("operation", ["collective-permute", "collective-permute-start"])
def test_a_permutation_connects_all_partitions_or_replicas(operation: str) -> None:
    """On CPUs, all of them take part, whatever the pairs are."""
    line = f"%r = f32[4]{{0}} {operation}(f32[4]{{0}} %p), "
    assert parts(line + "channel_id=1, source_target_pairs={{0,1},{1,0}}", 1, 8) == ALL_OF_8
    assert parts(line + "channel_id=1, source_target_pairs={{0,1}}", 2, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert parts(line + "source_target_pairs={{0,1}}", 2, 4) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_send_connects_all_devices() -> None:
    """Also one to the host, since functions that call their client need a world in any case."""
    line = "%s = (f32[4]{0}, u32[], token[]) send(f32[4]{0} %p, token[] %t), channel_id=7"
    assert parts(line, 1, 8) == ALL_OF_8
    assert parts(f"{line}, is_host_transfer=true", 1, 8) == ALL_OF_8


def test_names_and_strings_that_look_like_collectives_are_none() -> None:
    line = (
        '%all-reduce.1 = f32[4]{0} add(f32[4]{0} %p, f32[4]{0} %p), metadata={op_name="x all-reduce(y), channel_id=1"}'
    )
    assert parts(line, 1, 8) == ()
