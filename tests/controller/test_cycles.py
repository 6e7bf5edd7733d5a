"""Tests that reference counts free the controller's records. Collecting thousands of them would stall all sessions."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

from atoll.cluster.settings import Dispatch
from atoll.errors import Status
from atoll.ir.program import Call, Program
from atoll.protocol import messages as m
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.migrating_world import MigratingWorld
from tests.controller.outcome import play
from tests.controller.play import BROKEN, Play, chain_of, on, runs
from tests.controller.test_lowering_in_steps import CREDITS, NODES, Slow
from tests.controller.test_world import LongPrograms
from tests.controller.world import World
from tests.garbage import counted


@pytest.fixture(autouse=True)
def _without_other_tests() -> None:
    """Exclude objects of earlier tests in this process, whose threads may end now, from the count."""
    gc.collect()
    gc.freeze()


def sequences(messages: list[Any]) -> list[int]:
    return [run.sequence for run in runs(messages)]


# ---- what may happen to a launch


def it_ends(play: Play) -> None:
    play.done(*sequences(play.send(m.Launch(1, (10,), (11,), ()))))


def it_fails(play: Play) -> None:
    (sequence,) = sequences(play.send(m.Launch(1, (10,), (11,), ())))
    play.report(0, m.Failed(sequence, BROKEN))


def what_it_needs_has_failed(play: Play) -> None:
    play.send(m.MakeError((20,), BROKEN))
    play.send(m.Launch(1, (20,), (21,), ()))


def its_session_ends_while_it_runs(play: Play) -> None:
    started = sequences(play.send(m.Launch(1, (10,), (11,), ())))
    play.close(play.session)
    play.flush()
    play.done(*started)


def its_session_ends_while_it_waits_for_bytes(play: Play) -> None:
    play.send(m.Launch(2, (), (30,), (77,)))
    play.send(m.Launch(1, (30,), (31,), ()))
    play.close(play.session)
    play.flush()


def its_session_ends_while_it_is_in_line(play: Play) -> None:
    """The windows of the hosts accept only some of its launches."""
    started = []
    for handle in range(100, 200):
        started += sequences(play.send(m.Launch(1, (10,), (handle,), ())))
    assert len(started) < 100
    play.close(play.session)
    play.flush()
    while live := list(play.controller.launches.in_flight):
        play.done(*live)
    play.flush()


def its_island_fails(play: Play) -> None:
    for handle in range(100, 140):
        play.send(m.Launch(1, (10,), (handle,), ()))
    play.lose(0, "killed")
    play.flush()


def it_runs_again_after_the_loss_of_its_island(play: Play) -> None:
    """Launches that wait for bytes have not started."""
    play.with_put(3)
    play.send(m.Launch(3, (), (40,), (78,)))
    its_island_fails(play)
    play.join_again(0)


def it_is_large_and_ends(play: Play) -> None:
    play.send(m.RegisterProgram(5, chain_of(NODES)))
    play.send(m.Launch(5, (10,), (11,), (), credits=CREDITS))
    while live := list(play.controller.launches.in_flight):
        play.done(*live)


def it_is_large_and_fails(play: Play) -> None:
    play.send(m.RegisterProgram(5, chain_of(NODES)))
    play.send(m.Launch(5, (10,), (11,), (), credits=CREDITS))
    (first, *others) = list(play.controller.launches.in_flight)
    play.report(0, m.Failed(first, BROKEN))
    play.done(*others)


def it_is_large_and_its_session_ends(play: Play) -> None:
    play.send(m.RegisterProgram(5, chain_of(NODES)))
    play.send(m.Launch(5, (10,), (11,), (), credits=CREDITS))
    started = list(play.controller.launches.in_flight)
    play.close(play.session)
    play.flush()
    play.done(*started)


@pytest.mark.parametrize(
    "happens",
    [
        it_ends,
        it_fails,
        what_it_needs_has_failed,
        its_session_ends_while_it_runs,
        its_session_ends_while_it_waits_for_bytes,
        its_session_ends_while_it_is_in_line,
        its_island_fails,
        it_runs_again_after_the_loss_of_its_island,
        it_is_large_and_ends,
        it_is_large_and_fails,
        it_is_large_and_its_session_ends,
    ],
)
def test_a_launch_leaves_nothing_for_the_garbage_collector_if(happens: Callable[[Play], None]):
    play = Slow()
    with counted() as left:
        happens(play)
    assert not left, left


# ---- what may happen to a program


def it_is_lowered(play: Slow) -> None:
    play.send(m.RegisterProgram(5, chain_of(5)))
    play.send(m.ReleaseProgram(5))


def it_cannot_be_lowered(play: Slow) -> None:
    """It calls a function that is not registered."""
    play.send(m.RegisterProgram(5, Program("f", (on(0),), (Call(77, (0,), (on(0),), (0,)),), (1,))))
    assert isinstance(play.controller.sessions[play.session].programs[5], Status)
    play.send(m.Launch(5, (10,), (11,), ()))


def its_session_ends_while_it_is_lowered(play: Slow) -> None:
    play.register(5, chain_of(NODES))
    for _ in range(5):
        play.turn()
    assert play.controller.has_work
    play.close(play.session)
    play.flush()


@pytest.mark.parametrize("happens", [it_is_lowered, it_cannot_be_lowered, its_session_ends_while_it_is_lowered])
def test_a_program_leaves_nothing_for_the_garbage_collector_if(happens: Callable[[Slow], None]):
    play = Slow()
    with counted() as left:
        happens(play)
    assert not left, left


# ---- random clients


def keeping(kind: type[World]) -> type[World]:
    """Return a world that keeps lost model hosts, because they refer to each other in cycles."""

    class Keeping(kind):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.kept: list[Any] = []
            super().__init__(*arguments, **settings)

        def end(self, island: int) -> None:
            self.kept += [dict(self.hosts), dict(self.groups), dict(self.delegated)]
            super().end(island)

    return Keeping


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("kind", [World, LongPrograms, ChoosingWorld, MigratingWorld])
def test_random_clients_leave_nothing_for_the_garbage_collector(kind: type[World], dispatch: Dispatch):
    worlds = [keeping(kind)(random.Random(seed), "2x2x1", 0.15, dispatch=dispatch) for seed in range(3)]
    with counted() as left:
        for world in worlds:
            play(world, world.rng, 60, 0.02)
            for client in list(world.clients.values()):
                client.act()
                world.deliver()
                world.close(client)
            world.settle()
    assert not left, left
