"""Tests of plans that are sent to hosts in pieces: their launches wait for the last piece, and other launches
do not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, Program
from atoll.launch.shared_parts import GANG_WINDOW
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from atoll.state.program_registration import LARGE_PLAN_BYTES
from atoll.state.session import Session
from tests.controller.play import Cluster, Play, joined, on, runs

# A plan contains the name of its program.
LARGE = "x" * LARGE_PLAN_BYTES
_decode = msgspec.msgpack.Decoder(m.ToWorker).decode


def put(name: str = "put", devices: tuple[int, ...] = (0,)) -> Program:
    """Takes an array from its client."""
    nodes = tuple(HostToDevice((HostBuffer(i, (2,), None, None),), (on(d),)) for i, d in enumerate(devices))
    return Program(name, (), nodes, tuple(range(len(nodes))), feeds=len(nodes))


def registered(play: Play, program: int, definition: Program) -> list[Any]:
    return play.send(m.RegisterProgram(program, definition))


def launch(play: Play, program: int, handle: int, host: int = 0) -> list[m.Run]:
    feed = 10_000 + handle
    play.report(host, m.FeedsArrived(play.session, (feed,)))
    return runs(play.send(m.Launch(program, (), (handle,), (feed,))))


def open_at(cluster: Cluster) -> Session:
    """One more session."""
    session = cluster.open(43, "other.py")
    cluster.flush()
    return session


def test_a_small_plan_goes_in_its_place_and_launches_do_not_wait():
    play = Play()
    (message,) = registered(play, 1, put())
    assert not message.acknowledge
    assert not any(isinstance(each, a.Send) and each.in_pieces for each in play.actions)
    assert launch(play, 1, 10)


def test_a_launch_of_a_large_plan_waits_until_its_host_has_it():
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    assert message.acknowledge
    (sent,) = [each for each in play.actions if isinstance(each, a.Send) and each.in_pieces]
    assert sent.message is message
    assert launch(play, 1, 10) == []
    (run,) = runs(play.report(0, m.PlanRegistered(message.plan)))
    assert run.plan == message.plan
    assert launch(play, 1, 11), "it is there"


def test_others_launches_do_not_wait_for_a_large_plan():
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    assert launch(play, 1, 10) == []
    other = open_at(play)
    play.proxy(other.number, m.RegisterProgram(1, put()))
    play.worker(0, m.FeedsArrived(other.number, (7,)))
    play.proxy(other.number, m.Launch(1, (), (10,), (7,)))
    (run,) = runs(play.outbox())
    assert run.session == other.number
    assert [each.session for each in runs(play.report(0, m.PlanRegistered(message.plan)))] == [play.session]


def test_a_launch_waits_for_all_hosts_of_its_program():
    play = Play("1x2x1")
    messages = registered(play, 1, put(LARGE, (0, 1)))
    assert len(messages) == 2
    for host in range(2):
        play.report(host, m.FeedsArrived(play.session, (20 + host,)))
    assert runs(play.send(m.Launch(1, (), (10, 11), (20, 21)))) == []
    assert runs(play.report(1, m.PlanRegistered(messages[1].plan))) == []
    assert runs(play.report(1, m.PlanRegistered(messages[1].plan))) == [], "a second report has no effect"
    assert len(runs(play.report(0, m.PlanRegistered(messages[0].plan)))) == 2


def test_a_large_plan_that_nobody_needs_any_more_is_dropped_once_it_is_there():
    """Sent earlier, the message to drop the plan would overtake the plan."""
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    assert play.send(m.ReleaseProgram(1)) == []
    assert play.report(0, m.PlanRegistered(message.plan)) == [m.DropPlan(message.plan)]
    assert play.report(0, m.PlanRegistered(message.plan)) == []
    assert not play.controller.launches.large_plans._missing


def test_a_large_plan_that_is_there_is_dropped_as_any_other():
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    play.report(0, m.PlanRegistered(message.plan))
    assert play.send(m.ReleaseProgram(1)) == [m.DropPlan(message.plan)]
    assert not play.controller.launches.large_plans._missing


def test_a_session_that_ends_leaves_nothing_of_its_large_plans():
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    assert launch(play, 1, 10) == []
    play.close(play.session)
    play.flush()
    play.worker(0, m.PlanRegistered(message.plan))
    assert m.DropPlan(message.plan) in play.outbox()
    large = play.controller.launches.large_plans
    assert (large._missing, large._held) == ({}, {})


def test_launches_in_line_wait_for_a_large_plan_to_be_on_an_island_again():
    """The hosts had the plan at the time of the launches. After their restart they have nothing."""
    play = Play()
    (message,) = registered(play, 1, put(LARGE))
    play.report(0, m.PlanRegistered(message.plan))
    play.lose(0, "killed")
    play.outbox()
    play.send(m.FailureAcknowledged((0,)))
    assert launch(play, 1, 10) == []
    back = play.join_again(0)
    assert runs(back) == []
    assert [each.plan for each in back if isinstance(each, m.RegisterPlan)] == [message.plan]
    play.report(0, m.FeedsArrived(play.session, (10_010,)))
    assert [each.plan for each in runs(play.report(0, m.PlanRegistered(message.plan)))] == [message.plan]


def test_launches_that_were_in_line_before_the_loss_wait_too():
    """Launch more than the island accepts at once of a program without results.

    One with results would have lost them.
    """
    play = Play()
    name = play.with_function()
    (message,) = registered(play, 1, Program(LARGE, (), (Call(1, (), (), (0,)),), ()))
    play.report(0, m.PlanRegistered(message.plan))
    for _ in range(2 * GANG_WINDOW):
        play.send(m.Launch(1, (), (), ()))
    play.lose(0, "killed")
    play.outbox()
    play.send(m.FailureAcknowledged((0,)))
    assert runs(play.join_again(0)) == []
    play.send(m.Recompile(1, 950))
    play.report(0, m.FeedsArrived(play.session, (950,)))
    assert runs(play.report(0, m.Compiled(name, OK, b"", 0.1, False))) == []
    assert runs(play.report(0, m.PlanRegistered(message.plan)))


def test_the_hosts_of_a_group_get_a_large_plan_by_their_relay_in_one_message():
    play = Play("1x4x1", relay_group=2)
    everywhere = (0, 1, 2, 3)
    sent = registered(play, 1, put(LARGE, everywhere))
    forwards = [each for each in sent if isinstance(each, m.Forward)]
    assert sorted(host for each in forwards for host in each.hosts) == list(everywhere)
    assert all(each.in_pieces for each in forwards)
    assert all(_decode(each.content).acknowledge for each in forwards)
    large = [each for each in play.actions if isinstance(each, a.Send) and each.in_pieces]
    assert [each.message for each in large] == forwards


def test_hosts_that_do_the_same_get_the_same_message_of_a_plan():
    cluster = joined("1x4x1", relay_group=4)
    session = cluster.open()
    cluster.flush()
    cluster.proxy(session.number, m.RegisterProgram(1, put(LARGE, (0,))))
    assert len([each for each in cluster.outbox() if isinstance(each, m.Forward)]) == 1
