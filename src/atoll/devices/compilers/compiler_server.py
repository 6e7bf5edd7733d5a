"""The worker's side of its compiler processes: it starts the fork server, and has processes compile programs."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from atoll.cluster.environment_variables import LOG
from atoll.cluster.processes.child import signal_name
from atoll.cluster.processes.oom_kills import OomKills
from atoll.cluster.processes.process_logging import attributed_line
from atoll.cluster.processes.process_runtime import command
from atoll.cluster.processes.process_table import cpu_ticks
from atoll.decodable import decodable
from atoll.devices.compilers.compiler_messages import (
    Answer,
    Ask,
    Begun,
    CompileProgram,
    CompilerLink,
    CompilerOptions,
    Ended,
    Finished,
    Fork,
    Forked,
    FromCompiler,
    FromServer,
    Kill,
    TimeLimit,
)
from atoll.devices.compilers.compiler_process import CompilerLimits, memory_text, no_memory_text, seconds_text
from atoll.errors import Code, FrameError, Status, StatusError
from atoll.host_services.calls.client_calls import ClientError

_log = logging.getLogger(__name__)

_MODULE = "atoll.devices.compilers.fork_server"
# Variables that a compiler process inherits from the worker. Others may contain secrets.
_INHERITED = (
    *("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "GLIBC_TUNABLES"),
    *("XLA_FLAGS", "JAX_ENABLE_X64", "TF_CPP_MIN_LOG_LEVEL", "NPROC", LOG.variable),
)
_PACKET_BYTES = 4096
_PIPE_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(decodable(FromServer)).decode
_END_SECONDS = 5.0
# An error quotes this many characters and lines of the end of a process's output.
_MAX_CHARACTERS, _MAX_LINES = 600, 20
# If a killed process used more than this fraction of its memory limit, the error names the limit as the cause.
_NEAR_LIMIT = 0.8


class Output:
    """The output of a process, whose lines are forwarded to this process's standard error. Errors quote its end.

    Stack frames of C++ are not quoted. XLA prints one per line, after the readable part.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MAX_LINES)
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Read the available output, up to what a pipe holds. Return False if the process has closed its end.

        A process that always writes more must not occupy the thread, which handles the ends of all processes.
        """
        for _ in range(_PIPE_BYTES // _PACKET_BYTES):
            try:
                part = os.read(self._descriptor, _PACKET_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            *lines, self._rest = (self._rest + part).split(b"\n")
            self._rest = self._rest[:_PACKET_BYTES]
            _forward(lines)
            self._lines.extend(each for each in lines if not each.lstrip().startswith(b"@"))
        return True

    def text(self) -> str:
        return b"\n".join((*self._lines, self._rest))[-_MAX_CHARACTERS:].decode(errors="replace").strip()

    def close(self) -> None:
        os.close(self._descriptor)
        if self._rest:
            _forward([self._rest])


def _forward(lines: Sequence[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"".join([attributed_line(line, "compiler") for line in lines]))


class CompilerCrashedError(Exception):
    """The compiler process ended unexpectedly. The worker reports `status` to the user, never this error itself."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


class Asked:
    """The client of a program that is being compiled. Each question calls `waiting(True)` and then `waiting(False)`."""

    def __init__(self, ask: Callable[[bytes, bytes], bytes], waiting: Callable[[bool], None]) -> None:
        self._ask = ask
        self._waiting = waiting

    def answer(self, question: Ask) -> Answer:
        self._waiting(True)
        try:
            return Answer(self._ask(question.key, question.request))
        except ClientError as error:
            return Answer(raised=str(error))
        except StatusError as error:
            return Answer(status=error.status)
        finally:
            self._waiting(False)


