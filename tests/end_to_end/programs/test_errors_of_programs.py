"""Tests of programs that are invalid, fail, are released, or lose an island: each error names its cause, and the client
continues.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.end_to_end.programs.functions import host, nested
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.standing_cluster import StartCluster


def with_check(name: str, x: float) -> None:
    import atoll

    with getattr(jax, name)(True):
        atoll.program(lambda x: jnp.log(x))(x)


@pytest.mark.parametrize(("name", "x", "found"), [("debug_nans", -1.0, "nan"), ("debug_infs", 0.0, "inf")])
def test_forbidden_results_of_programs_are_found(python: RemotePython, name: str, x: float, found: str) -> None:
    with pytest.raises(RemoteError, match=rf"FloatingPointError: program .* returns {found}"):
        python.call(with_check, name, x)


def with_infs_after_a_program() -> None:
    import atoll

    invert = jax.jit(lambda x: 1 / x)
    invert(jnp.ones(2))
    atoll.program(lambda x: jax.jit(lambda x: x + 1)(x))(1.0)
    jax.config.update("jax_debug_infs", True)
    try:
        invert(jnp.zeros(2))
    finally:
        jax.config.update("jax_debug_infs", False)


def test_forbidden_results_of_jit_are_found_after_a_program(start_python: StartPython) -> None:
    python = start_python(ATOLL_ISLANDS="1x1x1")
    with pytest.raises(RemoteError, match=r"FloatingPointError: invalid value \(inf\)"):
        python.call(with_infs_after_a_program)


def keep_a_program() -> Any:
    import atoll

    far = jax.devices()[1]
    globals()["_kept"] = atoll.program(lambda x: jax.device_put(x, far) * 2.5 + jnp.arange(4))
    return call_it()


def call_it() -> Any:
    return host(globals()["_kept"](np.arange(4.0)))


def keep_without_constants() -> Any:
    """Keep two programs: one that is compiled ahead, and one that a loss is no reason to trace again."""
    import atoll

    far = jax.devices()[1]
    traced: list[str] = []

    def doubled(x: Any) -> Any:
        traced.append("doubled")
        return jax.jit(lambda x: x * 2)(jax.device_put(x, far))

    def tripled(x: Any) -> Any:
        traced.append("tripled")
        return jax.jit(lambda x: x * 3)(jax.device_put(x, far))

    ahead, lasting = atoll.program(doubled), atoll.program(tripled, retrace_after_loss=False)
    ahead.compile_ahead(np.arange(4.0))
    globals()["_lasting"] = ahead, lasting, traced
    return call_them()


def call_them() -> Any:
    *programs, traced = globals()["_lasting"]
    return [host(each(np.arange(4.0))) for each in programs], list(traced)


def test_a_program_runs_again_when_an_island_with_its_constants_is_back(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="2x1x1")
    client = start_python(ATOLL_ADDRESS=cluster.address)
    expected, lasting = client.call(keep_a_program), client.call(keep_without_constants)
    assert lasting[1] == ["doubled", "tripled"]
    before = cluster.worker(1)
    before.kill()
    cluster.until(lambda report: report["islands"][1]["hosts"][0]["pid"] not in (0, None, before.pid), 60.0)
    assert_same(client.call(call_it), expected)
    assert_same(client.call(call_them), lasting)


@functools.cache
def doubled() -> Any:
    """Return the compiled function of `submitted`."""
    x = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    return jax.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile()


def submitted(change: str) -> None:
    import msgspec
    from jax.extend.ifrt_programs import ifrt_programs as programs

    from atoll.ir.program import Call, HostToDevice, Program, Transfer
    from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
    from atoll.protocol.submission import MAGIC, Staging, Submission, encode

    devices = jax.devices()
    x = jax.device_put(np.arange(4, dtype=np.float32), devices[0])
    name = doubled().runtime_executable().fingerprint
    spec = ArraySpec("float32", (4,), Sharding((0,)))
    call = Call(0, (0,), (spec,), (0,))
    good = Program("p", (spec,), (call,), (1,))

    def nodes(*nodes: Any, **changes: Any) -> Program:
        return msgspec.structs.replace(good, nodes=nodes, **changes)

    def array(**changes: Any) -> Program:
        return msgspec.structs.replace(good, arguments=(msgspec.structs.replace(spec, **changes),))

    replace = msgspec.structs.replace
    far = ArraySpec("float32", (4,), Sharding((99,)))
    cut = Sharding((0, 1), Tiled((3,), (0, 1)))
    payloads: dict[str, Any] = {
        "good": Submission(good, (name,)),
        "garbage": MAGIC + b"\xff\x00",
        "empty": MAGIC,
        "version": Submission(good, (name,), 99),
        "function": Submission(good, (b"other",)),
        "no functions": Submission(good, ()),
        "negative function": Submission(nodes(replace(call, function=-1)), (name,)),
        "value": Submission(nodes(replace(call, inputs=(7,))), (name,)),
        "inputs": Submission(nodes(replace(call, inputs=(0, 0))), (name,)),
        "outputs": Submission(nodes(replace(call, outputs=())), (name,)),
        "output shape": Submission(nodes(replace(call, outputs=(replace(spec, shape=(5,)),))), (name,)),
        "completion": Submission(nodes(replace(call, completion=True)), (name,)),
        "donated twice": Submission(nodes(replace(call, donated=(0,)), replace(call, donated=(0,))), (name,)),
        "donated result": Submission(nodes(call, replace(call, inputs=(1,), donated=(0,)), results=(1, 2)), (name,)),
        "result twice": Submission(replace(good, results=(1, 1)), (name,)),
        "argument returned": Submission(replace(good, results=(0,)), (name,)),
        "feeds": Submission(replace(good, feeds=1), (name,)),
        "host data": Submission(nodes(HostToDevice((), (spec,))), (name,)),
        "copy": Submission(nodes(Transfer((0,), (spec,))), (name,)),
        "far": Submission(nodes(Transfer((0,), (far,), reshard=True)), (name,)),
        "cut": Submission(nodes(Transfer((0,), (replace(spec, sharding=cut),), reshard=True)), (name,)),
        "transfer shape": Submission(nodes(Transfer((0,), (replace(spec, shape=(3,)),), reshard=True)), (name,)),
        "dtype": Submission(array(dtype="float31"), (name,)),
        "token": Submission(array(dtype="token"), (name,)),
        "shape": Submission(array(shape=(-1,)), (name,)),
        "huge": Submission(array(shape=(1 << 40, 1 << 40)), (name,)),
        "wrong argument": Submission(array(shape=(8,)), (name,)),
        "no devices": Submission(array(sharding=Sharding((), Replicated())), (name,)),
        "layout": Submission(array(layout=(1,)), (name,)),
        "nothing": Submission(Program("p", (), (), ()), ()),
        "staging": Staging((99,)),
        "staging twice": Staging((0, 0)),
    }
    payload = payloads[change]
    data = payload if isinstance(payload, bytes) else encode(payload)
    client = devices[0].client
    loaded = client.compile_ifrt_program(programs.make_plugin_program(data), programs.make_plugin_compile_options())
    (result,) = loaded.execute_sharded([x]).consume_with_handlers([lambda arrays: arrays])
    del result
    other = jax.device_put(np.arange(5, dtype=np.float32), devices[0])
    loaded.execute_sharded([other]).consume_with_handlers([lambda arrays: arrays])[0][0].block_until_ready()


@functools.cache
def quadrupled() -> Any:
    import atoll

    far = jax.devices()[-1]
    return atoll.program(lambda x: jax.device_put(x * 2, far) * 2)


def call_another() -> Any:
    return host(quadrupled()(np.arange(4.0)))


BAD = (
    "garbage",
    "empty",
    "version",
    "function",
    "no functions",
    "negative function",
    "value",
    "inputs",
    "outputs",
    "output shape",
    "completion",
    "donated twice",
    "donated result",
    "result twice",
    "argument returned",
    "feeds",
    "host data",
    "copy",
    "far",
    "cut",
    "transfer shape",
    "dtype",
    "token",
    "shape",
    "wrong argument",
    "no devices",
    "layout",
    "nothing",
    "staging",
    "staging twice",
)  # fmt: skip


@pytest.mark.parametrize("change", BAD)
def test_an_invalid_program_is_an_invalid_argument(python: RemotePython, change: str) -> None:
    with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT"):
        python.call(submitted, change)
    np.testing.assert_array_equal(python.call(call_another), np.arange(4.0) * 4)


def test_a_program_with_too_large_arrays_exhausts_the_memory(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"RESOURCE_EXHAUSTED: .*out of memory"):
        python.call(submitted, "huge")
    assert python.call(nested)[4].shape == (4,)


def test_a_program_on_arguments_of_other_shapes_is_an_invalid_argument(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT.*takes float32\[4\].*got float32\[5\]"):
        python.call(submitted, "good")


def released() -> Any:
    """Return the results of programs whose functions the client has released in each possible way."""
    import gc

    import atoll

    results = []
    for i in range(3):
        program = atoll.program(lambda x, i=i: jax.jit(lambda x: x + i)(x) * 2)
        results.append(program(np.arange(4.0)))
        del program
        jax.clear_caches()
        gc.collect()
    return host(results)


def test_programs_and_their_functions_are_released_in_any_order(python: RemotePython) -> None:
    for i, result in enumerate(python.call(released)):
        np.testing.assert_array_equal(result, (np.arange(4.0) + i) * 2)
