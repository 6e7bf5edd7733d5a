"""Tests of failures while a host is away: its connection is interrupted, and the host may be lost or come back."""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.ir.program import Call, single
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Play, on


def failed_while_a_host_is_away(play: Play) -> int:
    """Fail a gang on host 0 that has ended on host 1, while host 1 is away. Return host 1's connection."""
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Await(5, (11,)))
    play.report(1, m.Done(((run.sequence, 0, 1),)))
    connection = play.controller.connections.hosts[1]
    play.event(e.ConnectionAway(99.0, connection))
    play.report(0, m.Failed(run.sequence, Status(Code.UNKNOWN, "connection reset by peer")))
    for now in range(100, 103):
        play.tick(float(now))
    assert not [x for x in play.outbox() if isinstance(x, m.Awaited)], "the host may be lost"
    return connection


def test_a_failure_while_another_host_is_away_is_reported_as_its_loss_where_it_is_lost():
    play = Play("1x2x1")
    failed_while_a_host_is_away(play)
    play.lose(1, "its machine is gone")
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def test_a_failure_while_another_host_is_away_is_reported_once_that_is_back():
    play = Play("1x2x1")
    connection = failed_while_a_host_is_away(play)
    play.event(e.ConnectionBack(103.0, connection))
    play.tick(103.0)
    play.tick(104.0)
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.UNKNOWN
