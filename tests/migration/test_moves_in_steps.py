"""Tests that sessions with many arrays, functions and programs are moved and suspended over several flushes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.migration import array_spiller
from atoll.migration.migrations import MigrationState
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.session import Session
from atoll.state.session_states import SessionState
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on
from tests.work_counts import instructions_of


class LargePlay(Play):
    """Session with a slice of device 0, on a cluster of two islands. `turns` has the instructions of each flush."""

    def __init__(self) -> None:
        super().__init__("2x1x1", dumps=False)
        self.send(m.AddSlice(1, SliceRequest(1)))
        self.turns: list[int] = []
        self.counts = False
        self.sent_messages: list[Any] = []

    @property
    def owner(self) -> Session:
        return self.controller.sessions[self.session]

    def make_arrays(self, count: int) -> None:
        """Make arrays of different shapes, so that each is copied by its own program."""
        buffers = tuple(HostBuffer(i, (2 + i,), None, None, i) for i in range(count))
        specs = tuple(ArraySpec("float32", (2 + i,), Sharding((0,))) for i in range(count))
        self.send(m.RegisterProgram(77, single("puts", (), HostToDevice(buffers, specs), feeds=count)))
        feeds = tuple(range(5000, 5000 + count))
        self.report(0, m.FeedsArrived(self.session, feeds))
        (run,) = [each for each in self.send(m.Launch(77, (), tuple(range(100, 100 + count)), feeds))]
        self.done(run.sequence)
        self.send(m.ReleaseProgram(77))

    def make_programs(self, count: int) -> None:
        """Make functions, and as many programs that call them."""
        for number in range(1, count + 1):
            self.with_function(number)
            body = single(f"f {number}", (on(0),), Call(number, (0,), (on(0),), (0,)))
            self.send(m.RegisterProgram(1000 + number, body))

    def turn(self) -> None:
        """Let the controller flush once, and hosts and the proxy answer."""
        actions, self._kept = self._kept, []
        event = e.Flush(self.now)
        if self.counts:
            self.turns.append(instructions_of(lambda: actions.extend(self.controller.handle(event))))
        else:
            actions.extend(self.controller.handle(event))
        for action in actions:
            if not isinstance(action, a.Send):
                continue
            kind, number = self.name_of(action.connection)
            message = action.message
            self.sent_messages.append(message)
            match message:
                case m.Quiesce(migration=migration):
                    self.proxy(self.session, m.Quiesced(migration))
                case m.Run(sequence=sequence):
                    self.worker(number, m.Done(((sequence, 0, 1),)))
                case m.SendSources(functions=functions):
                    for function, _ in functions:
                        self.proxy(self.session, m.Recompile(function, 90_000 + function))
                        self.worker(1, m.FeedsArrived(self.session, (90_000 + function,)))
                case m.Compile(function=function) if kind == "host":
                    self.worker(number, m.Compiled(function, OK, b"", 0.1, False))
                case m.SpillRequest(request=request, shards=shards):
                    pieces = tuple(m.SpilledPiece(piece, 8) for piece, _, _ in shards)
                    self.worker(number, m.SpillReply(self.session, request, OK, pieces))
                case m.SendSpilled(pieces=sent):
                    for _, feed, hosts in sent:
                        for host in hosts:
                            self.worker(host, m.FeedsArrived(self.session, (feed,)))

    def take_over(self) -> None:
        """Replace the controller by one that was loaded from its dump."""
        self._kept += self.controller.handle(e.Flush(self.now))
        self.controller = check_dump(self.controller)

    def until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(2000):
            if is_done():
                return
            self.turn()
        raise AssertionError("it never ends")

    def answered(self) -> bool:
        return any(isinstance(each, m.OperationReply) for each in self.sent_messages)

    def move(self) -> None:
        self.operator(m.RemapRequest(self.session, 1, 1))
        self.until(self.answered)
        assert self.owner.devices.locations[0].island == 1

    def suspend(self) -> None:
        self.operator(m.SuspendRequest(self.session))
        self.until(lambda: self.owner.state is SessionState.SUSPENDED)

    def resume(self) -> None:
        self.operator(m.ResumeRequest(self.session, (), 0.0))
        self.until(lambda: self.owner.state is SessionState.RUNNING)


def longest(count: int, make: Callable[[LargePlay, int], None], *work: Callable[[LargePlay], None]) -> int:
    play = LargePlay()
    make(play, count)
    play.counts = True
    for each in work:
        each(play)
    assert contradictions(play.controller) == []
    return max(play.turns)


@pytest.mark.parametrize(
    ("make", "work"),
    [
        (LargePlay.make_arrays, (LargePlay.move,)),
        (LargePlay.make_programs, (LargePlay.move,)),
        (LargePlay.make_arrays, (LargePlay.suspend, LargePlay.resume)),
    ],
)
def test_no_flush_grows_with_what_a_session_has(make: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_spiller, "_MAX_AT_ONCE", 8)
    monkeypatch.setattr("atoll.migration.migrations._FUNCTIONS_AT_ONCE", 8)
    monkeypatch.setattr("atoll.migration.movers.MAX_TOGETHER", 8)
    few, many = longest(40, make, *work), longest(80, make, *work)
    assert many < 1.5 * few, f"{few} instructions, and {many} with twice as many items"


@pytest.mark.parametrize("state", [MigrationState.COPYING, MigrationState.TAKING_OVER])
@pytest.mark.parametrize("event", ["loss", "end", "none"])
def test_a_restored_controller_continues_a_move(state: MigrationState, event: str) -> None:
    play = LargePlay()
    play.make_arrays(40)
    play.make_programs(12)
    play.operator(m.RemapRequest(play.session, 1, 1))
    moves = play.controller.migrations
    play.until(lambda: bool(moves.under_way) and moves.under_way[play.session].state is state)
    play.turn()
    assert moves.working
    play.take_over()
    if event == "loss":
        play.lose(1, "killed")
    if event == "end":
        play.close(play.session)
    play.until(play.answered)
    play.flush()
    assert not play.controller.has_work
    assert contradictions(play.controller) == []
    if event == "end":
        assert play.controller.ledger.total == 0
        assert play.controller.functions.users == {}
    else:
        moved = event == "none" or state is MigrationState.TAKING_OVER
        assert play.owner.devices.locations[0].island == int(moved)
        errors = [entry.error for entry in play.owner.directory.entries.values()]
        assert any(errors) == (moved and event == "loss")
        assert all(number > 0 for number in play.owner.programs)


def has_some(play: LargePlay, attribute: str) -> bool:
    return any(getattr(each, attribute) for each in play.controller._spiller._spills.values())


def test_a_restored_controller_continues_to_suspend_and_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.migration.movers.MAX_TOGETHER", 8)
    monkeypatch.setattr(array_spiller, "_MAX_AT_ONCE", 8)
    play = LargePlay()
    play.make_arrays(40)
    play.operator(m.SuspendRequest(play.session))
    for attribute in ("undivided", "copied"):
        play.until(partial(has_some, play, attribute))
        assert play.controller._spiller.working
        play.take_over()
    play.until(lambda: play.owner.state is SessionState.SUSPENDED)
    assert play.controller.ledger.total == 0
    play.operator(m.ResumeRequest(play.session, (), 0.0))
    play.until(lambda: bool(play.controller.migrations.working))
    play.take_over()
    play.until(lambda: play.owner.state is SessionState.RUNNING)
    assert len(play.owner.directory.entries) == 40
    assert contradictions(play.controller) == []


def test_a_session_that_ends_while_many_arrays_are_spilled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_spiller, "_MAX_AT_ONCE", 8)
    for attribute in ("undivided", "copied"):
        play = LargePlay()
        play.make_arrays(40)
        play.operator(m.SuspendRequest(play.session))
        play.until(partial(has_some, play, attribute))
        play.close(play.session)
        play.flush()
        assert not play.controller._spiller._spills
        assert not play.controller.has_work
        assert play.controller.ledger.total == 0


def test_an_island_that_is_lost_while_its_last_session_takes_over_other_devices_is_not_drained() -> None:
    play = LargePlay()
    play.make_arrays(130)
    play.operator(m.DrainRequest(0))
    moves = play.controller.migrations.under_way
    play.until(lambda: bool(moves) and moves[play.session].state is MigrationState.TAKING_OVER)
    play.turn()
    play.lose(0, "killed")
    play.until(play.answered)
    (reply,) = [each for each in play.sent_messages if isinstance(each, m.OperationReply)]
    assert "the island was lost meanwhile" in reply.status.message
    assert play.controller.resources.islands[0].state is IslandState.RESTARTING
    assert play.owner.devices.locations[0].island == 1
    assert not any(entry.error for entry in play.owner.directory.entries.values())
