"""The fork server of a run of the suite: it imports what most processes import, then forks one for each request.

It runs as a script, without a backend of JAX and without threads. See `tests.forked_process`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

gc.disable()
_PATH = sys.path[1:]  # without this script's directory
sys.path[0] = str(Path(__file__).resolve().parents[1])

from atoll.devices.partial_jax import partial_jax  # noqa: E402
from tests import audit_hooks, cpu_time, forked_process, process_title  # noqa: E402

# Modules that do not import JAX.
_WITHOUT_JAX = (
    "pytest",
    "atoll.controller_process.controller_main",
    "atoll.devices.compilers.fork_server",
    "atoll.engines.engine_main",
    "atoll.engines.local",
    "atoll.ifrt.proxy_main",
    "atoll.operate.command.command_line",
    "atoll.worker.worker_main",
    # Nearly all commands import these modules later. No module of `atoll.client` is here: its tables are of the process
    # that imports them.
    "atoll.cluster.usage.usage_store",
    "atoll.engines.agent.agent",
    "atoll.engines.hosts.hosts_engine",
    "atoll.operate.controller_pair",
    "atoll.operate.standing",
    "atoll.operate.status_tables",
    "atoll.security.certificate_authority",
    "cryptography.hazmat.primitives.ciphers.aead",
    "typer._adapters",
)
# Modules for processes that import JAX partially: see `atoll.devices.partial_jax`.
_PARTIAL = (
    "atoll.devices.xla.compiler",
    "atoll.devices.xla.xla_backend",
    "jaxlib.mlir.dialects.mhlo",
)
# Modules for scripts and users' Python.
_WHOLE = (
    "jax",
    "jax.numpy",
    "atoll.host_services.python.program.python_main",
    "atoll.host_services.python.program.python_runner",
    "jaxlib.mlir.dialects.mhlo",
    "pathwaysutils",
)
_DESCRIPTORS_FROM = 512  # higher than the numbers in requests


def main(address: str, ready: int) -> None:
    """Serve at `address`, and in a second process at the address for processes that import JAX partially."""
    audit_hooks.ignore()
    _import(_WITHOUT_JAX)
    assert "jax" not in sys.modules
    listener, partial = map(_listen, (address, forked_process.partial(address)))
    if os.fork():
        partial.detach()
        _import(_WHOLE)
    else:
        listener.detach()
        listener = partial
        with partial_jax("cpu"):
            _import(_PARTIAL)
    sys.path[:] = _PATH
    _find_plugins()
    gc.collect()
    gc.freeze()
    can_fork = len(os.listdir("/proc/self/task")) == 1
    try:
        process_title.show(sys.orig_argv, os.environ)
    except OSError:  # a kernel without CONFIG_CHECKPOINT_RESTORE
        can_fork = False
    forked_process.FORKING.use(address)
    with socket.socket(fileno=ready) as pipe:
        pipe.send(b"1" if can_fork else b"0")
    request, descriptors, connection = _serve(listener)
    if request.module in forked_process.WITHOUT_JAX:
        atexit._clear()
    answer = fcntl.fcntl(connection, fcntl.F_DUPFD, 2 * _DESCRIPTORS_FROM)
    _become(request, descriptors, answer)
    _exit(_run(request))


def _import(names: Sequence[str]) -> None:
    """Import the modules that are installed."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    return listener


def _find_plugins() -> None:
    """Find the plug-ins of JAX for all processes, each of which would read the metadata of all packages."""
    find, group = importlib.metadata.entry_points, {"group": "jax_plugins"}
    installed = find(**group)

    def entry_points(**parameters: Any) -> Any:
        added = (Path(each) for each in sys.path if each not in _PATH)
        is_other = parameters != group or any(next(each.glob("*-info"), None) for each in added)
        return find(**parameters) if is_other else installed

    importlib.metadata.entry_points = entry_points


def _become_child(request: forked_process.Request, descriptors: Sequence[int]) -> None:
    """Turn this process into a child that a leader has forked. Does not return."""
    gc.freeze()  # otherwise, garbage of the leader would later close descriptors of other files
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    atexit._clear()
    logging.getLogger().handlers.clear()
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _become(request, descriptors, -1)
    _exit(_run(request))