class CompilerProcess:
    """One compiler process. One thread at a time may compile with it; any thread may kill it."""

    def __init__(
        self, number: int, link: CompilerLink[Any], output: Output, limits: CompilerLimits, kill: Callable[[int], None]
    ) -> None:
        self.number = number
        self.output = output
        self._link = link
        self._limits = limits
        self._kill = kill
        self._kills = OomKills()
        self._has_ended = threading.Event()
        self._end: Ended | None = None
        self._pid = 0  # until it has started

    def compile(self, request: CompileProgram, asked: Asked | None, name: str) -> Finished:
        """Compile a program in the process, and return the outcome.

        Blocks. Raises CompilerCrashedError if the process ends, or if this method kills it because it takes too long,
        and StatusError if it could not be started (UNAVAILABLE), or has ended because a value within the program is too
        large (RESOURCE_EXHAUSTED).
        Errors use `name` for the program until the process has read it.
        """
        try:
            return self._compile(request, asked, name)
        except BaseException:
            self.close()
            raise

    def _compile(self, request: CompileProgram, asked: Asked | None, name: str) -> Finished:
        begun = Begun(name, "")
        limit = TimeLimit(self._limits.wall_seconds)
        try:
            self._link.send(request)
            while True:
                message = self._link.receive(limit)
                match message:
                    case Finished():
                        return message
                    case Begun():
                        begun = message
                    case Ask() if asked is not None:
                        self._link.send(asked.answer(message))
                    case _:
                        raise FrameError("a question for a client that has announced no callables")
        except TimeoutError:
            self.kill()
            text = seconds_text(self._limits.wall_seconds, "time")
            raise _crash(begun, Code.DEADLINE_EXCEEDED, text) from None
        except FrameError as error:
            self.kill()
            raise _crash(begun, Code.INTERNAL, f"the compiler process sent {error}") from None
        except (EOFError, OSError):
            self.kill()  # the process may have closed its link without ending
            raise self._end_error(begun) from None

    def _end_error(self, begun: Begun) -> CompilerCrashedError | StatusError:
        self._has_ended.wait(_END_SECONDS)
        end = self._end
        if end is not None and end.problem:
            return StatusError(Code.UNAVAILABLE, f"no compiler process can be started on this host: {end.problem}")
        if end is None:
            return _crash(begun, Code.INTERNAL, "the compiler process was lost")
        if end.status == -signal.SIGFPE and begun.too_large > 0:  # as if the value had been allocated
            return StatusError(Code.RESOURCE_EXHAUSTED, no_memory_text(begun.too_large))
        if end.status == -signal.SIGXCPU:
            return _crash(begun, Code.RESOURCE_EXHAUSTED, seconds_text(self._limits.seconds, "CPU time"))
        if end.status < 0 and end.max_bytes > _NEAR_LIMIT * self._limits.memory_bytes:
            return _crash(begun, Code.RESOURCE_EXHAUSTED, memory_text(self._limits.memory_bytes))
        how = f"ended by {signal_name(-end.status)}" if end.status < 0 else f"exited with {end.status}"
        how += self._kills.note(end.status)
        text = self.output.text()
        quoted = f"; its last lines:\n{text}" if text else ""
        return _crash(begun, Code.INTERNAL, f"the compiler process {how}{quoted}")

    def kill(self) -> None:
        """Send SIGKILL to the process unless it has ended."""
        self._kill(self.number)

    def ended(self, end: Ended | None) -> None:
        """Record the end of the process, after all of its output was read. `end` is None if the fork server ended.

        Called by the server's thread.
        """
        self._end = end
        self._has_ended.set()

    def forked(self, pid: int) -> None:
        """Record that the process has started. Called by the server's thread."""
        self._pid = pid

    @property
    def cpu_ticks(self) -> int:
        """Return the CPU time of the process and of its children, in ticks; 0 if it is unknown."""
        if not self._pid or self.has_ended:
            return 0
        try:
            return cpu_ticks(self._pid, with_children=True)
        except OSError:
            return 0

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def close(self) -> None:
        """Close the link. An idle process exits then."""
        self._link.close()


def _crash(begun: Begun, code: Code, text: str) -> CompilerCrashedError:
    where = f" ({begun.line})" if begun.line else ""
    whole = f"{begun.name}{where} cannot be compiled: {text}"
    # A tenant has chosen the names, and may have made the process print anything.
    safe = "".join(each if each.isprintable() or each == "\n" else "?" for each in whole)
    return CompilerCrashedError(Status(int(code), safe))


