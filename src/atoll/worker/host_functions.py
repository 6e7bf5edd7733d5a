"""The compiled functions of a host. Each is compiled once, on other threads, and kept while a session may use it.

`program_compiler` compiles programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from atoll.cluster.processes.bugs import start_in
from atoll.cluster.sandbox.grants import USER_RULES, PythonRules
from atoll.decodable import decodable
from atoll.devices.compilers.compiler_server import CompilerCrashedError
from atoll.devices.device import DeviceBackend
from atoll.errors import OK, Status, StatusError, invalid
from atoll.host_services.calls.call_threads import SessionThreads
from atoll.host_services.calls.client_calls import Calls, status_of_device_error
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.profiles.xspace import Programs
from atoll.host_services.python.python_sessions import PythonSessions
from atoll.protocol.messages import (
    CloseWorld,
    Compile,
    Compiled,
    CompileReport,
    CompileStage,
    FunctionSource,
    NeedsWorld,
)
from atoll.transfers.inbox import Inbox
from atoll.worker.compile_results import CompileResult, compiled
from atoll.worker.compilers import Compilers, ProgramCompilation
from atoll.worker.function_followers import Followers
from atoll.worker.function_placer import FunctionPlacer
from atoll.worker.function_records import Function, FunctionRecord, FunctionRecords, FunctionState, Pending
from atoll.worker.function_worlds import Recipe, Waiting
from atoll.worker.host_libraries import HostLibraries
from atoll.worker.host_worlds import HostWorlds
from atoll.worker.program_compiler import ProgramCompiler
from atoll.worker.store import TypeKeys

COMPILE_THREADS = 2
# Functions that no session refers to. They are kept for the next script that sends the same program.
IDLE_FUNCTIONS = 512
# CPU time of this process that counts as progress of the compilations in it.
_CPU_STEP_SECONDS = 10.0
_read_source = msgspec.msgpack.Decoder(decodable(FunctionSource)).decode


class HostFunctions:
    """Compiled functions by name.

    `function_records` has the states of a function.

    Args:
        report: Receives the outcomes of compilations, on the threads of `pool`, which compile.
        calls: Carries the functions' calls into their clients' processes.
        compilers: Compile the programs of tenants. Without them, this process compiles these programs.
        cpu_seconds: Returns the CPU time of this process.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        inbox: Inbox,
        keys: TypeKeys,
        *,
        report: Callable[[Compiled | NeedsWorld], None],
        pool: Pool | None = None,
        calls: Calls | None = None,
        python: PythonSessions | None = None,
        compilers: Compilers | None = None,
        worlds: HostWorlds | None = None,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self.records = FunctionRecords()
        self._cpu_seconds = cpu_seconds
        self._libraries = HostLibraries(backend.libraries)
        self.python = python or PythonSessions(None)
        self._compilers = compilers
        self._has_worlds = worlds is not None
        self._inbox = inbox
        self._report = report
        self._pool = pool or ThreadPoolExecutor(COMPILE_THREADS, "atoll-compile")
        self._asking = SessionThreads("atoll-compile-asking")
        self.programs = Programs()
        self.placer = FunctionPlacer(self.records, worlds, self, report)
        self._compiler = ProgramCompiler(
            backend,
            keys,
            self,
            records=self.records,
            placer=self.placer,
            libraries=self._libraries,
            calls=calls,
            compilers=compilers,
            has_worlds=self._has_worlds,
        )
        self.followers = Followers(self.records, worlds, backend.loader, keys, self._pool)
        self.calling_clients = 0  # number of functions that call their clients

    def compile(self, message: Compile) -> None:
        """Compile a function whose source has arrived, unless it is already compiled. Report in either case."""
        with self.records.lock:
            record = self.records.find(message.function)
            if record is not None:
                self.records.use(record)
            if record is not None and record.function is not None:
                self.programs.compiled(message.function, "", message.session)
                self._inbox.drop(message.session, message.feed)
                result = CompileResult(function=record.function, cached=True)
                self._report(compiled(message.function, result, record.info, record.title))
                return
            pending = None if record is None else record.pending
            if pending is not None and pending.stage is not CompileStage.UNKNOWN:
                pending.others.append(message)
                if record is not None and record.world.is_awaited:  # the answer came only to waiting sessions
                    self._report(NeedsWorld(message.function))
                return
            others = [] if pending is None else pending.others
            self.records.compile(message.function, Pending(others=others))
        self.placer.begin(message)

    def stages_of(self, functions: Sequence[str]) -> tuple[CompileReport, ...]:
        """Report what this host does about the compilations of these functions."""
        with self.records.lock:
            # Other threads change these entries.
            found = [
                (name, CompileStage.UNKNOWN, False, None)
                if each is None
                else (name, each.stage, each.may_ask, each.in_compiler)
                for name, each in ((name, self.records.pending(name)) for name in functions)
            ]
        return tuple(
            CompileReport(name, stage, self._progress_here(stage, may_ask))
            if in_compiler is None or self._compilers is None
            else self._compilers.report(name, in_compiler)
            for name, stage, may_ask, in_compiler in found
        )

    def _progress_here(self, stage: CompileStage, may_ask: bool) -> int:
        """Return a number that changes while this process compiles, or -1 if it does not, or may wait for its client.

        XLA compiles on its own threads, so the CPU time of the whole process counts. It is rounded, since a process
        that waits in vain also answers pings. A compilation that waits beside a busy one seems to make progress.
        """
        is_busy = stage is CompileStage.COMPILING and not may_ask
        return int(self._cpu_seconds() / _CPU_STEP_SECONDS) if is_busy else -1

    # ---- work on threads

    def start(self, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work(message, *arguments)` on another thread. If it raises an error, the compilation fails."""
        start_in(self._pool, self._work_on, message, work, *arguments)

    def start_asking(self, session: int, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        """Do the same as `start`, on one of the session's threads: the work asks the session's client, and may wait."""
        self._asking.submit(session, partial(self._work_on, message, work, *arguments))

    def _work_on(self, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        """Do some work for a compilation, on this thread."""
        with self.working(message):
            work(message, *arguments)

    @contextlib.contextmanager
    def working(self, message: Compile, in_compiler: ProgramCompilation | None = None) -> Iterator[None]:
        """Note that this thread works on the function, and report an error as the end of the compilation.

        If the thread returns without passing the function on or ending it, the compilation is lost, and its stage is
        UNKNOWN. With `in_compiler`, the work is that of a compiler process, which may have been canceled.
        """
        name, thread = message.function, threading.get_ident()
        with self.records.lock:
            pending = self.records.pending(name)
            if pending is not None and pending.in_compiler is in_compiler:
                pending.stage, pending.thread = CompileStage.COMPILING, thread
        try:
            yield
        except Exception as error:
            seconds = 0.0 if in_compiler is None else in_compiler.seconds
            if isinstance(error, CompilerCrashedError):
                result = CompileResult(error.status, seconds=seconds, crashed=True)
            else:
                result = CompileResult(status_of_device_error(error), seconds=seconds)
            if in_compiler is None or self.records.is_compiled_in(name, in_compiler):
                self.end(message, result)
        with self.records.lock:
            if pending is not None and pending is self.records.pending(name) and pending.thread == thread:
                pending.wait(CompileStage.UNKNOWN)

    def begin(self, message: Compile, joined: Status = OK) -> None:
        """Load a Python function or a library, or compile a program.

        A program that asks its client while it is compiled has another thread. `joined` is the outcome of joining the
        function's world.
        """
        source = self._source(message)
        joined.raise_if_error()
        if source.is_python:
            if message.islands:
                self.placer.await_world(Waiting(message, source, partial(self._load_python, source)))
            else:
                self._load_python(source, message)
            return
        if message.ranks[1] and not message.world and not message.islands and self._has_worlds:
            raise invalid("RegisterFunction.runs_apart is for functions of Python")
        if message.world and not message.islands:
            self.placer.enter(Recipe(message, source))
        if source.is_library:
            self._libraries.load(message, source.program)
            self.end(message, CompileResult())
        elif source.targets:
            self.records.note_waiting(message.function)
            compile_ = partial(self.start, message, self._compile_loaded, source)
            self._libraries.when_loaded(message, source.targets, compile_)
        else:
            self._compiler.compile_source(message, source)

    def compile_source(self, message: Compile, source: FunctionSource) -> None:
        """Compile a program whose source is at hand, on this thread."""
        self._compiler.compile_source(message, source)

    def _load_python(self, source: FunctionSource, message: Compile) -> None:
        self.records.note_waiting(message.function)
        self.python.load(message, source.program, lambda status: self._loaded_python(message.function, status))

    def _compile_loaded(self, message: Compile, source: FunctionSource, libraries: Status) -> None:
        """Compile a program with custom calls of libraries. Raise StatusError if one of them could not be loaded."""
        libraries.raise_if_error()
        self._compiler.compile_source(message, source)

    def end(self, message: Compile, result: CompileResult) -> None:
        """Keep a compiled function, and report the result. Compile it again if its world was closed meanwhile."""
        result, encoded = result.checked()
        name = message.function
        with self.records.lock:
            record = self.records.find(name)
            if record is None or record.pending is None:  # the compilation was canceled
                return
            closing = self.placer.closing_of(message.world)
            again = None if closing is None else self.placer.after_closing(message, closing, record, result)
            others = record.pending.others
            if closing is not None:
                result, encoded = result.failed(closing.status), b""
            title = "" if result.info is None else result.info.name
            if again is not None:
                waiting: Iterable[Callable[[], None]] = ()
            elif result.function is None:
                self.records.forget(record)
                waiting = record.world.take_runs()
            else:
                for each in (message, *others):
                    self.programs.compiled(name, title, each.session)
                waiting = record.world.take_runs()
                self._note_loaded(record, result.function, encoded, title)
        if again is not None:
            self.placer.compile_again(again)
            return
        for wake in waiting:
            wake()
        for other in others:
            self._inbox.drop(other.session, other.feed)
        self._report(compiled(name, result, encoded, title))

    def _note_loaded(self, record: FunctionRecord, function: Function, info: bytes, title: str) -> None:
        """Note that a function is compiled and loaded. The caller holds the lock."""
        is_unwanted = record.state is FunctionState.UNWANTED
        self.records.load(record, function, info, title)
        self.placer.note_loaded(function)
        self.calling_clients += bool(function.callbacks)
        if is_unwanted:
            self._release(record, function)

    def cancel(self, record: FunctionRecord) -> None:
        """Forget a compilation for which no session waits any longer. The caller holds the lock."""
        others = [] if record.pending is None else record.pending.others
        self.records.forget(record)
        for other in others:
            self._inbox.drop(other.session, other.feed)
        for wake in record.world.take_runs():  # these runs fail, because the function is not here
            wake()

    def open(self, session: int, tenant: str, python: PythonRules = USER_RULES) -> None:
        """Prepare for a new session."""
        self.python.begin(session, python)
        if self._compilers is not None:
            self._compilers.open(session, prepare=bool(tenant))

    def close(self, session: int) -> None:
        """Free what a session has, except its functions, which the controller drops one by one."""
        self.python.close(session)
        self.programs.close(session)
        self._libraries.close(session)
        if self._compilers is not None:
            self._compilers.close(session)

    def close_world(self, message: CloseWorld) -> None:
        """Leave a world, and drop its functions, or have them move to its successor."""
        moving = self.placer.close_world(message)
        self.python.close_world(message)
        for recipe in moving:
            self.placer.compile_again(recipe)

    def _loaded_python(self, name: str, status: Status) -> None:
        with self.records.lock:
            record = self.records.find(name)
            is_unwanted = record is not None and record.state is FunctionState.UNWANTED
            if record is not None:
                self.records.forget(record)
        if is_unwanted:
            self.python.drop(name)
        self._report(compiled(name, CompileResult(status)))

    def _source(self, message: Compile) -> FunctionSource:
        """Return the source that the first session sent. If that has ended, use that of another waiting session."""
        while True:
            try:
                return self._source_of(message)
            except StatusError:
                with self.records.lock:
                    pending = self.records.pending(message.function)
                    others = [] if pending is None else pending.others
                    if not others:
                        raise
                    message = others.pop(0)

    def _source_of(self, message: Compile) -> FunctionSource:
        """Take the source of one session. Raise StatusError if it is missing, or does not have the stated hash."""
        content, done = self._inbox.take(message.session, message.feed)
        try:
            if message.content and hashlib.sha256(content).hexdigest() != message.content:
                raise invalid(f"the program that session {message.session} has sent does not have the hash it states")
            return _read_source(content)
        finally:
            done()

    def get(self, name: str) -> Function:
        """Return a loaded function. Raise NOT_FOUND. Safe on any thread."""
        return self.records.get(name)

    def session_of(self, name: str) -> int:
        """Return the session whose client the function calls or whose Python it is, or 0 for other functions."""
        function = self.records.loaded(name)
        callbacks = None if function is None else function.callbacks
        return (self.python.session_of(name) or 0) if callbacks is None else callbacks.session

    def callbacks_of(self, name: str) -> Callbacks | None:
        """Return the calls of a function into its client's process, or None if it makes none or is not here."""
        function = self.records.loaded(name)
        return (function.callbacks or None) if function is not None else None

    def drop(self, name: str) -> None:
        """Drop a function to which no session refers. It is kept until many others have been dropped after it.

        A function that calls its client is dropped at once, so call this only when its session's runs have been
        enqueued. If a compiler process is compiling the function, the process is killed and nothing is reported.
        """
        with self.records.lock:
            record = self.records.find(name)
            if record is None:
                if self.python.session_of(name) is not None:
                    self.python.drop(name)
            elif record.function is not None:
                self._release(record, record.function)
            elif not self._stop(record):
                self.records.drop(record)

    def stop_compiling(self, name: str) -> None:
        """Kill the compiler process that compiles a function, and report nothing. Keep a function that is compiled."""
        with self.records.lock:
            record = self.records.find(name)
            if record is not None:
                self._stop(record)

    def _stop(self, record: FunctionRecord) -> bool:
        """Stop a compilation in a compiler process. Return whether there was one. The caller holds the lock."""
        pending = record.pending
        if pending is None or (pending.in_compiler is None and not record.world.is_awaited):
            return False
        self.cancel(record)
        if pending.in_compiler is not None:
            pending.in_compiler.cancel()
        return True

    def _release(self, record: FunctionRecord, function: Function) -> None:
        """Keep a function that no session uses, among the last `IDLE_FUNCTIONS`. The caller holds the lock."""
        if function.callbacks is not None:
            self._forget(record)
            return
        self.records.drop(record)
        while (oldest := self.records.surplus(IDLE_FUNCTIONS)) is not None:
            self._forget(oldest)

    def _forget(self, record: FunctionRecord) -> None:
        """Forget a loaded function that no session uses. The caller holds the lock."""
        self.unload(record)
        self.records.forget(record)

    def unload(self, record: FunctionRecord) -> None:
        """Note that a loaded function leaves the host, or is compiled again. The caller holds the lock."""
        self.calling_clients -= record.function is not None and bool(record.function.callbacks)
        self.programs.dropped(record.name)