def _exit(status: int) -> None:
    """End the process like Python, but finalize only what the script has created.

    Finalizing the rest would write to most of the pages shared with the server, and take 0.13 s of CPU time.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _serve(listener: socket.socket) -> tuple[forked_process.Request, list[int], int]:
    """Fork processes until the process that started this one ends.

    Return the request, its descriptors and the connection in each forked process.
    """
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    connections: dict[int, tuple[int, socket.socket]] = {}  # by the pidfd
    started: dict[int, tuple[dict[str, str], str]] = {}  # environments and requests of processes, by pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, descriptors = forked_process.receive_request(connection)
                except (OSError, EOFError):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    _kept.append(selector)
                    for other in (listener, *(each for _, each in connections.values())):
                        other.detach()
                    return request, descriptors, connection.detach()
                for each in descriptors:
                    os.close(each)
                watched = os.pidfd_open(pid)
                connections[watched] = (pid, connection)
                started[pid] = (request.environment, request.module or "script")
                selector.register(watched, selectors.EVENT_READ)
                if request.is_sandboxed:
                    selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data is not None:
                if key.data in started:  # its parent has ended
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            else:
                pid, connection = connections.pop(key.fd)
                selector.unregister(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                os.close(key.fd)
                _, status, used = os.wait4(pid, 0)
                cpu_time.record_forked(used, *started.pop(pid))
                forked_process.send_number(connection, -1 - status)
                connection.close()


# Owners of closed descriptors, which must not close other files with the same numbers.
_kept: list[Any] = []


def _run(request: forked_process.Request) -> int:
    """Run the requested code to its end, and return the exit status."""
    try:
        _execute(request)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        lines = error.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            lines = lines.tb_next
        sys.excepthook(type(error), error.with_traceback(lines), lines)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _become(request: forked_process.Request, descriptors: Sequence[int], answer: int) -> None:
    """Turn this process into the requested one, up to its first instruction.

    `answer` is the connection to the process that waits for it, or -1.
    """
    if request.new_session:
        os.setsid()
    _place(descriptors, request.descriptors, answer)
    os.chdir(request.directory)
    process_title.show(request.command, request.environment)
    if answer >= 0:
        with socket.socket(fileno=answer) as waiting:
            forked_process.send_number(waiting, os.getpid())
    os.environ.clear()
    os.environ.update(request.environment)
    del os.environ[forked_process.PARENT]  # an executed child would also have it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = "PYTHONUNBUFFERED" in request.environment
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if unbuffered else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = [request.script or request.module or "-c", *request.arguments]
    sys.orig_argv = list(request.command)
    first = os.path.dirname(request.script) if request.script else request.directory if request.module else ""
    search = [each for each in request.environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = ([] if request.safe_path else [first]) + search + _PATH
    _customize(search)
    random.seed()
    _configure_jax(request.environment)
    if not request.is_sandboxed:
        subprocess.Popen = forked_process.Popen  # type: ignore[misc]
        forked_process.FORKING.fork_here(_become_child if request.is_leader else None)
    gc.enable()


_faulty: set[Path] = set()  # the path of `faults`, once its functions are replaced


def _customize(search: Sequence[str]) -> None:
    """Run the first `sitecustomize.py` in these directories, as Python does at its start.

    A leader has already replaced the functions of `faults` for the children that it forks.
    """
    path = next((path for each in search if (path := Path(each, "sitecustomize.py")).exists()), None)
    if path is None or path in _faulty or path.resolve() == forked_process.CHILDREN:
        return
    if path.resolve() == forked_process.FAULTS:
        _faulty.add(path)
    spec = importlib.util.spec_from_file_location("sitecustomize", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _place(descriptors: list[int], numbers: tuple[int, ...], kept: int) -> None:
    """Give the descriptors these numbers, and close all others except `kept`."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, _DESCRIPTORS_FROM) for each in descriptors]
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*numbers, kept):
            with contextlib.suppress(OSError):
                os.close(int(name))


# Settings of JAX before this process's environment changed them.
_defaults: dict[str, Any] = {}


def _configure_jax(environment: dict[str, str]) -> None:
    """Set the options that JAX would have read from the environment when it was imported."""
    import jax
    import numpy as np

    values: dict[str, Any] = jax.config.values
    while _defaults:
        jax.config.update(*_defaults.popitem())
    for name, text in environment.items():
        option = name.lower()
        if name.startswith("JAX_") and option in values:
            _defaults[option] = values[option]
            jax.config.update(option, _parsed(text, values[option]))
    np.random.seed()


def _parsed(text: str, value: Any) -> Any:
    if isinstance(value, bool):
        return text.lower() in ("y", "yes", "t", "true", "on", "1")
    if isinstance(value, int | float):
        return type(value)(text)
    return text


def _execute(request: forked_process.Request) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if request.module:
        sys.modules.pop(request.module, None)  # was imported, and runs again
        runpy._run_module_as_main(request.module)  # type: ignore[attr-defined]
        return
    main.__dict__.update(__spec__=None)
    source: str | bytes = request.code
    if request.script:
        source = Path(request.script).read_bytes()
        main.__dict__.update(__file__=request.script, __cached__=None)
    exec(compile(source, request.script or "<string>", "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
