"""Fork Python processes from those that have imported JAX, instead of starting them with `subprocess.Popen`.

Starting Python and importing JAX takes a second of CPU time, and the suite starts hundreds of processes. `Popen` sends
commands such as `[sys.executable, "-m", "atoll.worker.worker_main", OPTIONS]` to the fork server of the run
(`tests.fork_server`). It has two processes, because workers import JAX partially. All other commands, and those with an
environment that Python reads at its start, are executed as usual. Processes that were forked start others in the same
way. A module that is marked `executed` tests how processes start, which modules they have loaded, or which parents they
have, so none of its processes is forked.

The processes of a standing cluster are in the session of its engine. The server forks an engine or a command as well,
and these fork their own children, so that children have the session and the parent of executed processes.

The Python process of a session enters its sandbox by itself, so it can be forked. The server ends it with its worker.
The children of this process are executed.

A forked process has the command line and the environment of its command in `/proc`. If the fork server has forked it,
the server is its parent there, and `children` finds it by the variable `ATOLL_TEST_PARENT`. A test of the start or the
parents of processes can set `ATOLL_TEST_EXECUTED=1` in the environment of a command, so that the command and its
children are executed. The value can also be a part of the name of a module, so that only processes of this module are
executed. Tests of what users' Python can read execute `python_main`, because the memory of the server also has the
environments of other tests' processes. `with_forked_children` has an executed process fork its children.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.process_environments import processes_with

PARENT = "ATOLL_TEST_PARENT"
EXECUTED = "ATOLL_TEST_EXECUTED"
_SERVER = "ATOLL_TEST_FORK_SERVER"
_ROOT = Path(__file__).resolve().parents[1]
# A forked process can run each `sitecustomize.py` in it, even if the process has already imported what this replaces.
_TESTS = Path(__file__).resolve().parent
# It replaces the same in all processes. Others replace something only in processes of one module.
FAULTS = _TESTS / "faults" / "sitecustomize.py"
# Module that has an executed process fork its children.
CHILDREN = _TESTS / "forked_children" / "sitecustomize.py"
_PYTHON = "atoll.host_services.python.program.python_main"
# Modules that may run in a forked process.
_MODULES = frozenset(
    {
        "atoll.controller_process.controller_main",
        "atoll.devices.compilers.fork_server",
        "atoll.engines.engine_main",
        "atoll.engines.null_hosts.null_hosts_main",
        "atoll.engines.null_hosts.null_islands_main",
        _PYTHON,
        "atoll.ifrt.proxy_main",
        "atoll.operate.command",
        "atoll.worker.worker_main",
        "tests.end_to_end.remote_python",
    }
)
# Modules for users' code, whose processes import all of JAX. The others import it partially, if at all.
_WHOLE = frozenset({_PYTHON, "tests.end_to_end.remote_python"})
# Modules whose processes fork their own children. They start no native threads and have no state that affects a child.
_LEADERS = frozenset({"atoll.engines.engine_main", "atoll.operate.command"})
# Modules whose processes do not import JAX if they are executed. If they are forked, they skip the functions with which
# JAX ends, and which take 10 ms of CPU time. The children that a leader forks run none of these functions either.
WITHOUT_JAX = _LEADERS | {"atoll.controller_process.controller_main", "atoll.ifrt.proxy_main"}
# Variables that Python, the dynamic linker, malloc or a library reads when it is loaded.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "OPENBLAS_", "OMP_", "MKL_", "TF_CPP_")
_WITHOUT_EFFECT = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"})
# Options of `subprocess.Popen` that a forked process supports.
_PLAIN = frozenset(
    {
        "env",
        "cwd",
        "stdin",
        "stdout",
        "stderr",
        "pass_fds",
        "start_new_session",
        "text",
        "errors",
        "encoding",
        "bufsize",
    }
)
_LENGTH = struct.Struct("<q")
_MAX_DESCRIPTORS = 64


@dataclass(frozen=True)
class Request:
    """Request to fork a process. One of `module`, `script` and `code` is set, and the others are empty."""

    command: tuple[str, ...]
    module: str
    script: str
    code: str
    arguments: tuple[str, ...]
    safe_path: bool
    environment: dict[str, str]
    directory: str
    descriptors: tuple[int, ...]  # numbers in the process of the descriptors that are sent with the request
    new_session: bool

    @property
    def is_leader(self) -> bool:
        """Return whether the process forks its own children."""
        return self.module in _LEADERS

    @property
    def is_partial(self) -> bool:
        """Return whether the process imports JAX partially, if at all: see `atoll.devices.partial_jax`."""
        return bool(self.module) and self.module not in _WHOLE

    @property
    def is_sandboxed(self) -> bool:
        """Return whether the process is for users' code. It then ends with its parent, and executes its children."""
        return self.module == _PYTHON


