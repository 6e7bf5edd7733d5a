"""Tests of the choice of a world for functions of several islands, and of functions that wait or move."""

from __future__ import annotations

from typing import cast

import pytest

from atoll.devices.compilers.compiler_messages import CompiledProgram, Description, Parts
from atoll.errors import Code, Status
from atoll.protocol.messages import CloseWorld, Compile, FunctionInfo, FunctionSource
from atoll.worker.function_worlds import FunctionWorld, Placement, Recipe, Waiting, placement_of

WORLD, NEXT = 1, 2
PROGRAM, PYTHON = FunctionSource(b"program", b""), FunctionSource(b"code", b"", is_python=True)
CLOSED = Status(Code.DATA_LOSS, "host 1 is gone")
# Two devices on each of three hosts. The first two hosts are one island.
ROW = tuple((rank, ordinal) for rank in range(3) for ordinal in range(2))
ALONE = tuple((device,) for device in range(6))
HOSTS = ((0, 1), (2, 3), (4, 5))
ISLANDS = ((0, 1, 2, 3), (4, 5))
ALL = (tuple(range(6)),)


def request(world: int = 0, session: int = 1) -> Compile:
    return Compile("f", session, 0, (ROW,), world=world, ranks=(0, 2), islands=(2, 1))


def description(parts: Parts | None) -> Description:
    return Description(cast(FunctionInfo, None), (), (), 0, parts)


@pytest.mark.parametrize(
    ("parts", "has_joined", "expected"),
    [
        (ALONE, False, Placement(True)),
        (ALONE, True, Placement(True, WORLD)),
        (HOSTS, True, Placement(True, WORLD)),
        (ISLANDS, False, Placement(True)),
        (ISLANDS, True, Placement(True)),
        (ALL, False, Placement(False, must_wait=True)),
        (ALL, True, Placement(False, WORLD)),
        (None, False, Placement(False, must_wait=True)),
    ],
)
def test_a_function_runs_where_its_devices_can_communicate(parts: Parts, has_joined: bool, expected: Placement):
    assert placement_of(request(WORLD), description(parts), False, has_joined) == expected


def test_a_function_that_calls_its_client_needs_a_world():
    assert placement_of(request(), description(ALONE), True, False) == Placement(False, must_wait=True)
    assert placement_of(request(WORLD), description(ALONE), True, True) == Placement(False, WORLD)


def load(message: Compile) -> None:
    raise AssertionError("this module loads nothing")


@pytest.fixture
def world() -> FunctionWorld:
    return FunctionWorld()


@pytest.fixture
def joined(world: FunctionWorld) -> FunctionWorld:
    world.enter(Recipe(request(WORLD), PROGRAM))
    return world


def closing(successor: int = 0) -> CloseWorld:
    return CloseWorld(WORLD, CLOSED, successor)


def test_a_function_waits_until_its_world_is_named_once(world: FunctionWorld):
    world.await_world(Waiting(request(), PROGRAM, load))
    assert world.is_awaited
    assert world.named(WORLD) == Waiting(request(WORLD), PROGRAM, load)
    assert not world.is_awaited
    assert world.named(NEXT) is None


def test_a_function_that_does_not_wait_is_not_loaded(world: FunctionWorld):
    assert world.named(WORLD) is None


def test_a_function_is_compiled_again_in_the_next_world(world: FunctionWorld):
    world.await_world(Waiting(request(), PROGRAM, load))
    world.named(WORLD)
    assert world.leave(NEXT) == Recipe(request(NEXT), PROGRAM)


def test_a_python_function_has_no_recipe(world: FunctionWorld):
    """Its session sends it again."""
    world.await_world(Waiting(request(), PYTHON, load))
    world.named(WORLD)
    assert world.after_closing(request(WORLD), closing(NEXT), False, []) is None


def test_runs_wait_while_a_function_moves(joined: FunctionWorld):
    woken: list[str] = []
    assert not joined.awaits_move(lambda: woken.append("too early"))
    joined.leave(NEXT)
    assert joined.awaits_move(lambda: woken.append("run"))
    joined.enter(Recipe(request(NEXT), PROGRAM))
    for wake in joined.take_runs():
        wake()
    assert woken == ["run"]
    assert not joined.awaits_move(lambda: woken.append("too late"))


def test_runs_do_not_wait_for_a_function_without_another_world(joined: FunctionWorld):
    assert joined.leave() is None
    assert not joined.awaits_move(lambda: None)


def test_runs_of_a_function_that_is_forgotten_are_woken(joined: FunctionWorld):
    woken: list[str] = []
    joined.leave(NEXT)
    joined.awaits_move(lambda: woken.append("run"))
    for wake in joined.take_runs():
        wake()
    assert woken == ["run"]
    assert list(joined.take_runs()) == []


def test_a_forgotten_function_does_not_wait_for_a_world(world: FunctionWorld):
    world.await_world(Waiting(request(), PROGRAM, load))
    world.take_runs()
    assert not world.is_awaited


@pytest.mark.parametrize(
    ("successor", "is_apart", "expected"),
    [
        (NEXT, False, Recipe(request(NEXT), PROGRAM)),
        (NEXT, True, Recipe(request(NEXT), PROGRAM)),
        (0, True, Recipe(request(), PROGRAM)),
        (0, False, None),
    ],
)
def test_a_function_whose_world_was_closed_while_it_was_compiled(
    joined: FunctionWorld, successor: int, is_apart: bool, expected: Recipe | None
):
    assert joined.after_closing(request(WORLD), closing(successor), is_apart, []) == expected


def test_a_request_for_another_world_is_preferred(joined: FunctionWorld):
    same, later = request(WORLD, session=2), request(NEXT, session=3)
    others = [same, later]
    assert joined.after_closing(request(WORLD), closing(), False, others) == Recipe(later, None)
    assert others == [same]


def test_a_function_that_is_apart_follows_its_arguments_once_per_world(world: FunctionWorld):
    program = CompiledProgram(b"executable", description(ALONE), ())
    world.enter(Recipe(request(), PROGRAM, program))
    assert world.follow(0) is None, "the arguments belong to no open world"
    assert world.follow(WORLD) == Recipe(request(WORLD), PROGRAM, program)
    assert world.follow(WORLD) is None
    assert world.follow(NEXT) == Recipe(request(NEXT), PROGRAM, program)


def test_a_function_without_its_program_does_not_follow(world: FunctionWorld):
    world.enter(Recipe(request(), PROGRAM))
    assert world.follow(WORLD) is None
