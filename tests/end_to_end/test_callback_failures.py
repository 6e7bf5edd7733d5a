"""Tests of callbacks whose client or worker ends, and of clients that send false replies: nothing hangs or is left."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 30.0
BACK_SECONDS = 300.0
MANY = 300

entered = threading.Event()
go_on = threading.Event()
errors: queue.Queue[str] = queue.Queue()


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of one host with two devices."""
    return start_cluster(islands="1x1x2")


@pytest.fixture(scope="module")
def user(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    return start_python(ATOLL_ADDRESS=standing.address)


# ---- functions of users


def same_type(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def sits_in_a_callback() -> list[float]:
    """Run a callback on the first device that blocks until `release`."""

    def wait(x: Any) -> Any:
        entered.set()
        go_on.wait(SECONDS)
        return np.asarray(x)

    y = jax.jit(lambda x: jax.pure_callback(wait, same_type(x), x))(jnp.ones(2))
    return [float(z) for z in y]


def begin_to_sit() -> None:
    def sit() -> None:
        try:
            sits_in_a_callback()
        except jax.errors.JaxRuntimeError as error:
            errors.put(str(error))

    threading.Thread(target=sit, daemon=True).start()
    assert entered.wait(SECONDS)


def begin_many_ordered() -> None:
    """Launch a program with 300 ordered callbacks, one of which blocks."""

    def each(x: Any) -> Any:
        if x == MANY // 2:
            entered.set()
            go_on.wait(SECONDS)
        return np.asarray(x) + 1

    def launch() -> None:
        def call(_: Any, x: Any) -> Any:
            return io_callback(each, same_type(x), x, ordered=True)

        try:
            many = jax.jit(lambda x: jax.lax.fori_loop(0, MANY, call, x))
            kept["many"] = many(jnp.float32(0)).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            errors.put(str(error))

    reading.append(threading.Thread(target=launch, daemon=True))
    reading[0].start()
    assert entered.wait(SECONDS)


def what_many_gave() -> float:
    reading[0].join(SECONDS)
    return float(kept["many"])


def why_it_sits_no_more() -> str:
    return errors.get(timeout=SECONDS)


def release() -> None:
    go_on.set()


def computes(count: int) -> float:
    """Compute on the same device."""
    x, step = jnp.float32(0), jax.jit(lambda x: x + 1)
    for _ in range(count):
        x = step(x)
    return float(x)


def calls_back() -> list[float]:
    y = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x) + 1, same_type(x), x))(jnp.ones(2, jnp.float32))
    return [float(z) for z in y]


