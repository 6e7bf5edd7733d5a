"""The functions of a host by name: a record with a state for each, and the transitions between the states.

            ┌───────────────────────────┐
    COMPILING ──> LOADED <──> IDLE      │       each ──> FORGOTTEN
        │           ^    └──────────────┘ (compiled again in another world)
        v           │
    UNWANTED ───────┘

`TRANSITIONS` lists the legal transitions, and `FunctionRecord.enter` refuses all others. `host_functions` and
`function_placer` cause them.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.devices.device import LoadedFunction
from atoll.errors import not_found
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.protocol.messages import Compile, CompileStage
from atoll.worker.compilers import ProgramCompilation
from atoll.worker.function_worlds import FunctionWorld
from atoll.worker.store import TypeKeys


class FunctionState(enum.IntEnum):
    COMPILING = 0  # has requests: is compiled, or waits for libraries, a world, a thread or a compiler process
    UNWANTED = 1  # as COMPILING, but no session uses it any longer: becomes idle once it is loaded
    LOADED = 2  # sessions use it
    IDLE = 3  # loaded, and no session uses it; the oldest ones are forgotten
    FORGOTTEN = 4  # has no record: failed, was canceled, or is a function of Python, which its session's process has


_S = FunctionState

# The states that may follow each state. The comments name the methods of `HostFunctions` and of
# `FunctionPlacer` that cause the transitions.
TRANSITIONS: dict[FunctionState, frozenset[FunctionState]] = {
    # `drop`; `end`, `_loaded_python`; `drop` or `stop_compiling` if a compiler process compiles it
    _S.COMPILING: frozenset({_S.UNWANTED, _S.LOADED, _S.FORGOTTEN}),
    # `compile`; `end`, `_loaded_python`; `stop_compiling`
    _S.UNWANTED: frozenset({_S.COMPILING, _S.LOADED, _S.FORGOTTEN}),
    # `drop`; `close_world` with a successor of the function's world; `drop` of a function that calls its client, or
    # `close_world`
    _S.LOADED: frozenset({_S.IDLE, _S.COMPILING, _S.FORGOTTEN}),
    # `compile`; `drop` of many others, or `close_world`
    _S.IDLE: frozenset({_S.LOADED, _S.FORGOTTEN}),
    _S.FORGOTTEN: frozenset(),
}


class Function:
    """A loaded function, with the keys of the types of its inputs and outputs.

    A function with `callbacks` belongs to its client's session, and is not kept for others. If `is_apart` is set, the
    function is on several islands whose devices do not communicate. If it has followed its arguments into a world,
    `home` is the same function in the client of the host's island.

    If `may_fail_late` is set, its results may be wrong although they are ready. A callback that fails on one of several
    devices leaves zeros for the others, and fails the run when it has ended, maybe on another host.
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
        self.may_fail_late = callbacks is not None and callbacks.spans_devices
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


class Pending(msgspec.Struct):
    """The compilation of a function. `others` are further requests for it."""

    stage: CompileStage = CompileStage.QUEUED
    thread: int = 0  # that works on it
    others: list[Compile] = msgspec.field(default_factory=list)
    in_compiler: ProgramCompilation | None = None  # by `compilers`, which know the stage
    may_ask: bool = False  # this process compiles it, and may wait for the client meanwhile

    def wait(self, stage: CompileStage = CompileStage.WAITING, may_ask: bool = False) -> None:
        """Note that the function waits, so that no thread and no compiler process works on it."""
        self.in_compiler, self.stage, self.thread, self.may_ask = None, stage, 0, may_ask


class FunctionRecord(StateMachine[FunctionState]):
    """A function of a host.

    Attributes:
        pending: Its compilation while it is COMPILING or UNWANTED, and otherwise None.
        function: The function while it is LOADED or IDLE, and otherwise None.
        info: The encoded report about the loaded function.
        title: The name that the client chose.
        world: The world in which it is loaded, and how to load it in another one.
        follower: The same function in the world of its arguments. The next call uses it: see `function_followers`.
    """

    __slots__ = ("follower", "function", "info", "name", "pending", "state", "title", "world")
    transitions = TRANSITIONS

    def __init__(self, name: str, pending: Pending) -> None:
        self.state = FunctionState.COMPILING
        self.name = name
        self.pending: Pending | None = pending
        self.function: Function | None = None
        self.info = b""
        self.title = ""
        self.world = FunctionWorld()
        self.follower: Function | None = None

    def _described(self) -> str:
        return f"function {self.name}"

    def validate(self) -> None:
        """Check that the attributes are those of the state."""
        is_pending = self.state in (FunctionState.COMPILING, FunctionState.UNWANTED)
        is_loaded = self.state in (FunctionState.LOADED, FunctionState.IDLE)
        assert (self.pending is not None) == is_pending, self.name
        assert (self.function is not None) == is_loaded, self.name
        assert self.follower is None or is_loaded, self.name


