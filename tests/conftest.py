"""Fixtures and hooks of all tests: a stock CPU backend, `run_script`, and checks that nothing is left behind.

In the test process itself, JAX uses the CPU with a few forced devices. Atoll's backend only runs in child processes.
Each child inherits `ATOLL_TEST_RUN`, which distinguishes its leftovers from those of other runs on this machine, and
pytest's `PYTEST_CURRENT_TEST`, which identifies the test that has leaked it. `guardian` cleans up after a run that is
killed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests import audit_hooks, quick_xla

# JAX's backend reads these once, so set them before JAX is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["NPROC"] = "16"  # XLA's CPU client deadlocks with fewer threads than executions in flight
os.environ["XLA_FLAGS"] = quick_xla.FLAGS
# Each thread of NumPy's BLAS spins for 50 ms before it sleeps, which takes a twelfth of the start of a script with JAX.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Workers use this setting. The fork server reads it once, for all processes that it forks.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# A test of Google's gRPC loads it into this process. Its fork handler aborts forks of the process, such as the one that
# writes a snapshot.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Otherwise `ray start` requires a token if the user has one, and `ray.init` with an address sends none.
os.environ["RAY_AUTH_MODE"] = "disabled"

# A run in the background of a non-interactive shell ignores SIGINT, which its children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Likewise SIGHUP under `nohup`. It has its default action in children that are executed, and none here.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

os.environ["ATOLL_STATE_DIR"] = "off"  # otherwise usage would be stored in the directory of the user who runs the tests
for _name in ("ATOLL_ADDRESS", "ATOLL_ISLANDS", "ATOLL_TOKEN", "ATOLL_PLATFORM"):
    os.environ.pop(_name, None)

audit_hooks.ignore()  # before JAX is imported

# Until all tests are collected. Imported objects remain, so neither collect garbage while they are made, nor at the
# end.
gc.disable()

import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import cpu_time  # noqa: E402
from tests.forked_process import FORKING  # noqa: E402
from tests.process_environments import processes_with  # noqa: E402
from tests.processes import Processes  # noqa: E402
from tests.scripts import RunScript, ScriptResult, script_environment, start_process  # noqa: E402
from tests.thoroughness import TIMES, examples, is_left_out  # noqa: E402

if TYPE_CHECKING:
    from tests.cluster_process import User

RUN = ""
RUNTIME = Path()
# All processes of this run share the directory of compiled programs and the key that protects them.
PROGRAMS = Path()
_guardian: subprocess.Popen[bytes]


def _begin() -> None:
    """Make a run and a runtime directory for this process, and start the guardian that watches it."""
    global RUN, RUNTIME, PROGRAMS, _guardian
    RUN = os.environ["ATOLL_TEST_RUN"] = uuid.uuid4().hex
    # Paths of unix sockets are limited to 107 bytes, and pytest's own directories are too long.
    RUNTIME = Path(tempfile.mkdtemp(prefix="at-"))
    os.environ["XDG_RUNTIME_DIR"] = str(RUNTIME)
    if not PROGRAMS.name:  # in the first process, which ends after all others
        PROGRAMS = RUNTIME / "programs"
        os.environ["ATOLL_KEY_FILE"] = str(RUNTIME / "key")
    _guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), str(os.getpid()), RUN, str(RUNTIME)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        # Signals that end the run, such as Ctrl-C or the end of its process group, do not end the guardian.
        start_new_session=True,
    )
    _guardian.returncode = 0  # it ends after this process, which does not wait for it


_begin()

LEAK_SECONDS = 60.0
_GC_THRESHOLDS = (50_000, 20, 20)
# One thread for all connections, which needs two seconds to detect that it has nothing to watch. It is checked at the
# end.
_OF_THE_PROCESS = frozenset({"atoll-silence"})
# Threads that help to copy, and end with the process.
_COPIERS = frozenset({f"atoll-copy_{number}" for number in range(3)})
_SHARED_DIRECTORIES = tuple({Path(tempfile.gettempdir()), Path("/dev/shm")})
# The first cluster that this user starts outside of the tests creates it, and it remains.
_REGISTRY = Path(tempfile.gettempdir()) / f"atoll-{os.getuid()}"

# The suite tries the same examples each time, so that a failure is due to a change. `make thorough` tries new ones.
settings.register_profile(
    "atoll",
    max_examples=examples(),
    deadline=None,
    derandomize=TIMES == 1,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # depending on the load of the machine
)
settings.load_profile("atoll")


def _directories() -> set[Path]:
    bases = (base for base in (*_SHARED_DIRECTORIES, RUNTIME) if base.is_dir())
    return {path for base in bases for path in base.glob("atoll-*") if path != _REGISTRY}


_DIRECTORIES_BEFORE = _directories()


# ---- leaks


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def leaked_processes() -> list[str]:
    """Return this run's live processes and this process's descendants, each with the test that started it."""
    found = {process.pid: process for process in processes_with("ATOLL_TEST_RUN", RUN)}
    for process in psutil.Process().children(recursive=True):
        if _runs(process) and process.pid != _guardian.pid:
            found[process.pid] = process
    return [
        f"process {pid} of {_environment(process).get('PYTEST_CURRENT_TEST', '?')}: {_command(process)[:200]}"
        for pid, process in found.items()
    ]


def leaked_directories() -> list[str]:
    """Return Atoll's directories and sockets of this run.

    In shared places, omit those that a live process uses or names.
    """
    from atoll.cluster.processes.client_directories import in_use, sweep

    # As the next client would do, because a client that jaxlib ends after the loss of its proxy removes nothing.
    sweep(RUNTIME)
    fresh = _directories() - _DIRECTORIES_BEFORE
    if any(path.parent != RUNTIME for path in fresh):
        named = "\n".join(_command(process) for process in psutil.process_iter())
        fresh = {path for path in fresh if path.parent == RUNTIME or not (in_use(path) or str(path) in named)}
    return [f"directory or socket {path}" for path in sorted(fresh)]


def leaked_threads(
    before: frozenset[threading.Thread] = frozenset(), shared: frozenset[str] = frozenset()
) -> list[str]:
    """Return Atoll's threads in this process, except for those in `before` and those with names in `shared`."""
    return [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread.name.startswith("atoll-") and thread not in before and thread.name not in shared
    ]


