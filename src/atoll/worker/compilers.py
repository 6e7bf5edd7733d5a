"""Compiles programs of tenants in compiler processes, in fair order. Each process belongs to one session.

Each running compilation has a thread of the worker, which waits for the process. If the compilation is canceled, its
process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, OutlinedProgram, Rejected
from atoll.devices.compilers.compiler_server import Asked, CompilerCrashedError, CompilerProcess, CompilerServer
from atoll.errors import Code, Status, StatusError
from atoll.protocol.messages import CompileReport, CompileStage
from atoll.worker.compile_queue import CompileQueue, State

# Idle processes. If there are more, the one that has been idle for the longest time ends.
MAX_IDLE = 8
_CODES = frozenset(map(int, Code))


class ProgramCompilation:
    """A program that is queued or being compiled. Any thread may cancel it; its own thread calls `compile`."""

    def __init__(
        self, compilers: Compilers, number: int, session: int, work: Callable[[ProgramCompilation], None]
    ) -> None:
        self.number = number
        self.session = session
        self.work = work
        self.seconds = 0.0  # for which it had a place; set when it is compiled
        self._compilers = compilers
        self._lock = threading.Lock()
        self._process: CompilerProcess | None = None
        self._is_canceled = False

    def compile(
        self, request: CompileProgram, ask: Callable[[bytes, bytes], bytes] | None, name: str
    ) -> CompiledProgram | OutlinedProgram:
        """Compile a program. Errors call it `name` until its own name is known.

        Raise StatusError if the program cannot be compiled, and CompilerCrashedError if the process ends.
        """
        process = self._compilers.take(self.session)
        with self._lock:
            self._process = process
            if self._is_canceled:
                process.kill()
        asked = None if ask is None else Asked(ask, self._set_waiting)
        takes_more = False
        try:
            finished = process.compile(request, asked, name)
            takes_more = not finished.retires
        except CompilerCrashedError:
            with self._lock:
                if self._is_canceled:
                    raise StatusError(Code.CANCELLED, "no session needs the program now") from None
            raise
        finally:
            with self._lock:
                self._process = None
            self._compilers.give_back(self.session, process, takes_more)
            self.seconds = self._compilers.end(self)
        if isinstance(finished.outcome, Rejected):
            raise _rejection(finished.outcome.status)
        return finished.outcome

    def cancel(self) -> None:
        """Stop the compilation, because no session needs it. If it has not started, its `work` is never called."""
        with self._lock:
            self._is_canceled = True
            if self._process is not None:
                self._process.kill()
        self._compilers.cancel(self)

    @property
    def cpu_ticks(self) -> int:
        """Return the CPU time that its process has used, also for earlier compilations; 0 if it is unknown."""
        with self._lock:
            return 0 if self._process is None else self._process.cpu_ticks

    def _set_waiting(self, is_waiting: bool) -> None:
        self._compilers.set_waiting(self, is_waiting)


class Compilers:
    """The compiler processes of a host. Safe to use from any thread.

    A process compiles the programs of its session one after another. A session has several processes only while it
    compiles several programs at a time.
    """

    def __init__(self, server: CompilerServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._queue = CompileQueue()
        self._numbers = itertools.count(1)
        self._queued: dict[int, ProgramCompilation] = {}
        self._sessions: set[int] = set()  # open sessions
        self._idle: OrderedDict[CompilerProcess, int] = OrderedDict()  # with their sessions, the longest idle first

    def open(self, session: int, prepare: bool = True) -> None:
        """Keep idle processes of a new session from now on. With `prepare`, start one, because it may compile soon."""
        with self._lock:
            self._sessions.add(session)
        if prepare:
            threading.Thread(target=self._prepare, name="atoll-compile-prepare", daemon=True).start()

    def close(self, session: int) -> None:
        """End the idle processes of a session. Its busy processes end when their compilations are done."""
        with self._lock:
            self._sessions.discard(session)
            ended = [process for process, its in self._idle.items() if its == session]
            for process in ended:
                del self._idle[process]
        for process in ended:
            process.close()

    def submit(
        self, tenant: str, share: float, session: int, may_ask: bool, work: Callable[[ProgramCompilation], None]
    ) -> ProgramCompilation:
        """Queue a compilation. When its turn comes, `work` is called on a new thread to compile and report.

        Raise RESOURCE_EXHAUSTED if too many compilations of the tenant wait.
        """
        compilation = ProgramCompilation(self, next(self._numbers), session, work)
        with self._lock:
            self._queue.add(compilation.number, tenant, share, session, may_ask)
            self._queued[compilation.number] = compilation
        self._start()
        return compilation

    def statistics(self) -> dict[str, int]:
        """Return the number of compilations per state, and the number of idle processes."""
        with self._lock:
            return self._queue.statistics() | {"idle processes": len(self._idle)}

    def report(self, function: str, compilation: ProgramCompilation) -> CompileReport:
        """Report on the compilation of a function. A process makes progress if it uses CPU time.

        Reading that time takes milliseconds, and is done only for compilations that have a place, which are few.
        """
        with self._lock:
            state = self._queue.state(compilation.number)
        if state is State.QUEUED:
            return CompileReport(function, CompileStage.QUEUED)
        if state is State.ASKING:
            return CompileReport(function, CompileStage.ASKING)
        # It may have ended just now: then its thread loads the program.
        return CompileReport(function, CompileStage.COMPILING, compilation.cpu_ticks or -1)

    def _prepare(self) -> None:
        with contextlib.suppress(OSError):  # the first compilation reports the error
            self._server.prepare()

    # ---- for compilations

    def take(self, session: int) -> CompilerProcess:
        """Return a process of the session. Raise UNAVAILABLE if none can be started."""
        with self._lock:
            for process in [process for process, its in self._idle.items() if its == session]:
                del self._idle[process]
                if not process.has_ended:
                    return process
                process.close()
        try:
            return self._server.take()
        except OSError as error:
            raise StatusError(Code.UNAVAILABLE, f"no compiler process can be started on this host: {error}") from None

    def give_back(self, session: int, process: CompilerProcess, takes_more: bool) -> None:
        ended = process
        with self._lock:
            if takes_more and session in self._sessions:
                self._idle[process] = session
                if len(self._idle) <= MAX_IDLE:
                    return
                ended, _ = self._idle.popitem(last=False)
        ended.close()

    def set_waiting(self, compilation: ProgramCompilation, is_waiting: bool) -> None:
        with self._lock:
            change = self._queue.ask if is_waiting else self._queue.answered
            change(compilation.number, self._clock())
        self._start()

    def cancel(self, compilation: ProgramCompilation) -> None:
        """Remove a compilation from the queue if it has not started."""
        with self._lock:
            is_queued = self._queued.pop(compilation.number, None) is not None
        if is_queued:
            self.end(compilation)

    def end(self, compilation: ProgramCompilation) -> float:
        """Free the compilation's place for the next one. Return the seconds for which it had a place."""
        with self._lock:
            seconds = self._queue.end(compilation.number, self._clock())
        self._start()
        return seconds

    # ---- threads

    def _start(self) -> None:
        with self._lock:
            started = [self._queued.pop(number) for number in self._queue.start(self._clock())]
        for each in started:
            threading.Thread(target=self._run, args=(each,), name="atoll-compile-apart", daemon=True).start()

    def _run(self, compilation: ProgramCompilation) -> None:
        try:
            compilation.work(compilation)
        finally:
            self.end(compilation)


def _rejection(status: Status) -> StatusError:
    """Return the error for a program that a compiler process has rejected, with a valid code and no payloads.

    A tenant's program may control the process, and the controller expels a worker that reports an invalid status.
    """
    if status.ok:
        return StatusError(Code.INTERNAL, "a compiler process has rejected a program without a reason")
    return StatusError(Code(status.code) if status.code in _CODES else Code.INTERNAL, status.message)
