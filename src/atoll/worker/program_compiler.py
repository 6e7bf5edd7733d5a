"""Compiles the programs of functions: in this process or in a compiler process, for one island or for several.

`host_functions` decides when a function is compiled, and keeps the result.
"""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec.structs import replace

from atoll.devices.compilers.compiler_messages import CompiledProgram, CompileProgram, OutlinedProgram, RenamedTarget
from atoll.devices.compilers.compiler_server import CompilerCrashedError
from atoll.devices.device import Assignment, DeviceBackend, LoadedFunction, MayCrashError, ProgramLoader
from atoll.errors import OK, Status, unimplemented
from atoll.host_services.calls.client_calls import Calls
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.protocol.messages import Compile, CompileStage, FunctionSource
from atoll.worker.compile_results import CompileResult, outlined
from atoll.worker.compilers import Compilers, ProgramCompilation
from atoll.worker.function_placer import Compilations, FunctionPlacer
from atoll.worker.function_records import Function, FunctionRecords, FunctionState
from atoll.worker.function_worlds import Recipe, Waiting
from atoll.worker.host_libraries import HostLibraries
from atoll.worker.store import TypeKeys

# A compiled program that can follow its arguments into a world stays in memory for that. Larger ones do not follow.
MAX_FOLLOWING_BYTES = 8 << 20


class _Prepared(msgspec.Struct, frozen=True):
    """A program with what this host adds before it is compiled: its calls into its client, and its custom calls."""

    source: FunctionSource
    callbacks: Callbacks | None
    targets: tuple[RenamedTarget, ...]

    def request(self, assignment: Assignment, platform: str) -> CompileProgram:
        """Return the request to a compiler process."""
        source = self.source
        return CompileProgram(
            source.program,
            source.options,
            len(assignment),
            len(assignment[0]),
            platform,
            0 if self.callbacks is None else len(self.callbacks),
            source.keys,
            source.channels,
            source.fragment,
            self.targets,
        )


