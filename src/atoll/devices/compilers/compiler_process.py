"""A compiler process: its limits, and its loop, which compiles one program after another.

The fork server forks it, it limits itself, and then the worker sends it programs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from atoll.cluster.environment_variables import COMPILER_MEMORY, COMPILER_SECONDS
from atoll.cluster.processes.machine_memory import machine_memory
from atoll.devices.compilers.compiler_messages import (
    Answer,
    Ask,
    Begun,
    CompiledProgram,
    CompileProgram,
    CompilerLink,
    CompilerOptions,
    Finished,
    OutlinedProgram,
    Rejected,
    ToCompiler,
)
from atoll.errors import OK, Code, FrameError, Status
from atoll.host_services.calls.client_calls import ClientError, status_of_device_error
from atoll.quantities import human_bytes

DEFAULT_SECONDS = 1800
# Bound on the wall-clock time of a compilation, as a multiple of its CPU time: the host's CPUs are shared.
_WALL_FACTOR = 10


class CompilerLimits(msgspec.Struct, frozen=True):
    """The limits of one process, and of one compilation in it.

    `memory_bytes` limits the data of a process. `seconds` limits the CPU time of all threads of a compilation, and
    `wall_seconds` its wall-clock time, without the time in which it waits for its client.
    """

    memory_bytes: int
    seconds: int
    wall_seconds: int


def limits_from_environment() -> CompilerLimits:
    """Return the limits that the environment sets, or the defaults. Raises SettingsError."""
    memory = COMPILER_MEMORY.get() or machine_memory() // 4
    seconds = COMPILER_SECONDS.get()
    limit = max(1, round(seconds)) if seconds else DEFAULT_SECONDS
    return CompilerLimits(memory, limit, limit * _WALL_FACTOR)


def memory_text(memory_bytes: int) -> str:
    """Return the text of an error for a compilation that exceeded its memory limit."""
    return (
        f"the compilation needs more than the {human_bytes(memory_bytes)} of memory that a compiler process may use; "
        f"the operator can raise {COMPILER_MEMORY.variable}"
    )


def no_memory_text(nbytes: int) -> str:
    """Return the text of XLA's error for a value that cannot be allocated."""
    return f"Out of memory allocating {nbytes} bytes."


def seconds_text(seconds: int, kind: str) -> str:
    """Return the text of an error for a compilation that exceeded a time limit, of `kind` "CPU time" or "time"."""
    return (
        f"the compilation took more than the {seconds} s of {kind} that it may use; "
        f"the operator can raise {COMPILER_SECONDS.variable}"
    )


# A process that uses more than this fraction of its memory limit exits after the compilation, so that memory that it
# does not free is not charged to the next compilation.
_RETIRES = 0.5
_MAX_FILES = 256
_STACK_BYTES = 8 << 20


class Asking:
    """The client of the program that is being compiled, at the other end of the link."""

    def __init__(self, link: CompilerLink[ToCompiler], keys: tuple[bytes, ...]) -> None:
        self.keys = keys
        self._link = link
        self._lock = threading.Lock()  # XLA may ask on several threads

    def ask(self, key: bytes, request: bytes) -> bytes:
        with self._lock:
            self._link.send(Ask(key, request))
            answer = self._link.receive()
        if not isinstance(answer, Answer):
            raise FrameError(f"expected the answer to a question of a compilation, got a {type(answer).__name__}")
        if answer.raised is not None:
            raise ClientError(answer.raised)
        (answer.status or OK).raise_if_error()
        return answer.content


class Compiler(Protocol):
    """Compiles programs for a kind of devices. A process creates one, which may start threads, before any program."""

    def compile(
        self, request: CompileProgram, asking: Asking | None, begun: Callable[[Begun], None]
    ) -> CompiledProgram | OutlinedProgram:
        """Compile a program, and call `begun` after reading it. Raises an error if it is invalid.

        If only the outline of the program is requested, return that.
        """


def limit_process(options: CompilerOptions) -> None:
    """Limit this process. Call this before it reads anything that a tenant has sent."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_DATA, options.memory_bytes),
    ):
        _limit(kind, most)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills this process before a worker
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _grant(seconds: int) -> None:
    """Let this process use `seconds` more of CPU time. The kernel ends it with SIGXCPU after that."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def serve(sock: socket.socket, options: CompilerOptions, make: Callable[[int], Compiler]) -> None:
    """Compile the programs that arrive on the link, until the worker closes it."""
    link: CompilerLink[ToCompiler] = CompilerLink(sock, ToCompiler)
    _grant(options.seconds)
    compiler = make(options.devices)
    while True:
        try:
            request = link.receive()
        except EOFError:
            return
        if not isinstance(request, CompileProgram):
            raise FrameError(f"a compiler process got a {type(request).__name__} to a question that it has not asked")
        _grant(options.seconds)
        asking = Asking(link, request.keys) if request.keys else None
        outcome: CompiledProgram | OutlinedProgram | Rejected
        try:
            outcome = compiler.compile(request, asking, link.send)
        except (EOFError, BrokenPipeError):
            return
        except MemoryError:
            outcome = Rejected(Status(Code.RESOURCE_EXHAUSTED, memory_text(options.memory_bytes)))
        except Exception as error:
            outcome = Rejected(_with_limit(status_of_device_error(error), options.memory_bytes))
        retires = resident_bytes() > options.memory_bytes * _RETIRES
        link.send(Finished(outcome, retires))
        if retires:
            return


def _with_limit(status: Status, memory_bytes: int) -> Status:
    """Return the status of a failed compilation, with the memory limit of its process if it lacked a resource."""
    if status.code != Code.RESOURCE_EXHAUSTED:
        return status
    text = (
        f"{status.message} (a compiler process may use {human_bytes(memory_bytes)} of memory; the operator can raise "
        f"{COMPILER_MEMORY.variable})"
    )
    return Status(status.code, text, status.payloads)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
