"""Tests of the launch window, which the controller enforces: the credits that a launch takes, and the maximum."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.ir.program import NODES_PER_CREDIT, Program, Report
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.protocol import messages as m
from tests.controller.play import Play, chain_of, on, runs
from tests.launch.test_control_flow_runs import BRANCHES, FIRST, LOOP, NUMBER, SWITCH, Chooser, view

CHAIN = 5
LARGE = chain_of(3 * NODES_PER_CREDIT)
TAKES = 4


def closings(messages: list[Any]) -> list[str]:
    return [message.status.message for message in messages if isinstance(message, m.Closing)]


def playing() -> Play:
    """Return a session with array 10 and a program that takes several credits."""
    play = Play()
    play.with_call()
    play.array(10)
    play.send(m.RegisterProgram(CHAIN, LARGE))
    return play


def test_who_does_not_keep_to_its_window_loses_its_session():
    play = playing()
    for number in range(2 * LAUNCH_WINDOW + 2):
        play.proxy(play.session, m.Launch(1, (10,), (100 + number,), ()))
    (closing,) = closings(play.outbox())
    assert "launches in flight, and launches more" in closing


@pytest.mark.parametrize(("program", "takes"), [(1, 1), (CHAIN, TAKES), (99, 1)])
@pytest.mark.parametrize("less", [1, TAKES, 1 << 62])
def test_a_launch_that_takes_less_than_it_costs_ends_its_session(program, takes, less):
    play = playing()
    other = play.open().number
    play.outbox()
    (closing,) = closings(play.send(m.Launch(program, (10,), (11,), (), credits=takes - less)))
    assert f"a launch of program {program} takes {takes} of its session's window" in closing
    assert set(play.controller.sessions) == {other}


@pytest.mark.parametrize("more", [0, 1])
def test_a_launch_that_takes_what_it_costs_or_more_runs(more):
    play = playing()
    assert runs(play.send(m.Launch(CHAIN, (10,), (11,), (), credits=TAKES + more)))
    assert play.controller.sessions[play.session].credits == TAKES + more


def test_a_programs_number_that_is_released_and_used_again_costs_what_it_stands_for_now():
    play = playing()
    play.send(m.ReleaseProgram(CHAIN))
    play.with_call(CHAIN)
    assert len(runs(play.send(m.Launch(CHAIN, (10,), (11,), ())))) == 1
    play.send(m.ReleaseProgram(1))
    play.send(m.RegisterProgram(1, LARGE))
    assert len(closings(play.send(m.Launch(1, (10,), (12,), ())))) == 1


def large(program: Program) -> Program:
    """Return a program with the same result and enough additional nodes for one more credit."""
    views = tuple(view(0, program.arguments[0]) for _ in range(NODES_PER_CREDIT))
    first = len(program.arguments)
    assert len(program.results) == len(program.nodes) == 1
    return Program(program.name, program.arguments, (*views, *program.nodes), (first + NODES_PER_CREDIT,))


@pytest.mark.parametrize("credits", [1, 2])
@pytest.mark.parametrize("position", [0, 1])
def test_a_node_that_depends_on_data_costs_what_all_of_its_programs_do(position, credits):
    play = Chooser()
    near = play.controller.sessions[play.session].definitions[BRANCHES[0]]
    # Register the program after the node that names it, because the cost of a launch is determined when it arrives.
    play.send(m.ReleaseProgram(BRANCHES[position]))
    play.register(BRANCHES[position], large(near))
    replies = play.send(m.Launch(SWITCH, (11, 10), (20,), (), credits=credits))
    assert (len(closings(replies)), len(runs(replies))) == ((1, 0) if credits == 1 else (0, 1))


@pytest.mark.parametrize("credits", [1, 2])
def test_a_loop_costs_what_all_of_its_programs_do(credits):
    play = Chooser()
    views = tuple(view(0, on(0)) for _ in range(NODES_PER_CREDIT))
    play.send(m.ReleaseProgram(FIRST))
    play.register(FIRST, Program("first", (on(0), NUMBER), (*views, Report((1,))), ()))
    replies = play.send(m.Launch(LOOP, (10, 11), (20, 21), (), credits=credits))
    assert (len(closings(replies)), len(runs(replies))) == ((1, 0) if credits == 1 else (0, 1))
