"""Who ends takes along all that was its own: processes, sockets, folders, shared memory, memory on devices."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# What the project promises.
GONE_SECONDS = 2.0
START_SECONDS = 60.0
# On top of it, for a machine that does other things at the same time. The tests' own looking around is in it.
GRACE_SECONDS = 4.0

WORKING = """
    import time
    import jax, jax.numpy as jnp
    import numpy as np

    array = jax.device_put(np.zeros(1 << 20, np.float32), jax.devices()[0])
    step = jax.jit(lambda x: x + 1)
    np.asarray(step(array))
    print("working", flush=True)
"""


class Script:
    """A script under way, in a process group of its own, with everything temporary in `folder`."""

    def __init__(self, code: str, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._shared_before = shared_memory()
        path = folder / "script.py"
        path.write_text("".join(textwrap.dedent(part) for part in (WORKING, code)))
        self._errors = folder / "stderr"
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"working\n", self.errors()

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def processes(self) -> dict[str, psutil.Process]:
        """Its descendants, by the module that each runs."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            found[child.cmdline()[3]] = child
        return found

    def leftovers(self) -> list[str]:
        """What there still is of it."""
        variable = f"XDG_RUNTIME_DIR={self.folder}\0"
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    if variable in (entry / "environ").read_text(errors="replace"):
                        found.append(f"process {entry.name}")
                except OSError:
                    pass
        found += [str(path) for path in self.folder.glob("atoll*")]
        found += [str(path) for path in shared_memory() - self._shared_before]
        return found

    def assert_gone(self) -> None:
        """Fails unless nothing is left within the promised time."""
        deadline = time.monotonic() + GONE_SECONDS + GRACE_SECONDS
        while left := self.leftovers():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def shared_memory() -> set[Path]:
    folder = Path("/dev/shm")
    mine = os.getuid()
    found = set()
    for path in folder.glob("atoll-*") if folder.is_dir() else ():
        try:
            if path.stat().st_uid == mine:
                found.add(path)
        except OSError:
            pass
    return found


Run = Callable[..., Script]


@pytest.fixture
def run(program_cache: Path) -> Iterator[Run]:
    """Starts a script on an embedded cluster; returns once it has computed something."""
    from tests.conftest import script_environment

    started: list[Script] = []

    def start(code: str = "time.sleep(600)", **environment: str) -> Script:
        folder = Path(tempfile.mkdtemp(prefix="at-"))
        base = script_environment(folder, program_cache, "2x1x1")
        started.append(Script(code, folder, base | environment))
        return started[-1]

    yield start
    for script in started:
        script.end()
        shutil.rmtree(script.folder, ignore_errors=True)


def test_after_kill_9_of_a_script_nothing_is_left(run: Run) -> None:
    script = run()
    assert len(script.processes()) == 4  # two workers are one module
    script.process.kill()
    script.process.wait()
    script.assert_gone()


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise ValueError('mine')", 1), ("import os; os._exit(3)", 3), ("import sys; sys.exit(4)", 4)],
    ids=["at its end", "by an exception", "by os._exit", "by sys.exit"],
)
def test_after_a_script_has_ended_nothing_is_left(run: Run, end: str, status: int) -> None:
    script = run(end)
    assert script.process.wait(START_SECONDS) == status
    script.assert_gone()
    assert ("ValueError: mine" in script.errors()) == (status == 1)


def test_after_control_c_nothing_is_left_and_the_script_sees_it(run: Run) -> None:
    script = run(
        """
        try:
            print("waiting", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print(float(step(array)[0]), flush=True)
            raise
        """
    )
    assert script.process.stdout is not None
    assert script.process.stdout.readline() == b"waiting\n"
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.process.stdout.readline() == b"1.0\n", script.errors()
    assert script.process.wait(START_SECONDS) == -signal.SIGINT
    script.assert_gone()
    assert script.errors().splitlines()[-1] == "KeyboardInterrupt"


def test_without_its_proxy_a_script_is_told_so_and_goes_with_its_cluster(run: Run) -> None:
    script = run(
        """
        while True:
            time.sleep(0.01)
            try:
                np.asarray(step(array))
            except Exception as error:
                print(type(error).__name__, str(error).splitlines()[0], flush=True)
                break
        """
    )
    script.processes()["atoll.proxy.main"].kill()
    assert script.process.stdout is not None
    line = script.process.stdout.readline().decode()
    assert line.startswith("JaxRuntimeError UNAVAILABLE"), (line, script.errors())
    assert "proxy" in line
    assert script.process.wait(START_SECONDS) == 0, script.errors()
    script.assert_gone()


def test_after_kill_9_of_a_script_and_its_proxy_nothing_is_left(run: Run) -> None:
    script = run()
    proxy = script.processes()["atoll.proxy.main"]
    script.process.send_signal(signal.SIGSTOP)
    proxy.kill()
    script.process.kill()
    script.process.wait()
    script.assert_gone()


def test_an_embedded_cluster_ends_with_the_block_of_connect(run: Run) -> None:
    script = run(
        """
        import atoll, os, psutil

        with atoll.connect(islands="1x1x2") as devices:
            print(len(devices), float(jnp.ones(3).sum()), len(psutil.Process().children()), flush=True)
        print(len(psutil.Process().children()), jax.devices()[0].platform, flush=True)
        time.sleep(600)
        """,
        JAX_PLATFORMS="cpu",
    )
    assert script.process.stdout is not None
    assert script.process.stdout.readline() == b"2 3.0 2\n", script.errors()
    assert script.process.stdout.readline() == b"0 cpu\n", script.errors()
    script.assert_gone()
    assert script.errors() == ""


# ---- a standing cluster


def sessions(report: dict[str, Any]) -> list[tuple[int, int]]:
    return [(session["pid"], session["bytes"]) for session in report["sessions"]]


def test_a_killed_client_leaves_no_session_and_disturbs_no_other(run: Run, cluster: Any) -> None:
    survivor = run(
        """
        total = 0.0
        for _ in range(100000):
            total = float(step(array)[7])
            print(total, flush=True)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    victim = run(
        """
        held = [array + i for i in range(20)]
        jax.block_until_ready(held)
        print("held", flush=True)
        time.sleep(600)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    assert victim.process.stdout is not None
    assert victim.process.stdout.readline() == b"held\n"
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
    assert survivor.process.stdout is not None
    for _ in range(50):
        assert survivor.process.stdout.readline() == b"1.0\n", survivor.errors()


def test_the_memory_of_a_killed_client_is_free_again(run: Run, cluster: Any) -> None:
    worker = next(each for name, each in cluster.processes().items() if "worker" in name)
    before = worker.memory_info().rss
    victim = run(
        """
        held = [jnp.full((8 << 20,), float(i)) for i in range(8)]
        jax.block_until_ready(held)
        print("held", flush=True)
        time.sleep(600)
        """,
        ATOLL_ADDRESS=cluster.address,
    )
    assert victim.process.stdout is not None
    assert victim.process.stdout.readline() == b"held\n"
    assert worker.memory_info().rss - before > 200 << 20
    victim.process.kill()
    victim.process.wait()
    deadline = time.monotonic() + GONE_SECONDS + GRACE_SECONDS
    while worker.memory_info().rss - before > 100 << 20:
        assert time.monotonic() < deadline, worker.memory_info().rss - before
        time.sleep(0.02)
