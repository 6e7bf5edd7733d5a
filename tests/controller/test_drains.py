"""Tests that operators drain islands that are in use, and islands that fail meanwhile."""

from __future__ import annotations

from typing import Any

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK, Code
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Play, joined, runs
from tests.work_counts import instructions_of


class DrainPlay(Play):
    """Session with function 1 and array 5 on island 0, on a cluster of two islands."""

    def __init__(self, topology: str = "2x1x1", leaves: bool = False) -> None:
        super().__init__(topology)
        if leaves:
            self.send(m.LeavesIslands())
        self.with_call()
        self.array(5)

    def drain(self, island: int = 0) -> list[Any]:
        self.operator(m.DrainRequest(island))
        return self.outbox()

    def at(self, now: float) -> list[Any]:
        self.tick(now)
        return self.outbox()

    def state(self, island: int = 0) -> IslandState:
        return self.controller.resources.islands[island].state


def answer_in(messages: list[Any]) -> m.OperationReply:
    (answer,) = [each for each in messages if isinstance(each, m.OperationReply)]
    return answer


def ends(messages: list[Any]) -> list[int]:
    return [each.island for each in messages if isinstance(each, m.EndIsland)]


def test_an_island_ends_only_after_the_work_of_a_session_that_has_left() -> None:
    play = DrainPlay(leaves=True)
    (run,) = runs(play.send(m.Launch(1, (5,), (6,), ())))
    assert m.HostsLeave((0,), stay=False) in play.drain()
    play.send(m.Release((5, 6)))  # the launch is still running
    assert ends(play.at(1.0) + play.at(2.0)) == []
    play.done(run.sequence)
    assert ends(play.at(3.0)) == [0]
    assert play.controller.sessions[play.session].in_flight == 0


def test_work_that_does_not_end_keeps_the_island() -> None:
    play = DrainPlay(leaves=True)
    play.send(m.Launch(1, (5,), (6,), ()))
    play.drain()
    play.send(m.Release((5, 6)))
    messages = [each for now in range(1, 304) for each in play.at(float(now))]
    assert "its work has not ended within 300 s" in answer_in(messages).status.message
    assert play.state() is IslandState.READY


def test_what_a_session_makes_on_an_island_that_it_has_left_is_lost_with_it() -> None:
    play = DrainPlay("3x1x1", leaves=True)
    other = play.open(43, "other.py").number  # moves, so that the drain takes longer
    play.flush()
    assert m.Quiesce(1) in play.drain()
    play.send(m.Release((5,)))
    play.at(1.0)
    (run,) = runs(play.send(m.Launch(2, (), (7,), (99,), contents=bytes(8))))
    play.done(run.sequence)
    play.send(m.RegisterFunction(9, "content 9", 909, ((0,),)))
    play.close(other)
    messages = play.outbox() + play.at(2.0)
    assert ends(messages) == [0]
    entry = play.controller.sessions[play.session].directory.entries[7]
    assert entry.error is not None
    assert entry.error.code == Code.DATA_LOSS
    assert play.controller.ledger.total == 0
    (ready,) = [each for each in messages if isinstance(each, m.FunctionReady)]
    assert ready.status.code == Code.DATA_LOSS


def test_the_drain_of_an_island_that_is_lost_ends_though_the_session_that_was_to_leave_ends_as_well() -> None:
    play = DrainPlay(leaves=True)
    play.drain()
    play.lose(0, "killed")
    play.close(play.session)
    answer = answer_in(play.outbox() + play.at(1.0) + play.at(2.0))
    assert answer.status.code == Code.FAILED_PRECONDITION
    assert "the island was lost meanwhile" in answer.status.message
    assert play.state() is IslandState.RESTARTING


def test_an_island_is_not_drained_while_a_session_moves_to_it() -> None:
    play = DrainPlay("2x1x1")
    play.operator(m.AddIslandRequest(like=0))
    play.outbox()
    play.join(2)
    play.send(m.AddSlice(1, SliceRequest(1)))
    play.operator(m.RemapRequest(play.session, 1, 2))
    assert [each for each in play.outbox() if isinstance(each, m.Quiesce)] == [m.Quiesce(1)]
    assert "is being moved already" in answer_in(play.drain(2)).status.message
    assert play.state(2) is IslandState.READY


def test_no_session_is_resumed_on_an_island_that_is_being_drained() -> None:
    play = DrainPlay()
    play.operator(m.SuspendRequest(play.session, to_disk=True))
    play.outbox()
    (request,) = play.send(m.Quiesced(1))
    piece = m.SpilledPiece(request.shards[0][0], 8, "/spilled/1.piece", 7)
    play.report(0, m.SpillReply(play.session, request.request, OK, (piece,)))
    suspended, play.session = play.session, play.open(43, "other.py").number
    play.flush()
    play.send(m.LeavesIslands())
    play.array(6)
    play.drain()
    play.operator(m.ResumeRequest(suspended, (), 0.0))
    assert "waits for island 0, which is draining" in answer_in(play.outbox()).status.message
    play.send(m.Release((6,)))
    assert ends(play.at(1.0)) == [0]


def test_a_drain_looks_at_each_island_once_for_all_sessions() -> None:
    def work(sessions: int) -> int:
        cluster = joined("48x1x1")
        for number in range(sessions):
            cluster.open(number + 1, "")
        cluster.flush()
        connection = cluster.connect("operator")
        event = e.Received(cluster.now, connection, m.DrainRequest(0))
        return instructions_of(lambda: cluster.controller.handle(event))

    work(1)
    few, many = work(2), work(12)
    assert many < 3 * few, f"{few} instructions with 2 sessions, and {many} with 12"
