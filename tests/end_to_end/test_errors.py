"""Tests of errors: each names the failed component and place and suggests a next step, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.end_to_end.raw_client import RawClient
from tests.end_to_end.refusals import refusals
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.script_process import StartScript
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.waiting import until

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION.value[0]


def count_devices() -> int:
    return len(jax.devices())


def small() -> float:
    return float(jax.jit(lambda x: (x * 2).sum())(jnp.arange(4.0)))


# ---- addresses


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_an_address_or_topology_that_will_not_do_is_named_and_what_to_write_or_start(
    start_python: StartPython, module_directory: Path
) -> None:
    nobody = [f"unix:{module_directory}/nobody.sock", f"127.0.0.1:{free_port()}"]
    *texts, no_address, no_topology = start_python().call(
        refusals,
        *({"ATOLL_ADDRESS": address} for address in nobody),
        {"ATOLL_ADDRESS": "nowhere"},
        {"ATOLL_ISLANDS": "4x4"},
    )
    for address, text in zip(nobody, texts, strict=True):
        assert address in text
        assert "atoll up" in text
    assert "no cluster of yours with the name 'nowhere' is up on this machine (up: none): start it with" in no_address
    assert "expected ISLANDSxHOSTSxDEVICES" in no_topology


def test_a_full_cluster_refuses_and_serves_again_once_there_is_room(
    start_python: StartPython, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(islands="1x1x1", max_sessions=1)
    first, second = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    assert first.call(count_devices) == 1
    (text,) = second.call(refusals, {})
    assert "full" in text
    assert "it has 1 session" in text
    assert first.call(small) == 12
    first.close()
    cluster.until(lambda report: not report["sessions"], 10)
    assert second.call(small) == 12
    second.close()


def test_a_cluster_with_a_token_serves_only_those_who_bring_it(
    start_python: StartPython, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(islands="1x1x1", listen=f"127.0.0.1:{free_port()}", token="right, and naïve")
    tokens = ("", "wröng", cluster.token)
    python = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_INSECURE="1")
    *refused, served = python.call(refusals, *({"ATOLL_TOKEN": token} for token in tokens))
    for text in refused:
        assert "asks for a token: set ATOLL_TOKEN" in text
    assert served == ""
    assert python.call(small) == 12
    python.close()


# ---- versions


def test_the_error_of_an_unsupported_jaxlib_says_what_to_install(
    cluster: StandingCluster, module_directory: Path
) -> None:
    path = module_directory / "versions.sock"
    cluster.start_proxy(path)
    client = RawClient(f"unix:{path}")
    with contextlib.closing(client):
        old, new = client.get_version(1, 10), client.get_version(99, 120)
        assert client.get_version(1, 120)[0] == 0
    assert old[0] == new[0] == FAILED_PRECONDITION
    assert "speaks IFRT proxy protocol 1 to 10" in old[1]
    assert "install a newer jax" in old[1]
    assert "speaks IFRT proxy protocol 99 to 120" in new[1]
    assert "install a newer atoll, or an older jax" in new[1]


def test_a_session_of_an_unspoken_version_is_refused(cluster: StandingCluster, module_directory: Path) -> None:
    path = module_directory / "version.sock"
    cluster.start_proxy(path)
    client = RawClient(f"unix:{path}", protocol=7)
    with contextlib.closing(client):
        code, text = client.begin()
    assert code == FAILED_PRECONDITION
    assert "7" in text


# ---- programs


def plugin_program() -> None:
    from jax.extend.ifrt_programs import ifrt_programs as programs

    program = programs.make_plugin_program('{"some": "other runtime"}')
    options = programs.make_plugin_compile_options()
    jax.devices()[0].client.compile_ifrt_program(program, options)


def test_a_plugin_program_that_is_not_known_is_an_invalid_argument(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT.*plugin program.*other runtime"):
        atoll_python.call(plugin_program)
    assert atoll_python.call(small) == 12


# ---- memory


def too_much_on_a_device() -> None:
    jax.block_until_ready(jnp.zeros((1 << 45,), jnp.int8) + 1)


def too_much_for_a_program() -> None:
    jax.block_until_ready(jax.jit(lambda x: jnp.broadcast_to(x, (1 << 22, 1 << 22)) + x)(jnp.ones(1 << 22)))


def too_much_for_the_compiler() -> None:
    jax.block_until_ready(jnp.arange(1 << 44, dtype=jnp.int8))


def too_much_within_a_program() -> None:
    jax.block_until_ready(jax.jit(lambda x: jnp.sum(jax.lax.iota("int32", 1 << 40)) + x)(1))


def much_that_is_never_made() -> list[float]:
    zeros = jax.jit(lambda x: (jnp.zeros(1 << 40)[:3] + x).sum())(2.0)
    called = jax.jit(lambda x: jax.pure_callback(lambda v: v + 1, x, x) + jax.lax.iota("int32", 1 << 40)[5])(
        jnp.int32(2)
    )
    return [float(zeros), float(called)]


@pytest.mark.parametrize(
    "function", [too_much_on_a_device, too_much_for_a_program, too_much_for_the_compiler, too_much_within_a_program]
)
def test_what_does_not_fit_a_device_fails_and_the_session_goes_on(atoll_python: RemotePython, function: Any) -> None:
    with pytest.raises(RemoteError, match=r"RESOURCE_EXHAUSTED.*[Oo]ut of memory"):
        atoll_python.call(function)
    assert atoll_python.call(small) == 12


def test_a_program_with_a_huge_value_that_xla_does_not_make_runs(atoll_python: RemotePython) -> None:
    assert atoll_python.call(much_that_is_never_made) == [6, 8]


def uses_of_a_failure() -> list[str]:
    failed = jnp.zeros((1 << 45,), jnp.int8)
    errors = []
    for use in (lambda: failed[0], lambda: jax.device_put(failed, jax.devices()[1])[:2], lambda: (failed + 1)[:1]):
        try:
            np.asarray(use())
        except Exception as error:
            errors.append(str(error))
    return errors


def test_whatever_uses_a_failed_array_reports_the_first_failure(atoll_python: RemotePython) -> None:
    errors = atoll_python.call(uses_of_a_failure)
    assert len(errors) == 3
    assert all("RESOURCE_EXHAUSTED" in text for text in errors)


# ---- scripts that are cancelled


LONG = """
    import jax, jax.numpy as jnp

    step = jax.jit(lambda x: jax.lax.fori_loop(0, 1 << 30, lambda i, y: jnp.sin(y) + i, x))
    pending = step(jnp.ones(1000))
    print("computing", flush=True)
    print(float(pending[0]))