def partial(address: str) -> str:
    """Return the address of the second process of the server at `address`, which has imported JAX partially."""
    return f"{address}.partial"


class ForkServer:
    """Fork server of this process. It ends with `close`, or with this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # In the run's own directory, which is also removed if the run is killed.
        self._directory = tempfile.mkdtemp(prefix="at-", dir=os.environ.get("XDG_RUNTIME_DIR"))
        address = f"{self._directory}/fork.sock"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        self._address = address
        self._ready, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_ROOT / "tests" / "fork_server.py"), address, str(theirs.fileno())],
                env=environment,
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def address(self) -> str:
        """Return the address of the server once it is ready, or "" if it cannot fork: see `fork_server`."""
        if self._ready.fileno() >= 0:
            with self._ready:
                if [self._ready.recv(1), self._ready.recv(1)] != [b"1", b"1"]:
                    self._address = ""
        return self._address

    def close(self) -> None:
        """End the server. The processes that it has forked continue."""
        self._ready.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


Become = Callable[[Request, Sequence[int]], None]


class _Forking:
    """State of forking: whether processes are forked, and from which server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._address = ""  # of another process's server
        self._is_on = False
        self._become: Become | None = None

    def use(self, address: str) -> None:
        """Fork all processes from a server of another process."""
        self._address, self._is_on = address, True

    def fork_here(self, become: Become | None) -> None:
        """Fork all processes from this one, and call `become(request, descriptors)` in each, which never returns.

        If `become` is None, processes are forked from the server.
        """
        self._become = become

    @property
    def become(self) -> Become | None:
        return self._become

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Fork processes within the block. The server starts with the first one, and runs until `end`."""
        before, self._is_on = self._is_on, True
        try:
            yield
        finally:
            self._is_on = before

    def address(self) -> str:
        """Return the address of the server, or "" if processes are executed."""
        if not self._is_on or self._address:
            return self._address
        return self.start()

    def begin(self) -> None:
        """Start the server, which imports modules in the meantime, unless it runs."""
        with self._lock:
            if self._server is None:
                self._server = ForkServer()

    def start(self) -> str:
        """Start the server unless it runs, and return its address. Processes that are forked later share it."""
        self.begin()
        with self._lock:
            assert self._server is not None
            return self._server.address()

    def end(self) -> None:
        """End the server if this process has started it."""
        if self._server is not None and self._server.owner == os.getpid():
            self._server.close()
            self._server = None


FORKING = _Forking()


def with_forked_children(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python process that is executed itself, and whose children are forked."""
    path = os.pathsep.join(filter(None, (str(CHILDREN.parent), environment.get("PYTHONPATH"))))
    address = FORKING.address()
    return {**environment, "PYTHONPATH": path, _SERVER: address} if address else dict(environment)


