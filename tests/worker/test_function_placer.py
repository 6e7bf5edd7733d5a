"""Functions of a host that wait for worlds, and move when these are closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from atoll.devices.compilers.compiler_messages import Description
from atoll.devices.null.model import MODELS
from atoll.devices.null.null_backend import Collectives, NullBackend
from atoll.devices.null.null_program import NullProgram
from atoll.errors import OK, Code, Status
from atoll.protocol.messages import (
    CloseWorld,
    Compile,
    CompileStage,
    FunctionInfo,
    FunctionSource,
    LoadInWorld,
    NeedsWorld,
)
from atoll.state.closed_worlds import ended_with_others
from atoll.worker.compile_results import CompileResult
from atoll.worker.function_placer import FunctionPlacer
from atoll.worker.function_records import Function, FunctionRecord, FunctionRecords, FunctionState, Pending
from atoll.worker.function_worlds import Recipe, Waiting
from atoll.worker.store import TypeKeys
from tests.devices.null.test_sim_events import HandClock

LOST = Status(int(Code.UNAVAILABLE), "island 1 has failed")
SOURCE = FunctionSource(b"program", b"")


class Worlds:
    """Worlds that this host joins when a test calls `joins`."""

    def __init__(self) -> None:
        self.joins: dict[int, Callable[[Status], None]] = {}
        self.closed: dict[int, CloseWorld] = {}
        self.joined: set[int] = set()

    def when_joined(self, world: int, then: Callable[[Status], None]) -> None:
        self.joins[world] = then

    def has_joined(self, world: int) -> bool:
        return world in self.joined

    def note_closing(self, message: CloseWorld) -> None:
        self.closed[message.world] = message

    def closing_of(self, world: int) -> CloseWorld | None:
        return self.closed.get(world)

    def close(self, message: CloseWorld) -> None:
        self.joined.discard(message.world)


class Loaded:
    """A function of a null device that is loaded in a world."""

    def __init__(self, loaded: Any, world: int, is_joint: bool = False) -> None:
        self._loaded = loaded
        self.world = world
        self.is_joint = is_joint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)


class Rig:
    """A placer whose compilations are recorded: `done` has what was asked, with the function's world."""

    def __init__(self) -> None:
        self.records = FunctionRecords()
        self.worlds = Worlds()
        self.done: list[tuple[Any, ...]] = []
        self.placer = FunctionPlacer(self.records, cast(Any, self.worlds), self, self.report)

    def report(self, message: NeedsWorld) -> None:
        self.done.append(("needs world", message.function))

    def start(self, message: Compile, work: Callable[..., None], *arguments: Any) -> None:
        work(message, *arguments)

    def begin(self, message: Compile, joined: Status = OK) -> None:
        self.done.append(("begin", message.world, joined))

    def compile_source(self, message: Compile, source: FunctionSource) -> None:
        self.done.append(("compile", message.world))

    def end(self, message: Compile, result: CompileResult) -> None:
        self.done.append(("end", message.world, result.status))

    def cancel(self, record: FunctionRecord) -> None:
        self.done.append(("cancel", record.name))

    def unload(self, record: FunctionRecord) -> None:
        self.done.append(("unload", record.name))

    def take(self) -> list[tuple[Any, ...]]:
        done, self.done = self.done, []
        return done

    def pending(self, message: Compile) -> FunctionRecord:
        """Return the record of a function that is being compiled."""
        self.records.compile(message.function, Pending())
        record = self.records.find(message.function)
        assert record is not None
        return record

    def loaded(self, message: Compile, is_joint: bool = False) -> FunctionRecord:
        """Return the record of a function that is loaded in its world."""
        record = self.pending(message)
        self.placer.enter(Recipe(message, SOURCE))
        backend = NullBackend(0, 1, MODELS["instant"], HandClock(), Collectives())
        content = msgspec.msgpack.decode(NullProgram("step", 0.0, (), ()).source(), type=FunctionSource)
        loaded, _, _ = backend.compile(content.program, content.options, (((0, 0),),), None, "", 0)
        function = Function(cast(Any, Loaded(loaded, message.world, is_joint)), TypeKeys())
        self.records.load(record, function, b"", "step")
        self.placer.note_loaded(function)
        return record


@pytest.fixture
def rig() -> Rig:
    return Rig()


def request(world: int = 0, islands: tuple[int, ...] = ()) -> Compile:
    return Compile("a", 1, 0, (((0, 0),),), world=world, islands=islands)


def test_a_function_without_a_world_is_compiled_at_once(rig: Rig) -> None:
    rig.placer.begin(request())
    assert rig.take() == [("begin", 0, OK)]
    assert not rig.placer.may_wait