class ProgramCompiler:
    """Compiles and loads programs. Each compilation ends with `compilations.end`.

    Args:
        compilations: Provides threads, and receives the results.
        calls: Carries the functions' calls into their clients' processes.
        compilers: Compile the programs of tenants. Without them, this process compiles these programs.
        has_worlds: Whether the devices join worlds.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        keys: TypeKeys,
        compilations: Compilations,
        *,
        records: FunctionRecords,
        placer: FunctionPlacer,
        libraries: HostLibraries,
        calls: Calls | None,
        compilers: Compilers | None,
        has_worlds: bool,
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._compilations = compilations
        self._records = records
        self._placer = placer
        self._libraries = libraries
        self._calls = calls
        self._compilers = compilers
        self._has_worlds = has_worlds

    def compile_source(self, message: Compile, source: FunctionSource) -> None:
        """Compile a program: in a compiler process, on another thread if it asks its client, or on this thread."""
        needs_process = bool(message.tenant) or source.fragment is not None
        if needs_process and self._compilers is not None and self._backend.loader is not None:
            self._submit_to_compiler(message, source, self._compilers, self._backend.loader)
        elif source.fragment is not None:
            raise unimplemented(f"devices of platform {self._backend.platform} run no IFRT IR programs (MPMD)")
        elif source.keys:
            self._records.note_waiting(message.function, CompileStage.QUEUED, may_ask=True)
            self._compilations.start_asking(source.session, message, self._compile, source)
        else:
            self._compile(message, source)

    def _compile(self, message: Compile, source: FunctionSource) -> None:
        """Compile a program in this process, or in a compiler process if that might end this process."""
        try:
            self._compile_in_this_process(message, source)
        except MayCrashError as error:
            if self._compilers is None or self._backend.loader is None:
                error.status.raise_if_error()
            else:
                self._submit_to_compiler(message, source, self._compilers, self._backend.loader, error.status)

    def _compile_in_this_process(self, message: Compile, source: FunctionSource) -> None:
        prepared = self._prepare(message, source)
        loader = self._backend.loader
        if message.islands and loader is not None:
            request = prepared.request(message.assignment, self._backend.platform)
            program, cached, seconds = loader.compile_over_islands(request, prepared.callbacks, message.tenant)
            self._load_over_islands(message, prepared, program, seconds, cached)
            return
        loaded, cached, seconds = self._compile_here(message, prepared, source.program)
        self._compilations.end(message, self._result(loaded, prepared, seconds, cached))

    def _prepare(self, message: Compile, source: FunctionSource) -> _Prepared:
        """Prepare a program for its compilation. Raise StatusError if a library lacks a target."""
        return _Prepared(source, self._callbacks(source, message), self._libraries.register(message, source.targets))

    def _compile_here(
        self, message: Compile, prepared: _Prepared, program: bytes
    ) -> tuple[LoadedFunction, bool, float]:
        """Compile a program in this process. Return the function, whether it was cached, and the seconds."""
        compile_ = self._backend.compile
        if prepared.targets:  # devices without libraries need not take any
            compile_ = partial(compile_, targets=prepared.targets)
        options, assignment = prepared.source.options, self._assignment(message)
        return compile_(program, options, assignment, prepared.callbacks, message.tenant, message.world)

    def _result(
        self,
        loaded: LoadedFunction,
        prepared: _Prepared,
        seconds: float = 0.0,
        cached: bool = False,
        is_apart: bool = False,
    ) -> CompileResult:
        function = Function(loaded, self._keys, prepared.callbacks, is_apart)
        return CompileResult(OK, function, loaded.info(), seconds, cached)

    def _submit_to_compiler(
        self,
        message: Compile,
        source: FunctionSource,
        compilers: Compilers,
        loader: ProgramLoader,
        after_crash: Status | None = None,
    ) -> None:
        """Load the program from the cache, or queue it for a compiler process. Raise RESOURCE_EXHAUSTED.

        If it ends the process, the compilation fails with `after_crash`, or with an error that names the crash.
        """
        prepared = self._prepare(message, source)
        cached = loader.find(prepared.request(message.assignment, self._backend.platform), message.tenant)
        if cached is not None and message.islands and cached.has_parts:
            self._load_over_islands(message, prepared, cached, seconds=0.0, cached=True)
            return
        if cached is not None and not message.islands:
            loaded = loader.load(cached, message.assignment, prepared.callbacks, message.world)
            self._compilations.end(message, self._result(loaded, prepared, cached=True))
            return

        def work(compilation: ProgramCompilation) -> None:
            with self._compilations.working(message, compilation):
                self._compile_in_process(message, prepared, loader, after_crash, compilation)

        with self._records.lock:
            record = self._records.find(message.function)
            if record is None or record.pending is None:
                return
            if record.state is FunctionState.UNWANTED:
                self._compilations.cancel(record)
                return
            record.pending.thread = 0
            record.pending.in_compiler = compilers.submit(
                message.tenant, message.share, message.session, bool(source.keys), work
            )

    def _compile_in_process(
        self,
        message: Compile,
        prepared: _Prepared,
        loader: ProgramLoader,
        after_crash: Status | None,
        compilation: ProgramCompilation,
    ) -> None:
        """Compile a program in a compiler process, load it here, and report it unless it was canceled meanwhile."""
        callbacks = prepared.callbacks
        ask = callbacks.ask if callbacks is not None and prepared.source.keys else None
        request = prepared.request(message.assignment, self._backend.platform)
        try:
            program = compilation.compile(request, ask, f"program {message.content[:12]}")
        except CompilerCrashedError:
            if after_crash is not None:
                after_crash.raise_if_error()
            raise
        if isinstance(program, OutlinedProgram):
            result = CompileResult(info=outlined(program))
        elif message.islands and program.description is not None:
            loader.keep(request, message.tenant, program)
            if self._records.is_compiled_in(message.function, compilation):
                self._load_over_islands(message, prepared, program, compilation.seconds, cached=False)
            return
        elif program.description is None:  # the process could only check the program
            loaded, _, _ = self._compile_here(message, prepared, program.program or request.program)
            result = self._result(loaded, prepared)
        else:
            loaded = loader.load(program, message.assignment, callbacks, message.world)
            loader.keep(request, message.tenant, program)
            result = self._result(loaded, prepared)
        if self._records.is_compiled_in(message.function, compilation):
            self._compilations.end(message, replace(result, seconds=compilation.seconds))

    def _load_over_islands(
        self, message: Compile, prepared: _Prepared, program: CompiledProgram, seconds: float, cached: bool
    ) -> None:
        """Load a function on several islands, in a world if it needs one."""
        loader, description, source = self._backend.loader, program.description, prepared.source
        assert loader is not None
        assert description is not None
        placement = self._placer.placement_of(message, description, bool(prepared.callbacks))
        if placement.must_wait:
            load = partial(self._load_over_islands, prepared=prepared, program=program, seconds=seconds, cached=cached)
            self._placer.await_world(Waiting(message, source, load))
            return
        message = msgspec.structs.replace(message, world=placement.world)
        may_follow = not message.world and len(program.executable) <= MAX_FOLLOWING_BYTES
        self._placer.enter(Recipe(message, source, program if may_follow else None))
        loaded = loader.load(program, message.assignment, prepared.callbacks, message.world, message.ranks)
        self._compilations.end(message, self._result(loaded, prepared, seconds, cached, placement.is_apart))

    def _assignment(self, message: Compile) -> Assignment:
        """Return the assignment of a function: only this island's part if these devices join no worlds."""
        first, count = message.ranks
        if self._has_worlds or not count:
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