def of_server(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the variables of this process that libraries read when they are loaded.

    Otherwise, a process without one of them is executed.
    """
    read = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}
    return {**environment, **read}


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """Return the live children of process `pid`, executed or forked."""
    found = {each.pid: each for each in psutil.Process(pid).children()}
    parents = {}
    for process in processes_with(PARENT, str(pid)):
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = process.ppid()
            found[process.pid] = process
    # A process that one of these starts by itself, such as the one that writes a controller's snapshot, may have the
    # same environment.
    found = {number: each for number, each in found.items() if parents.get(number) not in parents}
    if recursive:
        for each in list(found.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {child.pid: child for child in children(each.pid, recursive=True)}
    return list(found.values())


def _has_custom_start(environment: Mapping[str, str]) -> bool:
    """Return whether Python runs a `sitecustomize.py` that a forked process cannot run."""
    paths = (Path(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each)
    files = (path / "sitecustomize.py" for path in paths)
    return any(file.exists() and not file.resolve().is_relative_to(_TESTS) for file in files)


def _request(
    command: Sequence[str], environment: Mapping[str, str], directory: str, new_session: bool
) -> Request | None:
    """Return the request for a command, or None if the command must be executed."""
    executed = environment.get(EXECUTED) or os.environ.get(EXECUTED)
    if executed and (executed == "1" or any(executed in each for each in command[:4])):
        return None
    own = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}
    read = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    for name in _WITHOUT_EFFECT:
        own.pop(name, None)
        read.pop(name, None)
    if own != read or not command or command[0] != sys.executable or _has_custom_start(environment):
        return None
    rest = list(command[1:])
    safe_path = bool(rest) and rest[0] == "-P"
    rest = rest[safe_path:]
    module = script = code = ""
    if len(rest) >= 2 and rest[0] == "-m" and rest[1] in _MODULES:
        module, rest = rest[1], rest[2:]
    elif len(rest) >= 2 and rest[0] == "-c":
        code, rest = rest[1], rest[2:]
    elif rest and rest[0].endswith(".py") and os.path.isabs(rest[0]):
        script, rest = rest[0], rest[1:]
    else:
        return None
    return Request(
        tuple(command),
        module,
        script,
        code,
        tuple(rest),
        safe_path,
        {**environment, PARENT: str(os.getpid())},
        directory,
        (),
        new_session,
    )


class Popen(subprocess.Popen[Any]):
    """Like `subprocess.Popen`, but fork the process if possible."""

    _exit: socket.socket | None = None

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        self._request: Request | None = None
        self._keep: tuple[int, ...] = tuple(options.get("pass_fds", ()))
        if not others and isinstance(args, list | tuple) and set(options) <= _PLAIN:
            self._request = _request(
                [os.fsdecode(each) for each in args],
                options.get("env") or os.environ,
                os.path.abspath(os.fsdecode(options.get("cwd") or ".")),
                bool(options.get("start_new_session")),
            )
        if self._request is not None and not (FORKING.become or FORKING.address()):
            self._request = None
        super().__init__(args, *others, **options)

    def _execute_child(self, *arguments: Any) -> None:
        if self._request is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        # At these positions in CPython 3.11 to 3.13.
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = arguments[10:16]
        standard = [own if given == -1 else given for own, given in ((0, p2cread), (1, c2pwrite), (2, errwrite))]
        if FORKING.become is None:
            self.pid, self._exit = _fork(self._request, standard, self._keep)
        else:
            self.pid = _fork_here(FORKING.become, self._request, standard, self._keep)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _status(self, wait: bool) -> int | None:
        """Return the wait status after the process has ended."""
        assert self._exit is not None
        try:
            data = self._exit.recv(_LENGTH.size, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        self._exit.close()
        return -1 - int(_LENGTH.unpack(data)[0]) if data else signal.SIGKILL  # the fork server was killed

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self._exit is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and (status := self._status(wait=False)) is not None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._exit is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        status = self._status(wait=not wait_flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)


def run(
    args: Sequence[str], *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, but fork the process if possible. Return the result of the command, with its output."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def _fork(request: Request, standard: Sequence[int], keep: Sequence[int]) -> tuple[int, socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = FORKING.address()
    connection.connect(partial(address) if request.is_partial else address)
    data = pickle.dumps(replace(request, descriptors=(0, 1, 2, *keep)))
    sent = [*standard, *keep]
    socket.send_fds(connection, [_LENGTH.pack(len(data))], sent)
    connection.sendall(data)
    (pid,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if pid < 0:
        raise OSError(f"the forked process ended at its start: {request.command}")
    return pid, connection


def _fork_here(become: Become, request: Request, standard: Sequence[int], keep: Sequence[int]) -> int:
    request = replace(request, descriptors=(0, 1, 2, *keep))
    pid = os.fork()
    if pid == 0:
        try:
            become(request, [*standard, *keep])
        finally:
            os._exit(1)
    return pid


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the fork server has ended")
        data += part
    return data


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return a request and its descriptors. Used by the fork server."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_DESCRIPTORS)
    request: Request = pickle.loads(_receive(connection, _LENGTH.unpack(head)[0]))
    return request, list(descriptors)


def send_number(connection: socket.socket, number: int) -> None:
    """Send a pid, or a wait status as -1 - status. Used by the fork server."""
    with contextlib.suppress(OSError):
        connection.sendall(_LENGTH.pack(number))
