"""Tests of colocated Python processes that end: they are named, replaced, and removed with their session."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import psutil
import pytest
from jax.experimental import colocated_python

from atoll.cluster.processes.process_table import began
from atoll.errors import Kind, details_in
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StartCluster
from tests.forked_process import children

BACK_SECONDS = 300.0
Result = TypeVar("Result")
_kept: dict[str, Any] = {}


@pytest.fixture(scope="module", params=[pytest.param("1x1x2", marks=pytest.mark.thorough), "1x2x1"])
def python(request: pytest.FixtureRequest, start_python: StartPython) -> RemotePython:
    """Return a child with an island of one host, and of two."""
    return start_python(request.param)


def argument() -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(np.arange(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))


def once_it_is_back(compute: Callable[[], Result]) -> Result:
    """Return the result of a function on several hosts, after all of their processes have been replaced."""
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        try:
            return compute()
        except jax.errors.JaxRuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def end_the_process() -> tuple[str, list[int], str]:
    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    @colocated_python.colocated_python_class
    class Holder:
        def get(self, x: jax.Array) -> jax.Array:
            return x

    @colocated_python.colocated_python
    def die(x: jax.Array) -> jax.Array:
        print("the output of a process that ends", file=sys.stderr, flush=True)
        os._exit(3)

    x, holder = argument(), Holder()
    jax.block_until_ready((same(x), same(x), holder.get(x), holder.get(x)))
    texts = []
    for call in (die, holder.get):
        try:
            jax.block_until_ready(call(x))
        except jax.errors.JaxRuntimeError as error:
            texts.append(str(error))
        after = once_it_is_back(lambda: jax.device_get(same(x)).tolist())
    return texts[0], after, texts[1]


def test_a_process_that_ends_fails_its_calls_and_is_replaced(python: RemotePython):
    aborted, after, lost = python.call(end_the_process)
    assert aborted.startswith("ABORTED: the Python process of session 1 on host")
    assert "exited with 3; its last lines:\nthe output of a process that ends" in aborted
    assert [details_in(text)[1].kind for text in (aborted, lost)] == [Kind.PYTHON, Kind.PYTHON]
    assert after == [0, 1]
    assert "the object was lost when its process on host" in lost


def colocated_processes() -> set[int]:
    found = set()
    for each in children(os.getpid(), recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "atoll.host_services.python.program.python_main" in each.cmdline():
                found.add(each.pid)
    return found


def until_ended(pids: set[int]) -> None:
    deadline = time.monotonic() + BACK_SECONDS
    while any(began(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, "a Python process outlives what it belongs to"
        time.sleep(0.05)


def leave_one_running() -> set[int]:
    begun = str(Path("begun").absolute())

    @colocated_python.colocated_python
    def forever(x: jax.Array) -> jax.Array:
        Path(begun).touch()
        time.sleep(1000)
        return x

    forever = forever.specialize(out_specs_fn=lambda x: x)
    _kept["result"] = forever(argument())
    deadline = time.monotonic() + BACK_SECONDS
    while not Path(begun).exists():
        assert time.monotonic() < deadline, "the function does not begin"
        time.sleep(0.01)
    return colocated_processes()


def test_processes_end_with_their_session_whatever_they_do(start_python: StartPython):
    child = start_python("1x1x2", ATOLL_TEST_EXECUTED="python_main")
    pids = child.call(leave_one_running)
    assert pids
    child.process.kill()
    child.process.wait()
    until_ended(pids)


def lose_the_worker() -> tuple[set[int], list[int], str]:
    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    @colocated_python.colocated_python_class
    class Holder:
        def get(self, x: jax.Array) -> jax.Array:
            return x

    same = same.specialize(out_specs_fn=lambda x: x)
    holder = Holder()
    jax.block_until_ready((same(argument()), holder.get(argument()), holder.get(argument())))
    pids = leave_one_running()
    (pid,) = [each for each in pids if psutil.Process(each).parent().pid not in pids]
    psutil.Process(pid).parent().kill()
    after = once_it_is_back(lambda: jax.device_get(same(argument())).tolist())
    try:
        lost = str(jax.device_get(holder.get(argument())))
    except jax.errors.JaxRuntimeError as error:
        lost = str(error)
    return pids, after, lost


def test_processes_end_with_their_worker_and_come_back_with_it_and_without_their_objects(start_python: StartPython):
    pids, after, lost = start_python("1x1x2", ATOLL_TEST_EXECUTED="python_main").call(lose_the_worker)
    until_ended(pids)
    assert after == [0, 1]
    assert "the object was lost when its process on host" in lost


def look_around(others: list[str]) -> dict[str, Any]:
    """Return what a process can find of the cluster and of others: the existing paths, and the visible processes."""

    @colocated_python.colocated_python
    def look(x: jax.Array) -> jax.Array:
        import json
        import resource

        descriptors = {}
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the process that read this list
                descriptors[int(each)] = os.readlink(f"/proc/self/fd/{each}")
        seen = {
            "token": [name for name in os.environ if name.startswith("ATOLL_")],
            "descriptors": descriptors,
            "mode": oct(os.stat(os.environ["TMPDIR"]).st_mode & 0o777),
            "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
            "memory": resource.getrlimit(resource.RLIMIT_DATA)[0] > 0,
            "most processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "processes": len([each for each in os.listdir("/proc") if each.isdigit()]),
            "others": [path for path in others if os.path.lexists(path)],
            "shared": os.listdir("/dev/shm"),
        }
        return jax.device_put(np.array(json.dumps(seen), dtype=np.dtypes.StringDType()), next(iter(x.devices())))

    import json

    x = jax.device_put(np.array(1), jax.devices()[0])
    found: dict[str, Any] = json.loads(jax.device_get(look(x)).item())
    return found


def test_a_process_has_nothing_of_the_clusters_own(start_python: StartPython):
    child = start_python("1x1x2", ATOLL_LOG="warning", ATOLL_TEST_EXECUTED="python_main")
    found = child.call(look_around, [])
    descriptors = found["descriptors"]
    assert descriptors["0"] == descriptors["1"] == "/dev/null"
    # The process's standard output, and a link to it.
    assert sorted({each.partition(":")[0] for each in descriptors.values()}) == ["/dev/null", "pipe", "socket"]
    for kind in ("pipe", "socket"):
        assert len({each for each in descriptors.values() if each.startswith(kind)}) == 1, descriptors
    assert found["token"] == []
    assert (found["mode"], found["core"], found["memory"]) == ("0o700", 0, True)


def test_a_process_sees_no_socket_segment_or_process_of_another_session(
    start_cluster: StartCluster, start_python: StartPython
):
    cluster = start_cluster({"ATOLL_TEST_EXECUTED": "python_main"}, islands="1x1x2")
    mine, other = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    other.call(look_around, [])
    paths = list(cluster.directory.rglob("*"))
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="atoll-") as segment:
        found = mine.call(look_around, [segment.name, *(str(each) for each in paths if not each.is_dir())])
    if found["most processes"] != 4096:
        pytest.skip("this system allows no namespaces")
    assert any(each.is_socket() for each in paths)
    assert (found["others"], found["shared"], found["processes"]) == ([], [], 1)


def start_without_modules(directory: str) -> str:
    sys.path.insert(0, directory)
    import only_here  # type: ignore[import-not-found]

    @colocated_python.colocated_python
    def through(x: jax.Array) -> jax.Array:
        return jax.device_put(only_here.triple(np.asarray(x)), x.sharding)

    Path(directory, "only_here.py").unlink()
    try:
        jax.block_until_ready(through(jax.device_put(np.array(1), jax.devices()[0])))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    finally:
        sys.path.remove(directory)
    return ""


def test_a_function_whose_module_is_not_on_the_host_cannot_be_loaded(python: RemotePython, tmp_path: Path):
    (tmp_path / "only_here.py").write_text("def triple(x): return 3 * x\n")
    text = python.call(start_without_modules, str(tmp_path))
    assert "cannot be loaded" in text
    assert "No module named 'only_here'" in text


def call_on_both_hosts() -> tuple[str, list[int]]:
    @colocated_python.colocated_python
    def same(x: jax.Array) -> jax.Array:
        return x

    same = same.specialize(out_specs_fn=lambda x: x)
    try:
        return "", jax.device_get(same(argument())).tolist()
    except jax.errors.JaxRuntimeError as error:
        return str(error), []


def test_a_process_that_cannot_start_on_one_host_does_not_keep_the_other_host_waiting(
    start_cluster: StartCluster, start_python: StartPython
):
    cluster = start_cluster({}, islands="1x2x1")
    obstacle = cluster.directory / "python-1" / "host-1"
    obstacle.parent.mkdir(mode=0o700)
    obstacle.touch()
    child = start_python(ATOLL_ADDRESS=cluster.address)
    error, _ = child.call(call_on_both_hosts, seconds=60.0)  # of the 100 s for which the processes wait for one another
    assert "on host 1 cannot be started: [Errno 17] File exists" in error
    obstacle.unlink()
    assert child.call(call_on_both_hosts) == ("", [0, 1])