def gone(leaks: Callable[[], list[str]], seconds: float = LEAK_SECONDS) -> list[str]:
    """Return the leaks that remain after `seconds`, because processes and threads take some time to end."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while found := leaks():
        if time.monotonic() > deadline:
            return found
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return []


@pytest.fixture(autouse=True)
def _no_thread_leaks() -> Iterator[None]:
    before = frozenset(threading.enumerate())
    yield
    found = gone(lambda: leaked_threads(before, _OF_THE_PROCESS | _COPIERS))
    assert not found, "left behind by this test: " + "; ".join(found)


@pytest.fixture(scope="module", autouse=True)
def _collects_only_objects_of_the_module() -> None:
    """Exempt the objects of libraries and of earlier modules from garbage collections, each of which would take 1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _forks_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the processes that tests start from one that has imported JAX, unless the module is marked `executed`."""
    with contextlib.nullcontext() if request.node.get_closest_marker("executed") else FORKING.on():
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_process_or_directory_leaks() -> Iterator[None]:
    # Set up before all other fixtures and torn down after them, when clusters that many tests share have ended.
    yield
    cpu_time.end_server()
    found = gone(leaked_processes) + gone(leaked_directories) + gone(lambda: leaked_threads(shared=_COPIERS))
    for process in processes_with("ATOLL_TEST_RUN", RUN):
        process.kill()
    shutil.rmtree(RUNTIME, ignore_errors=True)
    assert not found, "left behind by this run:\n" + "\n".join(found)


# Tests that start clusters use the fixture `program_cache`, or are in this directory.
_OF_CLUSTERS = Path(__file__).parent / "end_to_end"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print the CPU time of each file's tests")
    parser.addoption("--full", action="store_true", help="run also the tests with the marker `thorough`")
    parser.addoption("--processes", type=int, default=1, help="how many processes run the tests; default: 1")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu"):
        config.pluginmanager.register(cpu_time.CpuTime(), "cpu-time")
    if config.getoption("--processes") > 1:
        config.pluginmanager.register(Processes(config, FORKING.start, _begin), "processes")
        if not config.option.collectonly:
            FORKING.begin()  # while the tests are collected


@functools.cache
def _is_of_clusters(path: Path) -> bool:
    return path.is_relative_to(_OF_CLUSTERS)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "program_cache" in getattr(item, "fixturenames", ()) or _is_of_clusters(item.path):
        item.add_marker("cluster")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow files first, then those that start clusters, those with tests of properties, and the others. Each group
    is sorted by the number of tests.

    Otherwise, only few processes would be busy at the end of the run. With several processes, one begins with the last
    two groups: see `tests.processes`.

    Thorough tests are not part of the suite, because its time is limited. The option `--full` adds them.
    """
    full = config.getoption("--full")
    left_out = dict.fromkeys(item for item in items if is_left_out(item.iter_markers("thorough"), full))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    clusters = {item.path for item in items if item.get_closest_marker("cluster")}
    properties = {item.path for item in items if item.get_closest_marker("hypothesis")}  # a few tests of seconds each
    count = Counter(item.path for item in items)

    def order(item: pytest.Item) -> tuple[bool, bool, bool, int, Path]:
        path = item.path
        return path not in slow, path not in clusters, path not in properties, -count[path], path

    items.sort(key=order)