@pytest.mark.parametrize("joined", [OK, LOST])
def test_a_function_for_a_world_is_compiled_when_the_host_has_joined_or_not(rig: Rig, joined: Status) -> None:
    record = rig.pending(request(5))
    rig.placer.begin(request(5))
    assert rig.take() == []
    assert record.pending is not None
    assert record.pending.stage is CompileStage.WAITING
    assert rig.placer.may_wait
    rig.worlds.joins[5](joined)
    assert rig.take() == [("begin", 5, joined)]


def test_a_function_on_several_islands_is_compiled_before_the_host_joins_its_world(rig: Rig) -> None:
    rig.placer.begin(request(5, islands=(1, 1)))
    assert rig.take() == [("begin", 5, OK)]


def test_a_function_whose_islands_communicate_must_wait_until_the_host_has_joined(rig: Rig) -> None:
    message = Compile("a", 1, 0, (((0, 0), (1, 0)),), world=5, ranks=(0, 1), islands=(1, 1))
    crosses = Description(cast(FunctionInfo, None), (), (), 0, ((0, 1),))
    assert rig.placer.placement_of(message, crosses, calls_client=False).must_wait
    rig.worlds.joined.add(5)
    placement = rig.placer.placement_of(message, crosses, calls_client=False)
    assert (placement.world, placement.must_wait) == (5, False)


def test_a_function_without_a_world_asks_for_one_and_is_loaded_there_once(rig: Rig) -> None:
    rig.pending(request())
    worlds: list[int] = []
    rig.placer.await_world(Waiting(request(), SOURCE, lambda message: worlds.append(message.world)))
    assert rig.take() == [("needs world", "a")]
    rig.placer.load_in_world(LoadInWorld("a", 6))
    rig.worlds.joins.pop(6)(OK)
    assert worlds == [6]
    rig.placer.load_in_world(LoadInWorld("a", 7))  # the answer to another question
    assert rig.worlds.joins == {}


def test_a_function_that_no_session_uses_waits_for_no_world(rig: Rig) -> None:
    rig.records.drop(rig.pending(request()))
    rig.placer.await_world(Waiting(request(), SOURCE, lambda message: None))
    assert rig.take() == [("cancel", "a")]


def test_a_function_moves_to_the_successor_of_its_world_and_its_runs_wait_meanwhile(rig: Rig) -> None:
    record = rig.loaded(request(5))
    woken: list[None] = []
    assert not rig.placer.awaits("a", lambda: woken.append(None))
    moving = rig.placer.close_world(CloseWorld(5, LOST, successor=6))
    assert rig.take() == [("unload", "a")]
    assert record.state is FunctionState.COMPILING
    for recipe in moving:
        rig.placer.compile_again(recipe)
    assert rig.placer.awaits("a", lambda: woken.append(None))
    rig.worlds.joins[6](OK)
    assert rig.take() == [("compile", 6)]
    for wake in record.world.take_runs():
        wake()
    assert woken == [None]


def test_a_function_fails_if_the_host_cannot_join_the_successor(rig: Rig) -> None:
    rig.loaded(request(5))
    for recipe in rig.placer.close_world(CloseWorld(5, LOST, successor=6)):
        rig.placer.compile_again(recipe)
    rig.worlds.joins[6](LOST)
    assert rig.take() == [("unload", "a"), ("end", 6, LOST)]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_function_is_forgotten_if_no_session_uses_it_or_its_world_has_no_successor(rig: Rig, is_idle: bool) -> None:
    record = rig.loaded(request(5))
    if is_idle:
        rig.records.drop(record)
    rig.placer.close_world(CloseWorld(5, LOST, successor=6 if is_idle else 0))
    assert rig.take() == [("unload", "a")]
    assert rig.records.find("a") is None
    assert rig.worlds.joins == {}
    assert rig.placer.closing_status(5, 1) == LOST
    assert rig.placer.closing_status(6, 1) == OK


def test_a_run_that_the_controller_did_not_end_with_its_world_ends_with_the_others(rig: Rig) -> None:
    rig.placer.close_world(CloseWorld(5, LOST, ended=(7, 8)))
    assert rig.placer.closing_status(5, 7) == LOST
    assert rig.placer.closing_status(5, 9) == ended_with_others(LOST)
    assert ended_with_others(LOST).details.retriable


def test_a_function_whose_world_was_closed_while_it_was_compiled_moves_to_the_successor(rig: Rig) -> None:
    record = rig.pending(request(5))
    rig.placer.enter(Recipe(request(5), SOURCE))
    closing = CloseWorld(5, LOST, successor=6)
    again = rig.placer.after_closing(request(5), closing, record, CompileResult())
    assert again is not None
    rig.placer.compile_again(again)
    rig.worlds.joins[6](OK)
    assert rig.take() == [("compile", 6)]


def test_joint_functions_may_wait_without_a_world(rig: Rig) -> None:
    rig.loaded(request())
    assert not rig.placer.may_wait
    rig.loaded(Compile("b", 1, 0, (((0, 0),),)), is_joint=True)
    assert rig.placer.may_wait
