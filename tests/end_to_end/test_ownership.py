"""Tests that a process that ends releases all that it owned: processes, sockets, directories, shared and
device memory.
"""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.remote_python import ROOT
from tests.end_to_end.script_process import GONE_SECONDS, GRACE_SECONDS, Script, StartScript

START_SECONDS = 300.0

WORKING = """
import time
import jax, jax.numpy as jnp
import numpy as np

array = jax.device_put(np.zeros(1 << 20, np.float32), jax.devices()[0])
step = jax.jit(lambda x: x + 1)
np.asarray(step(array))
print("working", flush=True)
"""


def working(start_script: StartScript, code: str = "time.sleep(600)", **environment: str) -> Script:
    """Start a script that has computed something and continues with `code`."""
    script = start_script(WORKING + textwrap.dedent(code), "2x1x1", **environment)
    assert script.line() == "working", script.errors()
    return script


def test_after_kill_9_of_a_script_nothing_is_left(start_script: StartScript) -> None:
    script = working(start_script)
    assert len(script.processes()) == 4  # the two workers run the same module
    script.process.kill()
    script.process.wait()
    script.assert_gone()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("", 0, id="at its end", marks=pytest.mark.thorough),
        pytest.param("raise ValueError('mine')", 1, id="by an exception"),
        pytest.param("import os; os._exit(3)", 3, id="by os._exit"),
    ],
)
def test_after_a_script_has_ended_nothing_is_left(start_script: StartScript, end: str, status: int) -> None:
    script = working(start_script, end)
    assert script.process.wait(START_SECONDS) == status
    script.assert_gone()
    assert ("ValueError: mine" in script.errors()) == (status == 1)


def test_after_control_c_nothing_is_left_and_the_script_sees_it(start_script: StartScript) -> None:
    script = working(
        start_script,
        """
        try:
            print("waiting", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print(float(step(array)[0]), flush=True)
            raise
        """,
    )
    assert script.line() == "waiting"
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.line() == "1.0", script.errors()
    assert script.process.wait(START_SECONDS) == -signal.SIGINT
    script.assert_gone()
    assert script.errors().splitlines()[-1] == "KeyboardInterrupt"


def test_without_its_proxy_a_script_gets_an_error_and_ends_with_its_cluster(start_script: StartScript) -> None:
    script = working(
        start_script,
        """
        while True:
            time.sleep(0.01)
            try:
                np.asarray(step(array))
            except Exception as error:
                line = type(error).__name__ + " " + str(error).splitlines()[0]
                if "proxy" in line or "UNAVAILABLE" not in line:  # jaxlib names it, but where it was about to fetch
                    print(line, flush=True)
                    break
        """,
    )
    script.processes()["atoll.ifrt.proxy_main"].kill()
    line = script.line()
    assert line.startswith("JaxRuntimeError UNAVAILABLE"), (line, script.errors())
    assert "proxy" in line
    assert script.process.wait(START_SECONDS) == 0, script.errors()
    script.assert_gone()


def test_after_kill_9_of_a_script_and_its_proxy_nothing_is_left(start_script: StartScript) -> None:
    script = working(start_script)
    proxy = script.processes()["atoll.ifrt.proxy_main"]
    script.process.send_signal(signal.SIGSTOP)
    proxy.kill()
    script.process.kill()
    script.process.wait()
    script.assert_gone()


def test_an_embedded_cluster_ends_with_the_block_of_connect(start_script: StartScript) -> None:
    script = working(
        start_script,
        """
        import atoll, os, sys

        sys.path.append(os.environ["ROOT"])
        from tests.forked_process import children

        with atoll.connect(islands="1x1x2") as devices:
            print(len(devices), float(jnp.ones(3).sum()), len(children(os.getpid())), flush=True)
        print(len(children(os.getpid())), jax.devices()[0].platform, flush=True)
        time.sleep(600)
        """,
        JAX_PLATFORMS="cpu",
        ROOT=str(ROOT),
    )
    assert script.line() == "2 3.0 2", script.errors()
    assert script.line() == "0 cpu", script.errors()
    script.assert_gone()
    assert script.errors() == ""