def calls_back_when_the_worker_is_back() -> list[float]:
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        try:
            return calls_back()
        except jax.errors.JaxRuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def leaves_its_channels(only_to_hosts: bool) -> str:
    """Close the client's connections for calls while a call is in progress."""
    from atoll.client.jax_patches import host_callbacks

    def leave(x: Any) -> Any:
        ours = host_callbacks.CLIENT_CHANNEL
        for each in [*ours.direct_channels, *(() if only_to_hosts else (ours.channel,))]:
            each.shut_down()
        return np.asarray(x)

    try:
        jax.jit(lambda x: jax.pure_callback(leave, same_type(x), x))(jnp.ones(2)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def answers_with(wrong: str) -> str:
    """Patch the client to send a result that no callable returns, which its own library does not check."""
    from atoll.client.jax_patches import client_channel
    from atoll.host_services.calls.call_messages import ArrayType, Call, Returned, encode

    answers = {
        "too few bytes": [b"\1" * 5],
        "garbage": [b"\xff" * 100],
        "a call": encode(Call(1, ())),
        "no result": encode(Returned(())),
        "another type": encode(Returned((ArrayType("int32", (2,), 8),)), [bytes(8)]),
        "another shape": encode(Returned((ArrayType("float32", (1,), 4),)), [bytes(4)]),
        "fewer bytes than its shape": encode(Returned((ArrayType("float32", (2,), 4),)), [bytes(4)]),
        "more bytes than there are": encode(Returned((ArrayType("float32", (2,), 8),))),
    }
    honest = client_channel._answer
    client_channel._answer = lambda callback, arguments: answers[wrong]
    try:
        calls_back()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    finally:
        client_channel._answer = honest
    return ""


kept: dict[str, jax.Array] = {}
reading: list[threading.Thread] = []


def keeps_an_array() -> None:
    kept["x"] = jnp.arange(4.0) + 1


def reads_what_it_kept() -> list[float]:
    return [float(x) for x in kept["x"]]


def raises_while_the_other_device_waits() -> list[str]:
    """Return the errors of a callback's result, of dependents that were launched before and after the failure, and of a
    later call.
    """
    mesh = jax.make_mesh((2,), ("x",))

    def refuse(x: Any) -> Any:
        if x[0] == 0:
            time.sleep(0.3)
            raise ValueError("not on the first device")
        return np.asarray(x)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    def step(x: Any) -> Any:
        return jax.lax.psum(jax.pure_callback(refuse, same_type(x), x), "x")

    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    zero, one = jax.device_put(np.arange(2.0), sharding), jax.device_put(np.arange(1.0, 3.0), sharding)
    result = step(zero)
    after = jax.jit(lambda x: x + 1)(result)
    output = []
    for read in (lambda: after, lambda: result, lambda: result + 1, lambda: step(one) * 10):
        try:
            output.append(str(np.asarray(read())))
        except jax.errors.JaxRuntimeError as error:
            output.append(str(error))
    return output


def reads_of_a_run_that_fails_on_the_other_device() -> list[str]:
    """Read the results of runs that fail, on a device whose own callback succeeds. Wait for one array before."""
    mesh = jax.make_mesh((2,), ("x",))

    def refuse(x: Any) -> Any:
        if x[0] == 0:
            time.sleep(0.05)
            raise ValueError("not on the first device")
        return np.asarray(x) + 100

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    def step(x: Any) -> Any:
        return jax.lax.psum(jax.pure_callback(refuse, same_type(x), x), "x")

    zero = jax.device_put(np.arange(2.0), jax.sharding.NamedSharding(mesh, jax.P("x")))
    dependent = jax.jit(lambda x: x + 1)
    output = []
    for _ in range(10):
        result = step(zero)
        for read in (lambda result=result: dependent(result), lambda result=result: result):
            try:
                output.append(str(np.asarray(read())))
            except jax.errors.JaxRuntimeError as error:
                output.append("failed" if "ValueError: not on the first device" in str(error) else str(error))
    return output


def donates_what_a_callback_reads() -> float:
    x = jax.device_put(jnp.ones(1 << 16), jax.devices()[0])

    def wait(x: Any) -> Any:
        entered.set()
        go_on.wait(SECONDS)
        return np.asarray(x)

    def read() -> None:
        kept["y"] = jax.jit(lambda x: jax.pure_callback(wait, same_type(x), x) + x)(x)

    reading.append(threading.Thread(target=read, daemon=True))
    reading[0].start()
    assert entered.wait(SECONDS)
    kept["z"] = jax.jit(lambda x: x * 3, donate_argnums=0)(x)
    return computes(20)


def reads_what_was_made_of_it() -> tuple[float, float]:
    reading[0].join(SECONDS)
    return float(kept["y"][0]), float(kept["z"][0])


def compiles_with(numbers: str) -> str:
    """Compile a program with one callback whose callables have these numbers of the client."""
    from jax._src import compiler

    original = compiler.backend_compile_and_load.__wrapped__

    def lie(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if host_callbacks:
            options.env_option_overrides = [("atoll_callbacks", numbers)]
        return original(backend, module, devices, options, [])

    before, compiler.backend_compile_and_load = compiler.backend_compile_and_load, lie
    try:
        calls_back()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    finally:
        compiler.backend_compile_and_load = before
    return ""


def compiles_without_a_connection(numbers: str) -> str:
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    CLIENT_CHANNEL.receives_from = lambda client: False  # type: ignore[method-assign]  # small arrays would open one
    return compiles_with(numbers)


# ---- the tests


@pytest.mark.parametrize("begin", [begin_to_sit, begin_many_ordered])
def test_a_client_killed_inside_of_a_callback_frees_its_device(
    standing: StandingCluster, start_python: StartPython, user: RemotePython, begin: Callable[[], None]
) -> None:
    assert user.call(calls_back) == [2.0, 2.0]
    doomed = start_python(ATOLL_ADDRESS=standing.address)
    doomed.call(begin)
    sessions = len(standing.report()["sessions"])
    doomed.process.kill()
    standing.until(lambda report: len(report["sessions"]) < sessions, SECONDS)
    assert user.call(computes, 50) == 50.0
    assert user.call(calls_back) == [2.0, 2.0]


def test_another_session_computes_on_the_device_of_a_waiting_callback(
    standing: StandingCluster, start_python: StartPython, user: RemotePython
) -> None:
    sitting = start_python(ATOLL_ADDRESS=standing.address)
    sitting.call(begin_to_sit)
    assert user.call(computes, 300) == 300.0
    assert user.call(calls_back) == [2.0, 2.0]
    sitting.call(release)


@pytest.mark.parametrize(
    "wrong",
    [
        "too few bytes",
        "garbage",
        "a call",
        "no result",
        "another type",
        "another shape",
        "fewer bytes than its shape",
        "more bytes than there are",
    ],
)
def test_a_wrong_answer_fails_its_run_alone(user: RemotePython, wrong: str) -> None:
    assert "INVALID_ARGUMENT: " in user.call(answers_with, wrong)
    assert user.call(calls_back) == [2.0, 2.0]


def test_a_device_whose_callback_raises_leaves_no_other_waiting(
    standing: StandingCluster, start_python: StartPython, user: RemotePython
) -> None:
    other = start_python(ATOLL_ADDRESS=standing.address)
    other.call(keeps_an_array)
    output = user.call(raises_while_the_other_device_waits)
    assert ["ValueError: not on the first device" in each for each in output] == [True, True, True, False], output
    assert output[3] == "[30.]"
    assert other.call(reads_what_it_kept) == [1.0, 2.0, 3.0, 4.0], "the island's arrays are all there"


def test_no_read_returns_the_value_of_a_run_that_fails_on_another_device(user: RemotePython) -> None:
    assert user.call(reads_of_a_run_that_fails_on_the_other_device) == ["failed"] * 20


def test_what_a_waiting_callback_reads_can_be_donated_and_nobody_waits(
    standing: StandingCluster, start_python: StartPython, user: RemotePython
) -> None:
    donor = start_python(ATOLL_ADDRESS=standing.address)
    assert donor.call(donates_what_a_callback_reads) == 20.0
    assert user.call(computes, 50) == 50.0
    donor.call(release)
    assert donor.call(reads_what_was_made_of_it) == (2.0, 3.0)


def test_a_client_that_takes_no_calls_gets_an_error(standing: StandingCluster, start_python: StartPython) -> None:
    """The client's programs contain callables, but it has no connection for their calls."""
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert "does not take calls" in python.call(compiles_without_a_connection, "1+1")


def test_numbers_that_a_client_does_not_have_call_nobody(user: RemotePython) -> None:
    assert user.call(calls_back) == [2.0, 2.0]
    assert "its function was deleted" in user.call(compiles_with, "999999+1")
    for numbers in ("", "7", "-1+1", "1+0", "1+99999999", "1+1+1", "x+1"):
        assert "invalid numbers of callbacks" in user.call(compiles_with, numbers)
    assert user.call(calls_back) == [2.0, 2.0]


@pytest.mark.parametrize("only_to_hosts", [True, False])
def test_a_client_that_leaves_its_channels_gets_an_error_and_can_be_called_again(
    standing: StandingCluster, start_python: StartPython, only_to_hosts: bool
) -> None:
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert python.call(calls_back) == [2.0, 2.0]
    assert "CANCELLED" in python.call(leaves_its_channels, only_to_hosts)
    assert python.call(calls_back) == [2.0, 2.0]


def test_many_ordered_callbacks_go_on_behind_one_that_waits(
    standing: StandingCluster, start_python: StartPython
) -> None:
    python = start_python(ATOLL_ADDRESS=standing.address)
    python.call(begin_many_ordered)
    python.call(release)
    assert python.call(what_many_gave) == MANY


@pytest.mark.parametrize("begin", [begin_to_sit, pytest.param(begin_many_ordered, marks=pytest.mark.thorough)])
def test_a_worker_killed_under_a_callback_is_named_and_callbacks_work_again(
    standing: StandingCluster, start_python: StartPython, begin: Callable[[], None]
) -> None:
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert python.call(calls_back) == [2.0, 2.0]
    python.call(begin)
    standing.worker(0).kill()
    assert "DATA_LOSS" in python.call(why_it_sits_no_more)
    python.call(release)
    assert python.call(calls_back_when_the_worker_is_back) == [2.0, 2.0]