def pytest_collection_finish() -> None:
    gc.freeze()
    # Python's own thresholds are for processes with few objects that are not frozen: a tenth of the time of tests that
    # compute would be for collections that find nothing.
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()


def pytest_unconfigure() -> None:
    FORKING.end()  # otherwise it is left if no tests have run
    shutil.rmtree(RUNTIME, ignore_errors=True)


# ---- scripts


@pytest.fixture(scope="session")
def program_cache() -> Path:
    """Return the directory in which the workers of this run keep compiled programs."""
    return PROGRAMS


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Create a private directory with a path that is short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="at-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def run_script(short_directory: Path, program_cache: Path) -> RunScript:
    """Run a Python script on an embedded cluster, and return its result.

    result = run_script(code_or_path, *arguments, islands="1x1x4", env={}, timeout=300.0)

    `code_or_path` is the script's text, with any indentation, or a Path. A value of None in `env` unsets a variable.
    The script runs in a new process group, which is killed at the deadline. The test then fails. It also fails if any
    process or directory of the script's cluster outlives the script.
    """
    count = 0

    def run(
        code_or_path: str | Path,
        *arguments: str,
        islands: str = "1x1x4",
        env: dict[str, str | None] | None = None,
        timeout: float = 300.0,
    ) -> ScriptResult:
        nonlocal count
        count += 1
        runtime = short_directory / str(count)
        runtime.mkdir(mode=0o700)
        script = code_or_path
        if isinstance(script, str):
            script = runtime / "script.py"
            script.write_text(textwrap.dedent(str(code_or_path)))
        environment = script_environment(runtime, program_cache, islands)
        for name, value in (env or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        process = start_process([sys.executable, str(script), *arguments], environment, runtime)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"the script ran for more than {timeout:.0f} s\n{stdout}\n{stderr}")
        found = gone(lambda: _script_leaks(runtime))
        assert not found, f"left behind by the script: {'; '.join(found)}\n{stdout}\n{stderr}"
        return ScriptResult(process.returncode, stdout, stderr)

    return run


def _script_leaks(runtime: Path) -> list[str]:
    processes = processes_with("XDG_RUNTIME_DIR", str(runtime))
    return [f"process {process.pid}: {_command(process)}" for process in processes] + [
        f"directory {path}" for path in runtime.glob("atoll-*")
    ]


@pytest.fixture
def user(short_directory: Path, program_cache: Path) -> Iterator[User]:
    """Return a user of the command, with private directories.

    Its remaining processes are killed at the end of the test.
    """
    from tests.cluster_process import User  # that module imports this one

    with User(short_directory, program_cache) as made:
        yield made