def test_a_script_may_have_one_cluster_after_another_and_give_large_arrays_to_each(start_script: StartScript) -> None:
    script = start_script(
        """
        import atoll
        import jax
        import numpy as np

        ones = np.ones(1 << 20, np.float32)  # such arrays go by shared memory
        for count in (1, 2):
            with atoll.connect(islands=f"1x1x{count}") as devices:
                print(len(devices), float(jax.device_put(ones, devices[0]).sum()) / ones.size, flush=True)
        """,
        "1x1x1",
        JAX_PLATFORMS="cpu",
    )
    assert script.line() == "1 1.0", script.errors()
    assert script.line() == "2 1.0", script.errors()
    assert script.process.wait(START_SECONDS) == 0, script.errors()
    script.assert_gone()


# ---- a standing cluster


@pytest.mark.thorough
def test_without_its_proxy_a_script_can_have_another_and_goes_on_with_what_it_has_at_home(
    start_script: StartScript, cluster: Any, tmp_path: Path
) -> None:
    read = tmp_path / "read"
    script = working(
        start_script,
        """
        import os
        from jax.extend.backend import clear_backends

        at_home = np.asarray(step(array))
        print("kill", flush=True)
        while True:
            time.sleep(0.01)
            try:
                np.asarray(step(array))
            except Exception:
                break
        while not os.path.exists(os.environ["READ"]):  # as somebody who has read what the line says
            time.sleep(0.01)
        clear_backends()
        print(float(step(jax.device_put(at_home)).sum()) / at_home.size, flush=True)
        """,
        ATOLL_ADDRESS=cluster.address,
        ATOLL_TEST_EXECUTED="proxy_main",  # the script reports how it ended
        READ=str(read),
    )
    assert script.line() == "kill", script.errors()
    script.processes()["atoll.ifrt.proxy_main"].kill()
    deadline = time.monotonic() + START_SECONDS
    while "has ended (killed by SIGKILL)" not in script.errors():
        assert time.monotonic() < deadline, script.errors()
        time.sleep(0.05)
    assert "clear_backends()" in script.errors()
    read.touch()
    assert script.line() == "2.0", script.errors()
    assert script.process.wait(START_SECONDS) == 0, script.errors()


def sessions(report: dict[str, Any]) -> list[tuple[int, int]]:
    return [(session["pid"], session["bytes"]) for session in report["sessions"]]


def test_a_killed_client_leaves_no_session_and_disturbs_no_other(start_script: StartScript, cluster: Any) -> None:
    survivor = working(
        start_script,
        """
        total = 0.0
        for _ in range(100000):
            total = float(step(array)[7])
            print(total, flush=True)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    victim = working(
        start_script,
        """
        held = [array + i for i in range(20)]
        jax.block_until_ready(held)
        print("held", flush=True)
        time.sleep(600)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    assert victim.line() == "held"
    (held,) = (held for pid, held in sessions(cluster.report()) if pid == victim.process.pid)
    assert held >= 21 * 4 << 20
    victim.process.kill()
    victim.process.wait()
    report = cluster.until(
        lambda report: [pid for pid, _ in sessions(report)] == [survivor.process.pid],
        GONE_SECONDS + GRACE_SECONDS,
    )
    assert report["islands"][0]["state"] == "ready"
    victim.assert_gone()
    for _ in range(50):
        assert survivor.line() == "1.0", survivor.errors()


def test_the_memory_of_a_killed_client_is_free_again(start_script: StartScript, cluster: Any) -> None:
    worker = next(each for name, each in cluster.processes().items() if "worker" in name)
    before = worker.memory_info().rss
    victim = working(
        start_script,
        """
        held = [jnp.full((8 << 20,), float(i)) for i in range(8)]
        jax.block_until_ready(held)
        print("held", flush=True)
        time.sleep(600)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    assert victim.line() == "held"
    assert worker.memory_info().rss - before > 200 << 20
    victim.process.kill()
    victim.process.wait()
    deadline = time.monotonic() + GONE_SECONDS + GRACE_SECONDS
    while worker.memory_info().rss - before > 100 << 20:
        assert time.monotonic() < deadline, worker.memory_info().rss - before
        time.sleep(0.02)