"""


def test_control_c_in_the_middle_of_a_computation_ends_everything(start_script: StartScript) -> None:
    script = start_script(LONG)
    assert script.line() == "computing", script.errors()
    # While JAX still traces, jaxlib may replace the KeyboardInterrupt with a ValueError: one that is raised in the
    # comparison of two shardings, which are keys of a cache in C++.
    until(lambda: waits(script.process.pid))
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(300) == -signal.SIGINT, script.errors()
    script.assert_gone()


LONG_CALLBACK = """
    import time
    import jax, jax.numpy as jnp

    def wait(x):
        print("in the callback", flush=True)
        time.sleep(600)
        return x

    x = jnp.ones(3).block_until_ready()
    jax.jit(lambda x: jax.pure_callback(wait, x, x))(x)
"""


def test_control_c_ends_a_call_whose_callback_has_not_returned(start_script: StartScript) -> None:
    script = start_script(LONG_CALLBACK)
    assert script.line() == "in the callback", script.errors()
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.wait(300) == -signal.SIGINT, script.errors()
    assert script.errors().splitlines()[-1] == "KeyboardInterrupt"
    script.assert_gone()


def waits(pid: int) -> bool:
    """Return whether the main thread of a process sleeps each time that it is looked at, for half a second."""
    for _ in range(25):
        state = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "S":
            return False
        time.sleep(0.02)
    return True


def fill_a_device() -> str:
    """Make arrays until a device of 64 MB is full. Return the error of the last one."""
    import jax
    import numpy as np

    held = [jax.device_put(np.zeros(5_000_000, np.float32)) for _ in range(3)]
    jax.block_until_ready(held)  # the error lists arrays by their state
    try:
        jax.block_until_ready(jax.device_put(np.zeros(5_000_000, np.float32)))
    except Exception as error:
        message = str(error)
    del held
    jax.block_until_ready([jax.device_put(np.zeros(5_000_000, np.float32)) for _ in range(3)])
    return message


def test_a_full_device_says_who_holds_its_memory_and_works_on_when_they_release_it(start_python: StartPython) -> None:
    python = start_python("1x1x2", ATOLL_DEVICE_MEMORY="64MB")
    message = python.call(fill_a_device)
    assert "RESOURCE_EXHAUSTED: out of memory on device 0 of host 0: device_put needs 19.1 MiB" in message
    assert "held by session 1 (remote_python.py): 57.2 MiB" in message
    # Each way to send arrays has an entry, because the first array may be sent before the host's direct channel is
    # open.
    entries = re.findall(r"device_put with (\d+) 'ready' buffers of total size (\d+)", message)
    assert sum(int(count) for count, _ in entries) == 3
    assert sum(int(size) for _, size in entries) == 60_000_000
    assert "test_errors.py" in message, "the line of the user's code that made them"
