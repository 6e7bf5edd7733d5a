"""Which devices of a compiled program communicate: programs that XLA has compiled, and texts in other forms."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.devices.compilers.compiler_messages import Parts
from atoll.devices.xla.collective_groups import communicating_parts
from tests.forked_process import run

ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))  # on the mesh's axis "b"
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))  # on "a"
TWOS = ((0, 1), (2, 3), (4, 5), (6, 7))


PAIRS = [(0, 1), (1, 0)]
HALVES = [[0, 1], [2, 3]]
# Of each device's shard of an array of shape (8, 8), whose rows are distributed over all devices.
MANUAL: dict[str, tuple[Callable[..., Any], Parts]] = {
    "sum of two": (lambda x: x + 1, ()),
    "axis index": (lambda x: x * jax.lax.axis_index(("a", "b")), ()),
    "normal": (lambda x: x + jax.random.normal(jax.random.key(1), x.shape), ()),
    "bit generator": (lambda x: x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1], ()),
    "cholesky": (lambda x: jnp.linalg.cholesky(x.T @ x + jnp.eye(8)).sum(0, keepdims=True), ()),
    "sort and fft": (lambda x: jnp.sort(x) + jnp.fft.fft(x).real, ()),
    "top k": (lambda x: jax.lax.top_k(x, 8)[0], ()),
    "psum": (lambda x: x * 0 + jax.lax.psum(x.sum(), ("a", "b")), ALL),
    "psum over rows": (lambda x: x * 0 + jax.lax.psum(x.sum(), "b"), ROWS),
    "pmax over columns": (lambda x: x * 0 + jax.lax.pmax(x.max(), "a"), COLUMNS),
    "psum over both": (lambda x: x * 0 + jax.lax.psum(jax.lax.psum(x.sum(), "a"), "b"), ALL),
    "gather rows": (lambda x: x * 0 + jax.lax.all_gather(x, "b").sum(), ROWS),
    "gather columns": (lambda x: x * 0 + jax.lax.all_gather(x, "a").sum(), COLUMNS),
    "permute columns": (lambda x: jax.lax.ppermute(x, "a", PAIRS), ALL),
    "permute rows": (lambda x: jax.lax.ppermute(x, "b", PAIRS), ALL),
    "exchange rows": (lambda x: jax.lax.all_to_all(x, "b", 1, 1, tiled=True), ROWS),
    "exchange all": (lambda x: jax.lax.all_to_all(x, ("a", "b"), 1, 1, tiled=True), ALL),
    "scatter rows": (lambda x: x * 0 + jax.lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True).sum(), ROWS),
    "groups": (lambda x: x * 0 + jax.lax.psum(x.sum(), "b", axis_index_groups=HALVES), TWOS),
    "in fori": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + jax.lax.psum(y, "b"), x), ROWS),
    "in condition": (lambda x: jax.lax.while_loop(lambda y: jax.lax.pmax(y.max(), "a") < 3, jnp.exp, x), COLUMNS),
    "in cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.exp, lambda y: y + jax.lax.psum(y, "b"), x), ROWS),
    "switch": (lambda x: jax.lax.switch(x[0, 0].astype(int), [jnp.exp, jnp.sin], x), ()),
    "in scan": (lambda x: jax.lax.scan(lambda c, r: (c + jax.lax.psum(r, "b"), None), x[0], x)[0][None], ROWS),
    "in checkpoint": (lambda x: jax.checkpoint(lambda y: jnp.sin(y) + jax.lax.psum(y, "a"))(x), COLUMNS),
    # Nobody knows with whom the client's Python communicates.
    "callback": (lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), ALL),
}
# Of an array of shape (8, 8) that XLA partitions, with the shardings of its argument and of its result.
AUTOMATIC: dict[str, tuple[Callable[..., Any], Any, Any, Parts]] = {
    "constant": (lambda x: x * 2 + jnp.ones((8, 8)), ("a", "b"), ("a", "b"), ()),
    "iota": (lambda x: x + jnp.arange(64.0).reshape(8, 8), ("a", "b"), ("a", "b"), ()),
    "sum columns": (jnp.sum, ("a",), (), COLUMNS),
    "sum all": (jnp.sum, ("a", "b"), (), ALL),
    "sum of axis 0": (lambda x: x.sum(0), ("a", "b"), ("b",), COLUMNS),
    "sum of axis 1": (lambda x: x.sum(1), ("a", "b"), ("a",), ROWS),
    "product, with a permutation": (lambda x: x @ x.T, ("a", None), ("a", None), ALL),
    "transposed": (lambda x: x, ("a", "b"), ("b", "a"), ALL),
    "moved": (lambda x: x, ("a", None), (None, "a"), COLUMNS),
    "replicated": (lambda x: x, ("a", "b"), (), ALL),
    "divided": (lambda x: x, (), ("a", "b"), ()),
    "rolled in shards": (lambda x: jnp.roll(x, 1, 1), (("a", "b"),), (("a", "b"),), ()),
    "uniform": (lambda x: jax.random.uniform(jax.random.key(0), (8, 8)) + x, ("a", "b"), ("a", "b"), ()),
}
MAPPED: dict[str, tuple[Callable[..., Any], Parts]] = {
    "add": (lambda x: x + 1, ()),
    "psum": (lambda x: x + jax.lax.psum(x, "i"), ALL),
    "groups": (lambda x: x + jax.lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), ROWS),
    "permute": (lambda x: jax.lax.ppermute(x, "i", [(0, 4), (1, 5)]), ALL),
    "gather": (lambda x: x + jax.lax.all_gather(x, "i").sum(), ALL),
    "axis index": (lambda x: x + jax.lax.axis_index("i"), ()),
}


def loss(weights: Any, x: Any) -> Any:
    return jnp.sum((x @ weights) ** 2)


# The gradients of a loss by weights and by inputs, which are distributed over columns.
GRADIENTS: dict[str, tuple[int, Parts]] = {"weights": (0, COLUMNS), "inputs": (1, ())}
EXPECTED: dict[str, Parts] = {
    **{f"manual: {name}": expected for name, (_, expected) in MANUAL.items()},
    **{f"automatic: {name}": expected for name, (*_, expected) in AUTOMATIC.items()},
    **{f"mapped: {name}": expected for name, (_, expected) in MAPPED.items()},
    **{f"gradient: {name}": expected for name, (_, expected) in GRADIENTS.items()},
}


def compile_all() -> dict[str, Parts]:
    """Compile all programs for eight devices. Return the devices that communicate in each."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def array(*spec: Any) -> Any:
        return jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def parts(function: Any, *arguments: Any) -> Parts:
        (module,) = function.lower(*arguments).compile().runtime_executable().hlo_modules()
        replicas = 8 if "replica_count=8" in module.to_string() else 1
        return communicating_parts(module.to_string(), replicas, 8 // replicas)

    found: dict[str, Parts] = {}
    rows = PartitionSpec(("a", "b"))
    for name, (function, _) in MANUAL.items():
        mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        found[f"manual: {name}"] = parts(jax.jit(mapped), array(("a", "b")))
    for name, (function, before, after, _) in AUTOMATIC.items():
        sharding = NamedSharding(mesh, PartitionSpec(*after))
        found[f"automatic: {name}"] = parts(jax.jit(function, out_shardings=sharding), array(*before))
    for name, (function, _) in MAPPED.items():
        found[f"mapped: {name}"] = parts(jax.pmap(function, axis_name="i"), np.arange(8, dtype=np.float32))
    for name, (position, _) in GRADIENTS.items():
        found[f"gradient: {name}"] = parts(jax.jit(jax.grad(loss, position)), array(), array("a"))
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all()))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Run a child process, which has eight devices and compiles as users do, and return its answer."""
    directory = Path(__file__).parents[3]
    code = "import runpy; runpy.run_module('tests.devices.xla.test_collective_groups', run_name='__main__')"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": ""}
    child = run([sys.executable, "-c", code], cwd=directory, env=environment, timeout=600.0)
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED)
def test_devices_that_communicate_in_a_program(found: dict[str, Any], name: str):
    assert found[name] == [list(part) for part in EXPECTED[name]]


# ---- texts


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def reduction(attributes: str, result: str = "f32[8]{0}", operation: str = "all-reduce") -> str:
    return program(
        "%x = f32[8]{0} parameter(0)",
        f'ROOT %r = {result} {operation}(f32[8]{{0}} %x), {attributes}, metadata={{op_name="jit(f)/psum"}}',
    )


DEVICES = "channel_id=1, use_global_device_ids=true, to_apply=%add"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={}", ALL),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ALL),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ROWS),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups=[1,8]<=[8]", ALL),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("replica_groups=[4,2]<=[8]", TWOS),
        ("replica_groups=[8,1]<=[8]", ()),
        ("replica_groups=[2,4]<=[2,2,2]T(2,0,1)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", ALL),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ROWS),
        # Unknown forms, and groups that do not fit.
        ("replica_groups=mesh['a'=8] {'a':(3)4}", ALL),
        ("replica_groups=mesh['a'=8] {'a':(0)4}", ALL),
        ("replica_groups=mesh['a'=8] {'c'}", ALL),
        ("replica_groups=mesh['a'=16] {'a'}", ALL),
        ("replica_groups=[2,4]<=[9]", ALL),
        ("replica_groups=[2,4]<=[2,4]T(0,2)", ALL),
        ("replica_groups=[2,4]<=[2,4]T(0,0)", ALL),
        ("replica_groups=[1000000,1000000]<=[1000000000000]", ALL),
        ("replica_groups={{0,9}}", ALL),
        ("replica_groups=<new form>", ALL),
    ],
)
def test_forms_of_groups(groups: str, expected: Parts):
    assert communicating_parts(reduction(f"{groups}, {DEVICES}"), 1, 8) == expected


@pytest.mark.parametrize(
    ("operation", "attributes", "replicas", "partitions", "expected"),
    [
        # Without a channel: the same partition of these replicas.
        ("all-reduce", "replica_groups={{0,1}}, to_apply=%add", 2, 4, COLUMNS),
        ("all-reduce", "replica_groups={}, to_apply=%add", 2, 4, COLUMNS),
        ("all-reduce", "replica_groups={}, to_apply=%add", 1, 8, ()),
        ("all-to-all", "replica_groups={{0,1}}, dimensions={0}", 2, 4, COLUMNS),
        ("collective-permute", "source_target_pairs={{0,1}}", 2, 4, COLUMNS),
        # With a channel: all partitions of these replicas.
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}, to_apply=%add", 2, 4, ROWS),
        ("all-gather", "channel_id=1, replica_groups={{0,1}}, dimensions={0}", 2, 4, ALL),
        ("reduce-scatter", "channel_id=1, replica_groups={{0}}, dimensions={0}, to_apply=%add", 1, 8, ALL),
        # With a channel: these partitions of the same replica.
        ("all-to-all", "channel_id=1, replica_groups={{0,1},{2,3}}", 2, 4, TWOS),
        ("collective-permute", "channel_id=1, source_target_pairs={{0,3}}", 2, 4, ROWS),
        ("collective-broadcast", "channel_id=1, replica_groups={{0,1,2,3}}", 2, 4, ROWS),
        ("ragged-all-to-all", "channel_id=1, replica_groups={{0,1}}", 1, 8, ((0, 1),)),
        ("collective-permute", "channel_id=1, source_target_pairs={}", 1, 8, ALL),
        # These numbers are devices.
        ("all-reduce", "replica_groups={{0,5}}, channel_id=1, use_global_device_ids=true", 2, 4, ((0, 5),)),
        # Numbers that do not exist, unknown attributes, and no groups.
        ("all-reduce", "channel_id=1, to_apply=%add", 1, 8, ALL),
        ("all-reduce", "replica_groups={{0,2}}, to_apply=%add", 2, 4, ALL),
        ("all-reduce", "replica_groups={{0}}, channel_id=1, use_global_device_ids=true, mode=other", 1, 8, ALL),
        ("collective-permute", "channel_id=1", 1, 8, ALL),
    ],
)
def test_numbers_of_groups_are_replicas_partitions_or_devices(
    operation: str, attributes: str, replicas: int, partitions: int, expected: Parts
):
    text = reduction(attributes, operation=operation)
    assert communicating_parts(text, replicas, partitions) == expected


GROUPED = f"replica_groups={{{{0,1}}}}, {DEVICES}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"%r = f32[8]{{0:T(8,128)(2,1)}} all-reduce(%x), {GROUPED}", ((0, 1),)),
        (f"%r = (f32[8]{{0}}, /*index=5*/f32[2]{{0:T(128)}}) all-reduce(%x, %y), {GROUPED}", ((0, 1),)),
        (f"%r = ((f32[8]), (f32[8], (s32[], f32[2]{{0:T(8,128)(2,1)}}))) all-gather-start(%x), {GROUPED}", ((0, 1),)),
        ("%r = f32[8] all-gather-done((f32[8], f32[8]) %s)", ()),
        (f"%r = ((f32[8]), f32[8]) reduce-scatter-start(%x), {GROUPED}", ((0, 1),)),
        ("%r = ((f32[8]), f32[8]) reduce-scatter-update(%s)", ()),
        ("%s = ((f32[8]), f32[8], u32[]) async-start(%x), calls=%wrapped", ()),
        ("%s = f32[8] async-done(%x), calls=%wrapped", ()),
        ("%s = (f32[8], f32[8], u32[]) copy-start(%x)", ()),
        ('%s = f32[8] custom-call(%x), custom_call_target="lapack_spotrf_ffi"', ()),
        ('%s = f32[8] custom-call(%x), custom_call_target="atoll_loop_check", api_version=API_VERSION_TYPED_FFI', ()),
        ('%s = f32[8] custom-call(%x), custom_call_target="a_kernel"', ALL),
        ('%s = f32[8] custom-call(%x), custom_call_target="a", backend_config=", custom_call_target=\\"TopK\\""', ALL),
        ("%s = f32[8] custom-call(%x)", ALL),
        ('%s = (f32[8]) custom-call-start(%x), custom_call_target="a_kernel"', ALL),
        ("%s = (f32[8], u32[], token[]) send(%x, %t), channel_id=1", ALL),
        ("%s = (f32[8], u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true", ALL),
        ("%s = token[] send-done(%x), channel_id=1", ALL),
        ("%s = ((f32[8]), token[]) infeed(%t)", ALL),
        ("%s = token[] outfeed(%x, %t)", ALL),
        ("%s = f32[8] an-operation-of-a-later-version(%x)", ALL),
        ("%s = a form of a later version", ALL),
        ("%s = (f32[8]", ALL),
        ("%s = u32[] partition-id()", ()),
        ("%s = u32[] replica-id()", ()),
        ("%s = (u64[2], u32[8]) rng-bit-generator(%x), algorithm=rng_default", ()),
        ("%s = u64[2] rng-get-and-update-state(), delta=1", ()),
        # Strings of users.
        ('%s = f32[8] add(%x, %x), metadata={op_name="a = f32[8] all-reduce(" source_file="b\\" = f32[] send("}', ()),
        (f'%r = f32[8] all-reduce(%x), {GROUPED}, metadata={{op_name=", a=1 replica_groups={{}}"}}', ((0, 1),)),
        ('%s = f32[8] all-reduce(%x), frontend_attributes={a=", replica_groups={{0}}, channel_id=1"}', ALL),
        (f'%s = f32[8] all-reduce(%x), {GROUPED}, frontend_attributes={{a=", replica_groups={{}}"}}', ((0, 1),)),
    ],
)
def test_operations(line: str, expected: Parts):
    assert communicating_parts(program("%x = f32[8]{0} parameter(0)", line), 1, 8) == expected


def test_computations_that_others_call_are_read_as_well():
    called = f"%body (p: f32[8]) -> f32[8] {{\n  ROOT %r = f32[8] all-reduce(f32[8] %p), {GROUPED}\n}}\n\n"
    text = program("%x = f32[8]{0} parameter(0)", "ROOT %w = f32[8]{0} while(%x), condition=%c, body=%body")
    head, entry = text.split("\n\n", 1)
    assert communicating_parts(f"{head}\n\n{called}{entry}", 1, 8) == ((0, 1),)


def test_groups_that_share_a_device_are_one_set():
    lines = [f"%r{i} = f32[8] all-reduce(%x), replica_groups={{{{{i},{i + 1}}}}}, {DEVICES}" for i in (0, 2, 1, 5)]
    assert communicating_parts(program(*lines), 1, 8) == ((0, 1, 2, 3), (5, 6))


def test_a_text_without_operations_is_unknown():
    assert communicating_parts("HloModule jit_f", 1, 8) == ALL
    assert communicating_parts("HloModule jit_f", 1, 1) == ()


def test_a_program_of_one_device_has_no_sets():
    assert communicating_parts(reduction("replica_groups={}, to_apply=%add"), 1, 1) == ()