class CompilerServer:
    """Starts compiler processes with a fork server, which it starts with the first process. For any thread.

    After the first call of `take`, one process is always ready for the next caller.
    """

    def __init__(self, compiler: str, devices: int, limits: CompilerLimits) -> None:
        self._options = CompilerOptions(compiler, devices, limits.memory_bytes, limits.seconds)
        self._limits = limits
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None  # while the server runs
        self._poller = select.epoll()  # for the server and the output of its processes
        self._processes: dict[int, CompilerProcess] = {}
        self._spare: CompilerProcess | None = None

    def prepare(self) -> None:
        """Start a process for the next caller unless there is one. Raises OSError."""
        with self._lock:
            if self._spare is None or self._spare.has_ended:
                self._close_spare()
                self._spare = self._fork()

    def take(self) -> CompilerProcess:
        """Return a process that has compiled nothing yet, and start another one. Raises OSError."""
        with self._lock:
            process = self._spare
            if process is None or process.has_ended:
                self._close_spare()
                process = self._fork()
            self._spare = None
            with contextlib.suppress(OSError):  # the next caller tries again
                self._spare = self._fork()
        return process

    def close(self) -> None:
        """End the server and all its processes."""
        with self._lock:
            if self._control is not None:
                self._control.shutdown(socket.SHUT_RDWR)

    # ---- called with the lock held

    def _close_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
        self._spare = None

    def _fork(self) -> CompilerProcess:
        control = self._running()
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        readable, writable = os.pipe()
        output = Output(readable)
        process = CompilerProcess(number, CompilerLink(ours, FromCompiler), output, self._limits, self._kill)
        self._processes[number] = process
        self._poller.register(readable, select.EPOLLIN)
        try:
            socket.send_fds(control, [_encode(Fork(number))], [theirs.fileno(), writable])
        finally:
            theirs.close()
            os.close(writable)
        return process

    def _running(self) -> socket.socket:
        """Return the connection to the server. Start the server if it does not run."""
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                command(_MODULE, msgspec.structs.replace(self._options, control=theirs.fileno())),
                stdin=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        self._poller.register(ours, select.EPOLLIN)
        threading.Thread(target=self._receive, args=(ours, process), name="atoll-compiler-server", daemon=True).start()
        return ours

    def _kill(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None and number in self._processes:
                self._control.send(_encode(Kill(number)))

    # ---- the server's thread

    def _receive(self, control: socket.socket, server: subprocess.Popen[bytes]) -> None:
        with control, contextlib.suppress(OSError):
            while self._receive_some(control):
                pass
        with self._lock:
            lost, self._processes = self._processes, {}
            self._control = None
            self._close_spare()
        server.wait()  # the kernel kills its processes when it ends, not when its connection closes
        for process in lost.values():
            self._ended(process, None)
        if server.returncode:
            _log.warning("the fork server of this host's compilers exited with %d", server.returncode)

    def _receive_some(self, control: socket.socket) -> bool:
        """Wait for messages of the server and output of its processes. Return False if the server has ended."""
        ready = {descriptor for descriptor, _ in self._poller.poll()}
        with self._lock:
            outputs = [each.output for each in self._processes.values() if each.output.fileno() in ready]
        for output in outputs:
            if not output.read():
                self._poller.unregister(output)
        if control.fileno() not in ready:
            return True
        packet = control.recv(_PACKET_BYTES)
        if not packet:
            return False
        message = _decode(packet)
        with self._lock:
            process = self._processes.get(message.number)
            if isinstance(message, Ended):
                self._processes.pop(message.number, None)
        if process is None:
            return True
        if isinstance(message, Forked):
            process.forked(message.pid)
        else:
            self._ended(process, message)
        return True

    def _ended(self, process: CompilerProcess, end: Ended | None) -> None:
        process.output.read()
        process.output.close()
        process.ended(end)


def _environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name in _INHERITED}
    return found | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
