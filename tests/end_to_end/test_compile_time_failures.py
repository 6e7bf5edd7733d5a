"""Tests of compilations that wait for a client that sends false replies, ends, or never replies: others are not
affected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 30.0
BACK_SECONDS = 300.0

entered = threading.Semaphore(0)
partitions: list[Any] = []


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of one host with two devices."""
    return start_cluster(islands="1x1x2")


@pytest.fixture(scope="module")
def user(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    return start_python(ATOLL_ADDRESS=standing.address)


# ---- functions of users


def sharded() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    return jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2), NamedSharding(mesh, P("x")))


def partitioned(part: Callable[..., Any] | None = None) -> Callable[[jax.Array], jax.Array]:
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        partitions.append(result)
        return mesh, part or (lambda x: x * 2), arguments[0].sharding, (arguments[0].sharding,)

    doubled.def_partition(partition, sharding_rule="i j -> i j")
    return jax.jit(doubled)


def doubles() -> float:
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("x",))):
        return float(partitioned()(sharded()).sum())


def computes(seed: int) -> float:
    """Run a program that was never compiled before."""
    return float(jax.jit(lambda x: x + seed)(sharded()).sum())


def sit_while_compiling(count: int) -> None:
    """Start this many compilations whose callbacks do not return."""

    def wait(sharding: Any) -> None:
        entered.release()
        time.sleep(1000)

    for number in range(count):
        step = jax.jit(lambda x, n=number: (jax.debug.inspect_array_sharding(x, callback=wait), x + n)[1])
        threading.Thread(target=step, args=(sharded(),), daemon=True).start()
    for _ in range(min(count, 4)):
        assert entered.acquire(timeout=SECONDS)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def lies(wrong: str) -> str:
    """Patch the client to send an invalid answer, which its own library does not check."""
    from atoll.client.jax_patches import compile_time_callbacks as patch

    def whole(*shape: int, dtype: Any = np.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def program(call: Callable[..., Any], *arguments: Any) -> bytes:
        from jax._src.interpreters import mlir

        from atoll.protocol.translation.xla_objects import portable_artifact

        return portable_artifact(
            mlir.module_to_bytecode(jax.jit(call, keep_unused=True).lower(*arguments).compiler_ir())
        )

    def sharding(devices: list[int], order: list[int]) -> bytes:
        from jax._src.lib import xla_client as xc

        proto = xc.OpSharding()
        proto.type = xc.OpSharding.Type.OTHER
        proto.tile_assignment_dimensions, proto.tile_assignment_devices = devices, order
        return bytes(proto.SerializeToString())

    def with_callback(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    answers: dict[str, dict[str, Any]] = {
        "no operands": {"operands": ()},
        "no result": {"result": None},
        "no sharding": {"result": b"\xff\xff"},
        "more devices": {"result": sharding([4, 1], [0, 1, 2, 3])},
        "a device twice": {"result": sharding([2, 1], [0, 0])},
        "another rank": {"result": sharding([2, 1, 1], [0, 1])},
        "no program": {"program": b"nothing"},
        "more parameters": {"program": program(lambda x, y: x, whole(2, 2), whole(2, 2))},
        "another type": {"program": program(lambda x: x, whole(2, 2, dtype=np.int32))},
        "another shape": {"program": program(lambda x: x[:1], whole(2, 2))},
        "a callback": {"program": program(with_callback, whole(2, 2))},
    }
    honest = patch._partitioning

    def lying(key: bytes, kept: Any) -> Any:
        decide = honest(key, kept)
        return lambda call: msgspec.structs.replace(decide(call), **answers[wrong])

    patch._partitioning = lying
    try:
        return error_of(doubles)
    finally:
        patch._partitioning = honest


def announces(text: str) -> str:
    """Compile a program whose text announces these keys."""
    from jax._src import compiler

    from atoll.protocol.callbacks import COMPILE_CALLS_OPTION

    original = compiler.backend_compile_and_load.__wrapped__

    def lie(backend: Any, module: Any, devices: Any, options: Any, *others: Any) -> Any:
        options.env_option_overrides = [(COMPILE_CALLS_OPTION, text)] if text else []
        return original(backend, module, devices, options, *others)

    before, compiler.backend_compile_and_load = compiler.backend_compile_and_load, lie
    try:
        return error_of(doubles)
    finally:
        compiler.backend_compile_and_load = before


def keeps_a_function() -> float:
    global kept
    kept = partitioned()
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("x",))):
        return float(kept(sharded()).sum())


def calls_it_again() -> tuple[float, int]:
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        try:
            with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("x",))):
                return float(kept(sharded()).sum()), len(partitions)
        except jax.errors.JaxRuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


kept: Any = None


# ---- the tests


@pytest.mark.parametrize(
    "wrong",
    [
        "no operands",
        "no result",
        "no sharding",
        "more devices",
        "a device twice",
        "another rank",
        "no program",
        "more parameters",
        "another type",
        "another shape",
        "a callback",
    ],
)
def test_a_wrong_answer_fails_its_compilation_alone(user: RemotePython, standing: StandingCluster, wrong: str) -> None:
    worker = standing.worker(0).pid
    assert user.call(lies, wrong)
    assert user.call(doubles) == 56.0
    assert standing.worker(0).pid == worker


@pytest.mark.parametrize("text", ["", "1:aa", "1:"])
def test_a_key_that_was_not_announced_is_refused_with_advice(user: RemotePython, text: str) -> None:
    assert "custom_partitioning" in user.call(announces, text)
    assert user.call(doubles) == 56.0


@pytest.mark.parametrize("text", ["x:aa", "1:xyz", "-1:aa", "1:aa,aa"])
def test_keys_that_cannot_be_read_are_refused(user: RemotePython, text: str) -> None:
    assert "invalid keys of callbacks" in user.call(announces, text)


def test_compilations_whose_client_never_answers_hold_up_nobody_else_and_end_with_it(
    standing: StandingCluster, start_python: StartPython, user: RemotePython
) -> None:
    doomed = start_python(ATOLL_ADDRESS=standing.address)
    doomed.call(sit_while_compiling, 6)
    for seed in range(3):
        assert user.call(computes, seed) == 28.0 + 8 * seed
    assert user.call(doubles) == 56.0
    sessions = len(standing.report()["sessions"])
    doomed.process.kill()
    standing.until(lambda report: len(report["sessions"]) < sessions, SECONDS)
    assert user.call(doubles) == 56.0


def test_a_worker_that_is_back_compiles_with_the_answers_that_there_were(
    standing: StandingCluster, start_python: StartPython
) -> None:
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert python.call(keeps_a_function) == 56.0
    standing.worker(0).kill()
    assert python.call(calls_it_again) == (56.0, 1)