class FunctionRecords:
    """The records of a host's functions. The caller of a method holds `lock`, unless its docstring says otherwise."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._by_name: dict[str, FunctionRecord] = {}
        self._idle: OrderedDict[str, FunctionRecord] = OrderedDict()  # the longest idle first

    def get(self, name: str) -> Function:
        """Return a loaded function. Raise NOT_FOUND. Safe without the lock."""
        record = self._by_name.get(name)
        if record is None or (function := record.function) is None:
            raise not_found(f"compiled function {name} is not on this host")
        return function

    def find(self, name: str) -> FunctionRecord | None:
        """Return the record of a function, or None if it was not requested or was forgotten."""
        return self._by_name.get(name)

    def loaded(self, name: str) -> Function | None:
        """Return a function, or None if it is not loaded. Safe without the lock."""
        record = self._by_name.get(name)
        return None if record is None else record.function

    def pending(self, name: str) -> Pending | None:
        """Return the compilation of a function, or None if it is not being compiled."""
        record = self._by_name.get(name)
        return None if record is None else record.pending

    def is_compiled_in(self, name: str, compilation: ProgramCompilation) -> bool:
        """Return whether a compiler process's compilation of a function was not canceled. Called without the lock."""
        with self.lock:
            pending = self.pending(name)
            return pending is not None and pending.in_compiler is compilation

    def note_waiting(self, name: str, stage: CompileStage = CompileStage.WAITING, may_ask: bool = False) -> None:
        """Note that a function waits, so that no thread works on it. Called without the lock."""
        with self.lock:
            pending = self.pending(name)
            if pending is not None:
                pending.wait(stage, may_ask)

    def of_world(self, world: int) -> list[tuple[FunctionRecord, Function]]:
        """Return the functions that are loaded in a world."""
        found = [(record, record.function) for record in self._by_name.values()]
        return [(record, each) for record, each in found if each is not None and each.loaded.world == world]

    def compile(self, name: str, pending: Pending) -> None:
        """Begin a compilation: of a new function, again because it was lost, or of a loaded one in another world."""
        record = self._by_name.get(name)
        if record is None:
            self._by_name[name] = FunctionRecord(name, pending)
            return
        if record.pending is None:
            record.enter(FunctionState.COMPILING)
        record.pending, record.function, record.follower = pending, None, None

    def load(self, record: FunctionRecord, function: Function, info: bytes, title: str) -> None:
        """Note that a function is compiled and loaded."""
        record.enter(FunctionState.LOADED)
        record.pending, record.function, record.info, record.title = None, function, info, title

    def drop(self, record: FunctionRecord) -> None:
        """Note that no session uses a function any longer."""
        if record.state is FunctionState.COMPILING:
            record.enter(FunctionState.UNWANTED)
        elif record.state is FunctionState.LOADED:
            record.enter(FunctionState.IDLE)
            self._idle[record.name] = record

    def use(self, record: FunctionRecord) -> None:
        """Note that a session uses a function, which may have been dropped."""
        if record.state is FunctionState.UNWANTED:
            record.enter(FunctionState.COMPILING)
        elif record.state is FunctionState.IDLE:
            record.enter(FunctionState.LOADED)
            del self._idle[record.name]

    def forget(self, record: FunctionRecord) -> None:
        """Remove a function."""
        record.enter(FunctionState.FORGOTTEN)
        self._idle.pop(record.name, None)
        del self._by_name[record.name]
        record.pending = record.function = record.follower = None

    def surplus(self, max_idle: int) -> FunctionRecord | None:
        """Return the function that has been idle for the longest time if more than `max_idle` are idle."""
        return next(iter(self._idle.values())) if len(self._idle) > max_idle else None

    def validate(self) -> None:
        """Check that records and states fit. Tests call this."""
        for record in self._by_name.values():
            record.validate()
            assert record.state is not FunctionState.FORGOTTEN, record.name
            assert (record.state is FunctionState.IDLE) == (record.name in self._idle), record.name
