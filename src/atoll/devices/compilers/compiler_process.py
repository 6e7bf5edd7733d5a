"""A compiler process: forked by the fork server, limited, and then asked for one program after the other."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from atoll.devices.compilers.compiler_limits import memory_text
from atoll.devices.compilers.compiler_link import Link
from atoll.devices.compilers.compiler_messages import (
    Answer,
    Ask,
    Begun,
    CompiledProgram,
    CompileProgram,
    CompilerOptions,
    Finished,
    Rejected,
    ToCompiler,
)
from atoll.errors import OK, Code, FrameError, Status
from atoll.host_services.calls.client_calls import ClientError
from atoll.host_services.calls.client_errors import status_of

# A process that has grown beyond this part of its limit ends after its compilation: what it keeps must not count
# against the next one.
_RETIRES = 0.5
_MOST_FILES = 256
_STACK_BYTES = 8 << 20


class Asking:
    """The client of the program that is being compiled, at the other end of the link."""

    def __init__(self, link: Link[ToCompiler], keys: tuple[bytes, ...]) -> None:
        self.keys = keys
        self._link = link
        self._lock = threading.Lock()  # XLA may ask on several threads

    def ask(self, key: bytes, request: bytes) -> bytes:
        with self._lock:
            self._link.send(Ask(key, request))
            answer = self._link.receive()
        if not isinstance(answer, Answer):
            raise FrameError("a question of a compilation was answered by something else")
        if answer.raised is not None:
            raise ClientError(answer.raised)
        (answer.status or OK).raise_if_error()
        return answer.content


class Compiler(Protocol):
    """What a kind of devices offers to compile programs in such a process. Made once there, before the first program.

    Making it may start threads.
    """

    def compile(
        self, request: CompileProgram, asking: Asking | None, begun: Callable[[str, str], None]
    ) -> CompiledProgram:
        """Compile a program. Call `begun(name, line)` once it was read. Raises what is wrong with it."""


def limit_process(options: CompilerOptions) -> None:
    """Limit this process, before it reads anything of a tenant's."""
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_DATA, options.memory_bytes),
    ):
        _limit(what, most)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    with contextlib.suppress(OSError):  # the system ends this process before a worker if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _grant(seconds: int) -> None:
    """Limit the CPU time of what follows: the kernel ends the process by SIGXCPU."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))


def serve(sock: socket.socket, options: CompilerOptions, make: Callable[[int], Compiler]) -> None:
    """Compile what comes on the link, until the worker closes it."""
    link: Link[ToCompiler] = Link(sock, ToCompiler)
    _grant(options.seconds)
    compiler = make(options.devices)
    while True:
        try:
            request = link.receive()
        except EOFError:
            return
        if not isinstance(request, CompileProgram):
            raise FrameError(f"a compiler process got a {type(request).__name__} without having asked")
        _grant(options.seconds)
        asking = Asking(link, request.keys) if request.keys else None
        outcome: CompiledProgram | Rejected
        try:
            outcome = compiler.compile(request, asking, lambda name, line: link.send(Begun(name, line)))
        except (EOFError, BrokenPipeError):
            return
        except MemoryError:
            outcome = Rejected(Status(Code.RESOURCE_EXHAUSTED, memory_text(options.memory_bytes)))
        except Exception as error:
            outcome = Rejected(status_of(error))
        retires = resident_bytes() > options.memory_bytes * _RETIRES
        link.send(Finished(outcome, retires))
        if retires:
            return


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
