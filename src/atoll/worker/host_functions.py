"""The compiled functions of a host. Each is compiled once, on other threads, and kept while a session may use it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from atoll.cluster.processes.bugs import start_in
from atoll.cluster.sandbox.grants import USER_RULES, PythonRules
from atoll.decodable import decodable
from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, OutlinedProgram, RenamedTarget
from atoll.devices.compilers.compiler_server import CompilerCrashedError
from atoll.devices.device import Assignment, DeviceBackend, LoadedFunction, ProgramLoader
from atoll.errors import OK, Code, Status, StatusError, invalid, not_found, unimplemented
from atoll.host_services.calls.call_threads import SessionThreads
from atoll.host_services.calls.client_calls import Calls, status_of_device_error
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.host_services.profiles.xspace import Programs
from atoll.host_services.python.python_sessions import PythonSessions
from atoll.ir.types import DTYPE_BITS
from atoll.protocol.messages import (
    CloseWorld,
    Compile,
    Compiled,
    CompileReport,
    CompileStage,
    FunctionInfo,
    FunctionSource,
    LoadInWorld,
    NeedsWorld,
)
from atoll.transfers.inbox import Inbox
from atoll.worker.compilers import Compilation, Compilers
from atoll.worker.function_worlds import FunctionWorlds, Recipe, Waiting, place
from atoll.worker.host_libraries import HostLibraries
from atoll.worker.host_worlds import HostWorlds
from atoll.worker.store import TypeKeys

COMPILE_THREADS = 2
# Functions that no session refers to. They are kept for the next script that sends the same program.
IDLE_FUNCTIONS = 512
# The report about an IFRT IR program, which the controller forwards.
MOST_OUTLINE_BYTES = 4 << 20
# A compiled program that can follow its arguments into a world stays in memory for that. Larger ones do not follow.
MOST_FOLLOWING_BYTES = 8 << 20
# Memory of a function on each device.
MOST_BYTES = 1 << 61
# CPU time of this process that counts as progress of the compilations in it.
_CPU_STEP_SECONDS = 10.0
_read_source = msgspec.msgpack.Decoder(decodable(FunctionSource)).decode


class Function:
    """A loaded function, with the keys of the types of its inputs and outputs.

    A function with `callbacks` belongs to its client's session, and is not kept for others. If `is_apart` is set, the
    function is on several islands whose devices do not communicate. If it has followed its arguments into a world,
    `home` is the same function in the client of the host's island.
    """

    def __init__(
        self,
        loaded: LoadedFunction,
        keys: TypeKeys,
        callbacks: Callbacks | None = None,
        is_apart: bool = False,
        home: Function | None = None,
    ) -> None:
        self.loaded = loaded
        self.home = home
        self.callbacks = callbacks
        self.is_apart = is_apart
        self.ordinals = loaded.ordinals
        count = len(self.ordinals)

        def key(dtype: str, shape: tuple[int, ...], layout: tuple[int, ...] | None) -> int:
            return keys.of(dtype, (shape,) * count, self.ordinals, layout)

        self.input_keys = [
            key(*each, layout) for each, layout in zip(loaded.parameters, loaded.parameter_layouts, strict=True)
        ]
        self.token_positions = frozenset(
            position for position, (dtype, _) in enumerate(loaded.parameters) if dtype == "token"
        )
        self.output_keys = [
            key(*each, layout) for each, layout in zip(loaded.outputs, loaded.output_layouts, strict=True)
        ]


@dataclass
class _Pending:
    """A function that is not compiled yet. `others` are further requests for it."""

    stage: CompileStage = CompileStage.QUEUED
    thread: int = 0  # that works on it
    others: list[Compile] = field(default_factory=list)
    in_compiler: Compilation | None = None  # by `compilers`, which know the stage
    may_ask: bool = False  # this process compiles it, and may wait for the client meanwhile


class Functions:
    """Compiled functions by name.

    These attributes say what happens to a function. It is in several of them at once only as stated:

    | attribute | the function |
    |---|---|
    | `_compiling` | has requests, and is compiled, or waits for libraries, a world, a thread or a compiler process |
    | `_dropped` | is also in `_compiling`: no session uses it, so it becomes idle once it is compiled |
    | `_functions`, `_info` | is loaded |
    | `_idle` | is also in `_functions`: no session uses it, and the oldest ones are forgotten |
    | `_followers` | is also in `_functions`: it was loaded in the world of its arguments, and the next call uses that |

    `_function_worlds` has what the functions in worlds need to be compiled again in another one.

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
        report: Callable[[Compiled | NeedsWorld], None],
        pool: Pool | None = None,
        calls: Calls | None = None,
        python: PythonSessions | None = None,
        compilers: Compilers | None = None,
        worlds: HostWorlds | None = None,
        cpu_seconds: Callable[[], float] = time.process_time,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._libraries = HostLibraries(backend.libraries)
        self.python = python or PythonSessions(None)
        self._compilers = compilers
        self._worlds = worlds
        self._backend = backend
        self._inbox = inbox
        self._keys = keys
        self._report = report
        self._calls = calls
        self._pool = pool or ThreadPoolExecutor(COMPILE_THREADS, "atoll-compile")
        self._asking = SessionThreads("atoll-compile-asking")
        self._lock = threading.Lock()
        self._functions: dict[str, Function] = {}
        self._info: dict[str, tuple[bytes, str]] = {}  # encoded, and the name that the client chose
        self._compiling: dict[str, _Pending] = {}
        self.programs = Programs()
        self.may_wait = False  # whether some run in worlds, or together with other hosts
        self._function_worlds = FunctionWorlds()
        self.calling_clients = 0  # number of functions that call their clients
        self._followers: dict[str, Function] = {}  # loaded, and used from the next call on: see `follow`
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._dropped: set[str] = set()  # dropped while they were being compiled

    def compile(self, message: Compile) -> None:
        """Compile a function whose source has arrived, unless it is already compiled. Report in either case."""
        with self._lock:
            self._idle.pop(message.function, None)
            self._dropped.discard(message.function)
            if message.function in self._functions:
                self.programs.compiled(message.function, "", message.session)
                info, name = self._info[message.function]
                self._inbox.drop(message.session, message.feed)
                function = self._functions[message.function]
                scratch = function.loaded.scratch_bytes
                calls, is_apart = bool(function.callbacks), function.is_apart
                self._report(Compiled(message.function, OK, info, 0.0, True, scratch, calls, name, is_apart=is_apart))
                return
            pending = self._compiling.get(message.function)
            if pending is not None and pending.stage is not CompileStage.UNKNOWN:
                pending.others.append(message)
                if self._function_worlds.awaits_world(message.function):  # the answer came only to waiting sessions
                    self._report(NeedsWorld(message.function))
                return
            others = [] if pending is None else pending.others
            self._compiling[message.function] = _Pending(others=others)
        self._start_when_joined(message)

    def stages_of(self, functions: Sequence[str]) -> tuple[CompileReport, ...]:
        """Report what this host does about the compilations of these functions."""
        with self._lock:
            # Other threads change these entries.
            found = [
                (name, CompileStage.UNKNOWN, False, None)
                if each is None
                else (name, each.stage, each.may_ask, each.in_compiler)
                for name, each in ((name, self._compiling.get(name)) for name in functions)
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

    def _enter(self, name: str, stage: CompileStage, may_ask: bool = False) -> None:
        """Note that the function waits, so that no thread works on it."""
        with self._lock:
            pending = self._compiling.get(name)
            if pending is not None:
                pending.stage, pending.thread, pending.may_ask = stage, 0, may_ask

    @contextlib.contextmanager
    def _working(self, name: str, in_compiler: Compilation | None = None) -> Iterator[None]:
        """Note that this thread works on the function. Unless it passes the function on or ends it, it loses it."""
        thread = threading.get_ident()
        with self._lock:
            pending = self._compiling.get(name)
            if pending is not None and pending.in_compiler is in_compiler:
                pending.stage, pending.thread = CompileStage.COMPILING, thread
        yield  # an exception ends the worker
        with self._lock:
            if pending is not None and pending is self._compiling.get(name) and pending.thread == thread:
                pending.stage, pending.thread, pending.in_compiler = CompileStage.UNKNOWN, 0, None

    def _start_when_joined(self, message: Compile) -> None:
        """Start the compilation when this host has joined the function's world, if it needs one.

        A function on several islands is compiled first if the controller wants that: see `_place`.
        """
        if message.world and not message.islands and self._worlds is not None:
            self.may_wait = True
            self._enter(message.function, CompileStage.WAITING)
            self._worlds.when_joined(message.world, lambda status: start_in(self._pool, self._start, message, status))
        else:
            start_in(self._pool, self._start, message)

    def _start(self, message: Compile, joined: Status = OK) -> None:
        """Load a Python function, or compile a program: in a compiler process, or here.

        A program that asks its client while it is compiled has another thread. `joined` is the outcome of joining the
        function's world.
        """
        with self._working(message.function):
            self._begin(message, joined)

    def _begin(self, message: Compile, joined: Status) -> None:
        try:
            source = self._source(message)
            joined.raise_if_error()
            if source.is_python:
                if message.islands:
                    self._await_world(Waiting(message, source, partial(self._load_python, source)))
                else:
                    self._load_python(source, message)
                return
            if message.ranks[1] and not message.world and not message.islands and self._worlds is not None:
                raise invalid("RegisterFunction.runs_apart is for functions of Python")
            if message.world and not message.islands:
                with self._lock:
                    self._function_worlds.enter(Recipe(message, source))
            if source.is_library:
                self._libraries.load(message, source.program)
                self._end(message, None, OK)
                return
            if source.targets:
                self._enter(message.function, CompileStage.WAITING)
                compile_ = partial(start_in, self._pool, self._compile_loaded, message, source)
                self._libraries.when_loaded(message, source.targets, compile_)
                return
        except Exception as error:
            self._end(message, None, status_of_device_error(error))
            return
        self._compile_source(message, source)

    def _load_python(self, source: FunctionSource, message: Compile) -> None:
        self._enter(message.function, CompileStage.WAITING)
        self.python.load(message, source.program, lambda status: self._loaded_python(message.function, status))

    def _compile_loaded(self, message: Compile, source: FunctionSource, libraries: Status) -> None:
        """Compile a program with custom calls of libraries, unless one of them could not be loaded."""
        if libraries.ok:
            self._compile_source(message, source)
        else:
            self._end(message, None, libraries)

    def _compile_source(self, message: Compile, source: FunctionSource) -> None:
        with self._working(message.function):
            self._choose_compiler(message, source)

    def _choose_compiler(self, message: Compile, source: FunctionSource) -> None:
        needs_process = bool(message.tenant) or source.fragment is not None
        if needs_process and self._compilers is not None and self._backend.loader is not None:
            try:
                self._submit_to_compiler(message, source, self._compilers, self._backend.loader)
            except Exception as error:
                self._end(message, None, status_of_device_error(error))
        elif source.fragment is not None:
            text = f"devices of platform {self._backend.platform} run no IFRT IR programs (MPMD)"
            self._end(message, None, unimplemented(text).status)
        elif source.keys:
            self._enter(message.function, CompileStage.QUEUED, may_ask=True)
            self._asking.submit(source.session, lambda: self._compile(message, source))
        else:
            self._compile(message, source)

    def _compile(self, message: Compile, source: FunctionSource) -> None:
        with self._working(message.function):
            try:
                callbacks = self._callbacks(source, message)
                targets = self._libraries.register(message, source.targets)
                if message.islands and self._backend.loader is not None:
                    request = self._request(message, source, callbacks, targets)
                    program, cached, seconds = self._backend.loader.compile_over_islands(
                        request, callbacks, message.tenant
                    )
                    self._place(message, source, program, callbacks, seconds, cached)
                    return
                compiled = self._compile_here(message, source.program, source.options, callbacks, targets)
                loaded, cached, seconds = compiled
                function = Function(loaded, self._keys, callbacks)
                self._end(message, function, OK, loaded.info(), seconds, cached)
            except Exception as error:
                self._end(message, None, status_of_device_error(error))

    def _compile_here(
        self,
        message: Compile,
        program: bytes,
        options: bytes,
        callbacks: Callbacks | None,
        targets: tuple[RenamedTarget, ...],
    ) -> tuple[LoadedFunction, bool, float]:
        compile_ = self._backend.compile
        if targets:  # devices without libraries need not take any
            compile_ = partial(compile_, targets=targets)
        return compile_(program, options, self._assignment(message), callbacks, message.tenant, message.world)

    def _submit_to_compiler(
        self, message: Compile, source: FunctionSource, compilers: Compilers, loader: ProgramLoader
    ) -> None:
        """Load the program from the cache, or queue it for a compiler process. Raise RESOURCE_EXHAUSTED."""
        callbacks = self._callbacks(source, message)
        targets = self._libraries.register(message, source.targets)
        request = self._request(message, source, callbacks, targets)
        kept = loader.find(request, message.tenant)
        if kept is not None and message.islands and kept.has_parts:
            self._place(message, source, kept, callbacks, 0.0, True)
            return
        if kept is not None and not message.islands:
            loaded = loader.load(kept, message.assignment, callbacks, message.world)
            function = Function(loaded, self._keys, callbacks)
            self._end(message, function, OK, function.loaded.info(), cached=True)
            return

        def work(compilation: Compilation) -> None:
            with self._working(message.function, compilation):
                compile_in_process(compilation)

        def compile_in_process(compilation: Compilation) -> None:
            function, info, status, crashed = None, None, OK, False
            try:
                ask = callbacks.ask if callbacks is not None and source.keys else None
                program = compilation.compile(request, ask, f"program {message.content[:12]}")
                if isinstance(program, OutlinedProgram):
                    info = _outlined(program)
                elif message.islands and program.description is not None:
                    loader.keep(request, message.tenant, program)
                    if self._compiles(message.function, compilation):
                        self._place(message, source, program, callbacks, compilation.seconds, False)
                    return
                else:
                    function = Function(self._loaded(message, request, program, callbacks), self._keys, callbacks)
                    info = function.loaded.info()
            except CompilerCrashedError as error:
                status, crashed = error.status, True
            except Exception as error:
                status = status_of_device_error(error)
            if self._compiles(message.function, compilation):
                self._end(message, function, status, info, compilation.seconds, crashed=crashed)

        with self._lock:
            if message.function in self._dropped:
                self._forget_compiling(message.function)
                return
            pending = self._compiling[message.function]
            pending.thread = 0
            pending.in_compiler = compilers.submit(
                message.tenant, message.share, message.session, bool(source.keys), work
            )

    def _compiles(self, name: str, compilation: Compilation) -> bool:
        """Return whether a compilation was not canceled."""
        with self._lock:
            pending = self._compiling.get(name)
            return pending is not None and pending.in_compiler is compilation

    def _request(
        self,
        message: Compile,
        source: FunctionSource,
        callbacks: Callbacks | None,
        targets: tuple[RenamedTarget, ...],
    ) -> CompileProgram:
        return CompileProgram(
            source.program,
            source.options,
            len(message.assignment),
            len(message.assignment[0]),
            self._backend.platform,
            0 if callbacks is None else len(callbacks),
            source.keys,
            source.channels,
            source.fragment,
            targets,
        )

    def _place(
        self,
        message: Compile,
        source: FunctionSource,
        program: CompiledProgram,
        callbacks: Callbacks | None,
        seconds: float,
        cached: bool,
    ) -> None:
        """Load a function on several islands, in a world if it needs one."""
        loader, description = self._backend.loader, program.description
        assert loader is not None
        assert description is not None
        has_joined = self._worlds is not None and self._worlds.has_joined(message.world)
        placement = place(message, description, bool(callbacks), has_joined)
        if placement.must_wait:
            load = partial(self._place, source=source, program=program, callbacks=callbacks)
            self._await_world(Waiting(message, source, partial(load, seconds=seconds, cached=cached)))
            return
        message = msgspec.structs.replace(message, world=placement.world)
        may_follow = not message.world and len(program.executable) <= MOST_FOLLOWING_BYTES
        with self._lock:
            self._function_worlds.enter(Recipe(message, source, program if may_follow else None))
            self.may_wait = self.may_wait or bool(message.world)
        loaded = loader.load(program, message.assignment, callbacks, message.world, message.ranks)
        function = Function(loaded, self._keys, callbacks, placement.is_apart)
        with self._lock:
            if message.function not in self._compiling:
                return  # the compilation was canceled
        self._end(message, function, OK, loaded.info(), seconds, cached)

    def _await_world(self, waiting: Waiting) -> None:
        """Load a function when this host has joined its world. If it has none, ask the controller for it."""
        message = waiting.message
        with self._lock:
            pending = self._compiling.get(message.function)
            if pending is None:  # the compilation was canceled
                return
            self._function_worlds.await_world(waiting)
            pending.in_compiler, pending.stage, pending.thread, pending.may_ask = None, CompileStage.WAITING, 0, False
            if message.function in self._dropped:
                self._forget_compiling(message.function)
                return
        if message.world:
            self.load_in_world(LoadInWorld(message.function, message.world))
        else:
            self._report(NeedsWorld(message.function))

    def load_in_world(self, message: LoadInWorld) -> None:
        """Load a function in the world that the controller has chosen, when this host has joined it."""
        if self._worlds is None:
            return
        with self._lock:
            waiting = self._function_worlds.named(message.function, message.world)
            if waiting is None:
                return
            self.may_wait = True
        self._worlds.when_joined(message.world, lambda status: start_in(self._pool, self._load_joined, waiting, status))

    def _load_joined(self, waiting: Waiting, joined: Status) -> None:
        with self._working(waiting.message.function):
            try:
                joined.raise_if_error()
                waiting.load(waiting.message)
            except Exception as error:
                self._end(waiting.message, None, status_of_device_error(error))

    def _loaded(
        self, message: Compile, request: CompileProgram, program: CompiledProgram, callbacks: Callbacks | None
    ) -> LoadedFunction:
        """Load a program from a compiler process. If the process could only check the program, compile it here."""
        loader = self._backend.loader
        if program.description is None or loader is None:
            return self._compile_here(
                message, program.program or request.program, request.options, callbacks, request.targets
            )[0]
        loaded = loader.load(program, message.assignment, callbacks, message.world)
        loader.keep(request, message.tenant, program)
        return loaded

    def _end(
        self,
        message: Compile,
        function: Function | None,
        status: Status,
        info: FunctionInfo | None = None,
        seconds: float = 0.0,
        cached: bool = False,
        crashed: bool = False,
    ) -> None:
        if function is not None and info is not None and (problem := _size_problem(function.loaded, info)) is not None:
            function, info, status = None, None, problem
        with self._lock:
            closing = None if self._worlds is None else self._worlds.closing_of(message.world)
            is_apart = function is not None and function.is_apart
            if closing is not None:
                function, info, status = None, None, closing.status
            again = None if closing is None else self._after_closing(message, closing, is_apart)
            if again is not None:
                start_in(self._pool, self._recompile, again)
                return
            encoded = b"" if info is None else msgspec.msgpack.encode(info)
            pending = self._compiling.pop(message.function, None)
            others = [] if pending is None else pending.others
            worlds = self._function_worlds
            waiting = worlds.forget(message.function) if function is None else worlds.arrived(message.function)
            if function is not None and info is not None:
                for each in (message, *others):
                    self.programs.compiled(message.function, info.name, each.session)
                self._functions[message.function] = function
                self.may_wait = self.may_wait or function.loaded.is_joint
                self.calling_clients += bool(function.callbacks)
                self._info[message.function] = encoded, info.name
            if message.function in self._dropped:
                self._dropped.discard(message.function)
                self._make_idle(message.function)
        for wake in waiting:
            wake()
        for other in others:
            self._inbox.drop(other.session, other.feed)
        scratch = 0 if function is None else function.loaded.scratch_bytes
        calls_client = function is not None and bool(function.callbacks)
        name = "" if info is None else info.name
        is_apart = function is not None and function.is_apart
        self._report(
            Compiled(message.function, status, encoded, seconds, cached, scratch, calls_client, name, crashed, is_apart)
        )

    def _after_closing(self, message: Compile, closing: CloseWorld, is_apart: bool) -> Recipe | None:
        """Return how to compile a function whose world was closed, or None. The caller holds the lock."""
        pending = self._compiling.setdefault(message.function, _Pending())
        pending.in_compiler, pending.stage, pending.thread = None, CompileStage.WAITING, 0
        return self._function_worlds.after_closing(message, closing, is_apart, pending.others)

    def _recompile(self, recipe: Recipe) -> None:
        """Compile a function again, in the world of the recipe if it has one."""
        message, source = recipe.message, recipe.source
        if source is None:
            self._start_when_joined(message)
        elif message.world and self._worlds is not None:
            self._worlds.when_joined(message.world, partial(self._move, message, source))
        else:
            self._compile_source(message, source)

    def _forget_compiling(self, name: str) -> None:
        """Forget a compilation for which no session waits any longer. The caller holds the lock."""
        self._dropped.discard(name)
        pending = self._compiling.pop(name, None)
        for other in [] if pending is None else pending.others:
            self._inbox.drop(other.session, other.feed)
        for wake in self._function_worlds.forget(name):  # these runs fail, because the function is not here
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

    def _loaded_python(self, function: str, status: Status) -> None:
        with self._lock:
            self._compiling.pop(function, None)
            dropped = function in self._dropped
            self._dropped.discard(function)
        if dropped:
            self.python.drop(function)
        self._report(Compiled(function, status, b"", 0.0, False))

    def _source(self, message: Compile) -> FunctionSource:
        """Return the source that the first session sent. If that has ended, use that of another waiting session."""
        while True:
            try:
                return self._source_of(message)
            except StatusError:
                with self._lock:
                    others = self._compiling[message.function].others
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

    def _assignment(self, message: Compile) -> Assignment:
        """Return the assignment of a function: only this island's part if these devices join no worlds."""
        first, count = message.ranks
        if self._worlds is not None or not count:
            return message.assignment
        return tuple(
            tuple((rank - first, ordinal) for rank, ordinal in row if first <= rank < first + count)
            for row in message.assignment
        )

    def _callbacks(self, source: FunctionSource, message: Compile) -> Callbacks | None:
        if not source.callbacks or self._calls is None:
            return None
        session, numbers, devices = source.session, source.callbacks, sum(map(len, message.assignment))
        return Callbacks(self._calls, session, numbers, devices > 1, source.keys, source.channels)

    def get(self, name: str) -> Function:
        function = self._functions.get(name)
        if function is None:
            raise not_found(f"compiled function {name} is not on this host")
        return function

    def session_of(self, name: str) -> int:
        """Return the session whose client the function calls or whose Python it is, or 0 for other functions."""
        function = self._functions.get(name)
        callbacks = None if function is None else function.callbacks
        return (self.python.session_of(name) or 0) if callbacks is None else callbacks.session

    def callbacks_of(self, name: str) -> Callbacks | None:
        """Return the calls of a function into its client's process, or None if it makes none or is not here."""
        function = self._functions.get(name)
        return (function.callbacks or None) if function is not None else None

    def drop(self, name: str) -> None:
        """Drop a function to which no session refers. It is kept until many others have been dropped after it.

        A function that calls its client is dropped at once, so call this only when its session's runs have been
        enqueued. If a compiler process is compiling the function, the process is killed and nothing is reported.
        """
        with self._lock:
            if self._stop(name):
                return
            if name in self._compiling:
                self._dropped.add(name)
            elif self.python.session_of(name) is not None:
                self.python.drop(name)
            elif name in self._functions:
                self._make_idle(name)

    def stop_compiling(self, name: str) -> None:
        """Kill the compiler process that compiles a function, and report nothing. Keep a function that is compiled."""
        with self._lock:
            self._stop(name)

    def _stop(self, name: str) -> bool:
        """Stop a compilation in a compiler process. Return whether there was one. The caller holds the lock."""
        pending = self._compiling.get(name)
        if pending is None or (pending.in_compiler is None and not self._function_worlds.awaits_world(name)):
            return False
        self._forget_compiling(name)
        if pending.in_compiler is not None:
            pending.in_compiler.cancel()
        return True

    def _make_idle(self, name: str) -> None:
        if name not in self._functions:  # it could not be compiled
            return
        callbacks = self._functions[name].callbacks
        if callbacks is not None:
            self._forget(name)
            self.calling_clients -= bool(callbacks)
            return
        self._idle[name] = None
        self._idle.move_to_end(name)
        while len(self._idle) > IDLE_FUNCTIONS:
            oldest, _ = self._idle.popitem(last=False)
            self._forget(oldest)

    def close_world(self, message: CloseWorld) -> None:
        """Leave a world, and drop its functions, or compile them again in its successor."""
        worlds = self._worlds
        if worlds is None:
            return
        moving: list[Recipe] = []
        worlds.note_closing(message)
        with self._lock:
            lost = [name for name, each in self._functions.items() if each.loaded.world == message.world]
            for name in lost:
                if self._functions[name].home is not None:  # its next run returns there
                    continue
                self.calling_clients -= bool(self._functions[name].callbacks)
                is_idle = name in self._idle
                self._idle.pop(name, None)
                recipe = self._function_worlds.leave(name, 0 if is_idle else message.successor)
                self._unload(name)
                if recipe is not None:
                    self._compiling[name] = _Pending(CompileStage.WAITING)
                    moving.append(recipe)
        worlds.close(message)
        self.python.close_world(message)
        for recipe in moving:
            self._recompile(recipe)

    def _move(self, message: Compile, source: FunctionSource, joined: Status) -> None:
        """Compile a function in another world, on the pool's threads. A function with `islands` may not need it."""
        if joined.ok or message.islands:
            with self._lock:
                self._function_worlds.enter(Recipe(message, source))
            start_in(self._pool, self._compile_source, message, source)
        else:
            self._end(message, None, joined)

    def follow(self, name: str, world: int) -> bool:
        """Have a function that is apart run in the world of its arguments, and return whether it does now.

        Its runs then need not wait until the arguments are computed. The first call begins to load the function there,
        and a later call uses it. Only the executor's thread may call this, since its runs use the function.
        """
        with self._lock:
            follower = self._followers.pop(name, None)
            if follower is not None and follower.loaded.world == world and follower.home is self._functions.get(name):
                self._functions[name] = follower
                return True
            recipe = self._function_worlds.follow(name, world)
        if recipe is not None:
            start_in(self._pool, self._load_follower, recipe)
        return False

    def _load_follower(self, recipe: Recipe) -> None:
        """Load a function in the world of its arguments, unless that is not possible."""
        message, program, loader = recipe.message, recipe.program, self._backend.loader
        home = self._functions.get(message.function)
        if home is None or program is None or program.description is None or loader is None or self._worlds is None:
            return
        placement = place(message, program.description, False, self._worlds.has_joined(message.world))
        if placement.world != message.world:  # hosts of an island communicate, or the world was closed
            return
        try:
            loaded = loader.load(program, message.assignment, None, message.world, message.ranks)
            follower = Function(loaded, self._keys, is_apart=True, home=home)
        except StatusError:  # the world was closed meanwhile
            return
        with self._lock:
            if self._functions.get(message.function) is home:
                self._followers[message.function] = follower

    def in_open_world(self, name: str) -> Function:
        """Return a function, which returns home if the world into which it has followed its arguments is closed.

        Only the executor's thread may call this, since its runs use the function. Raise NOT_FOUND.
        """
        function = self.get(name)
        if function.home is None or (self._worlds is not None and self._worlds.has_joined(function.loaded.world)):
            return function
        with self._lock:
            if self._functions.get(name) is function:
                self._functions[name] = function.home
        return function.home

    def closing_of(self, world: int) -> Status:
        """Return why a world was closed; OK if it is open."""
        closing = None if self._worlds is None else self._worlds.closing_of(world)
        return OK if closing is None else closing.status

    def awaits(self, name: str, wake: Callable[[], None]) -> bool:
        """Return whether the function moves to another world. If so, call `wake` on any thread afterwards."""
        with self._lock:
            return self._function_worlds.awaits_move(name, wake)

    def _forget(self, name: str) -> None:
        """Forget a compiled function that no session uses. The caller holds the lock."""
        self._unload(name)
        self._function_worlds.forget(name)

    def _unload(self, name: str) -> None:
        """Drop a compiled function, which may be compiled again. The caller holds the lock."""
        del self._functions[name], self._info[name]
        self._followers.pop(name, None)
        self.programs.dropped(name)

    def answer(self, what: str, name: str) -> bytes:
        """Return the cost analysis (JSON) or the text of a function. Raise UNIMPLEMENTED for other questions."""
        loaded = self.get(name).loaded
        match what:
            case "cost":
                return msgspec.json.encode(loaded.cost_analysis())
            case "text":
                return loaded.text().encode()
        raise unimplemented(f"this worker cannot answer the question {what!r} about a function")


def _size_problem(loaded: LoadedFunction, info: FunctionInfo) -> Status | None:
    """Return why no device can run the function, or None. A compiler process can report any numbers.

    The controller would take larger numbers for a violation, and end this worker.
    """
    largest = max((math.prod(each.shape) * DTYPE_BITS.get(each.dtype, 0) // 8 for each in info.outputs), default=0)
    if 0 <= loaded.scratch_bytes < MOST_BYTES and largest < MOST_BYTES:
        return None
    # XLA's sums are signed, so larger ones can be negative.
    found = f"{loaded.scratch_bytes} bytes while it runs, and {largest} bytes for its largest output"
    text = f"out of memory: {info.name[:200]} needs {found} on each device: at most {MOST_BYTES - 1} are possible"
    return Status(int(Code.RESOURCE_EXHAUSTED), text)


def _outlined(program: OutlinedProgram) -> FunctionInfo:
    """Return the report about an IFRT IR program, of which a compiler process has read the outline.

    Raise RESOURCE_EXHAUSTED if it is too large.
    """
    name = program.outline.program.name
    info = FunctionInfo(name, b"", None, (), (), (), {}, 0, outline=program.outline)
    size = len(msgspec.msgpack.encode(info))
    if size > MOST_OUTLINE_BYTES:
        text = (
            f"the program {name[:200]!r} has an outline of {size:,} bytes: at most {MOST_OUTLINE_BYTES:,} are allowed"
        )
        raise StatusError(Code.RESOURCE_EXHAUSTED, text)
    return info
