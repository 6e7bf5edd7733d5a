"""Tests of spilling and suspension: sessions that lack memory or devices get them from sessions with lower
priorities.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from atoll.cluster.settings import SuspendLower
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.errors import OK, Code, Status
from atoll.launch import memory_holders
from atoll.protocol import events
from atoll.protocol import messages as m
from tests.controller.play import Play, runs
from tests.work_counts import instructions_of

LOW = TenantSettings("low", token_hash("low"))
HIGH = TenantSettings("high", token_hash("high"), priority=1)


class PressurePlay(Play):
    """Cluster with a device that holds two arrays of 8 bytes.

    A session of a low priority has both, as handles 5 and 6.
    """

    def __init__(self, topology: str = "1x1x1", memory: int = 20, **options: Any) -> None:
        super().__init__(topology, token="cluster", tenants=(LOW, HIGH), device_memory=memory, **options)
        self.low = self.session = self.open(43, "low.py", token="low").number
        self.flush()
        self.array(5)
        self.array(6)
        self.high = self.open(44, "high.py", token="high").number
        self.flush()
        self.pieces: list[m.SpilledPiece] = []

    def launch(self, session: int, handle: int) -> list[Any]:
        """Launch a put that makes one more array."""
        self.session = session
        if 2 not in self.controller.sessions[session].programs:
            self.with_put()
        self.report(0, m.FeedsArrived(session, (10_000 + handle,)))
        return self.send(m.Launch(2, (), (handle,), (10_000 + handle,)))

    def at(self, now: float, silent: bool = False) -> list[Any]:
        self.tick(now, silent_sessions=(self.low, self.high) if silent else ())
        return self.outbox()

    def put(self, message: m.SpillRequest) -> list[Any]:
        """Report that the host has spilled the arrays of this request."""
        pieces = tuple(m.SpilledPiece(number, 8) for number, _, _ in message.shards)
        self.pieces.extend(pieces)
        return self.report(0, m.SpillReply(message.session, message.request, OK, pieces))


def of_kind(kind: type[Any], messages: list[Any]) -> list[Any]:
    return [each for each in messages if isinstance(each, kind)]


def test_an_idle_array_of_a_lower_session_spills_and_comes_back_when_it_is_used():
    play = PressurePlay(spill=100)
    assert runs(play.launch(play.high, 7)) == []
    (put,) = of_kind(m.SpillRequest, play.at(1.0))
    assert (put.session, [handle for _, handle, _ in put.shards]) == (play.low, [5])
    assert of_kind(m.SpillRequest, play.at(2.0)) == [], "spills in progress count"
    replies = play.put(put)
    assert of_kind(m.Free, replies) == [m.Free(play.low, (5,))]
    (run,) = runs(replies)
    assert (run.session, run.results) == (play.high, (7,))
    play.done(run.sequence)
    # A launch uses the array: the controller restores it as soon as there is memory, and then starts the launch.
    play.session = play.low
    play.with_call()
    (send,) = of_kind(m.SendSpilled, play.send(m.Launch(1, (5,), (9,), ())))
    assert send.pieces[0][0] == play.pieces[0]
    assert runs(play.report(0, m.FeedsArrived(play.low, (send.pieces[0][1],)))) == []
    play.session = play.high
    back, *rest = runs(play.send(m.Release((7,))))
    assert (back.results, rest) == ((5,), [])
    replies = play.done(back.sequence)
    assert of_kind(m.DropSpilled, replies) == [m.DropSpilled(play.low, (play.pieces[0],))]
    assert play.controller.sessions[play.low].directory.entries[5].blocks


def test_a_spilled_array_that_a_launch_uses_twice_is_restored_once():
    play = PressurePlay(spill=100)
    play.launch(play.high, 7)
    (put,) = of_kind(m.SpillRequest, play.at(1.0))
    for run in runs(play.put(put)):
        play.done(run.sequence)
    play.send(m.Release((7,)))
    play.session = play.low
    play.with_call(arguments=2)
    (send,) = of_kind(m.SendSpilled, play.send(m.Launch(1, (5, 5), (9,), ())))
    (back,) = runs(play.report(0, m.FeedsArrived(play.low, (send.pieces[0][1],))))
    (run,) = runs(play.done(back.sequence) + play.send(m.Release((6,))))
    assert run.arguments == (5, 5)


def test_what_spills_is_bounded():
    play = PressurePlay(spill=7)
    play.launch(play.high, 7)
    for now in range(1, 8):
        assert of_kind(m.SpillRequest, play.at(float(now))) == []
    (awaited,) = of_kind(m.Awaited, play.send(m.Await(1, (7,))))
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED


def test_what_its_host_has_no_memory_for_is_not_asked_again_at_once():
    play = PressurePlay(spill=100)
    play.launch(play.high, 7)
    failure = Status(Code.RESOURCE_EXHAUSTED, "host 0 has too little memory left")
    asked = []
    puts = of_kind(m.SpillRequest, play.at(1.0))
    for now in range(2, 8):
        for put in puts:
            asked += [handle for _, handle, _ in put.shards]
            puts = of_kind(m.SpillRequest, play.report(0, m.SpillReply(put.session, put.request, failure)))
        puts += of_kind(m.SpillRequest, play.at(float(now)))
    assert asked == [5, 6], "each once"
    (awaited,) = of_kind(m.Awaited, play.send(m.Await(1, (7,))))
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED


def test_nothing_of_a_higher_priority_spills():
    play = PressurePlay(spill=100)
    play.launch(play.high, 7)
    for put in of_kind(m.SpillRequest, play.at(1.0)):
        for run in runs(play.put(put)):
            play.done(run.sequence)
    # Now the low session lacks memory. It does not get that of array 7, but its own idle array spills before it fails.
    play.launch(play.low, 8)
    put = [each for now in range(2, 9) for each in of_kind(m.SpillRequest, play.at(float(now)))]
    assert [(each.session, each.shards[0][1]) for each in put] == [(play.low, 6)]


def test_an_array_that_is_used_meanwhile_stays():
    play = PressurePlay(spill=100)
    play.launch(play.high, 7)
    (put,) = of_kind(m.SpillRequest, play.at(1.0))
    play.session = play.low
    play.send(m.Launch(2, (), (20,), (77,)))  # it awaits its bytes, and later launches wait behind it
    play.with_call()
    play.send(m.Launch(1, (5,), (9,), ()))
    replies = play.put(put)
    assert of_kind(m.Free, replies) == []
    assert of_kind(m.DropSpilled, replies) == [m.DropSpilled(play.low, (play.pieces[0],))]


def test_a_launch_fails_only_after_all_arrays_had_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_holders, "MAX_EXAMINED", 1)
    monkeypatch.setattr(memory_holders, "_MIN_EXAMINED", 1)
    play = PressurePlay(spill=100)
    play.controller.sessions[play.low].directory.entries[5].uses += 1  # it cannot spill
    play.launch(play.low, 7)
    spilled = [each for now in range(1, 9) for each in of_kind(m.SpillRequest, play.at(float(now)))]
    assert [handle for each in spilled for _, handle, _ in each.shards] == [6]


def test_a_search_for_memory_is_repeated_seldom() -> None:
    play = PressurePlay(memory=8 * 102 + 4, spill=7)
    play.session = play.low
    for handle in range(100, 200):
        play.array(handle)
    play.launch(play.high, 7)

    def work(event: events.AnyEvent) -> int:
        return instructions_of(partial(play.controller.handle, event))

    work(events.Tick(1.0, events.Load()))
    first, *_, last = [work(events.Flush(1.0)) for _ in range(50)]
    assert first > 5000
    assert last < 1500
    work(events.Tick(1.2, events.Load()))
    assert work(events.Flush(1.2)) > 5000


def test_without_a_setting_it_fails_as_ever():
    play = PressurePlay()
    play.launch(play.high, 7)
    replies = [each for now in range(1, 8) for each in play.at(float(now))]
    assert of_kind(m.SpillRequest, replies) == []
    (awaited,) = of_kind(m.Awaited, play.send(m.Await(1, (7,))))
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("where", [SuspendLower.MEMORY, SuspendLower.DISK])
def test_a_lower_session_is_suspended_for_memory_and_goes_on_when_there_is_room(where: SuspendLower):
    play = PressurePlay(suspend_lower=where)
    play.launch(play.high, 7)
    assert of_kind(m.Quiesce, play.at(1.0)) == [m.Quiesce(1)]
    play.session = play.low
    (put,) = of_kind(m.SpillRequest, play.send(m.Quiesced(1)))
    assert put.to_files == (where is SuspendLower.DISK)
    (run,) = runs(play.put(put))
    assert run.session == play.high
    play.done(run.sequence)
    assert of_kind(m.SendSpilled, play.at(2.0)) == []
    play.session = play.high
    play.send(m.Release((7,)))
    (send,) = of_kind(m.SendSpilled, play.at(3.0))
    assert len(send.pieces) == 2


def test_who_does_not_come_to_rest_is_not_asked_again_at_once():
    play = PressurePlay(suspend_lower=SuspendLower.MEMORY)
    play.launch(play.high, 7)
    assert of_kind(m.Quiesce, play.at(1.0)) == [m.Quiesce(1)]
    play.session = play.low
    (put,) = of_kind(m.SpillRequest, play.send(m.Quiesced(1)))
    replies = play.report(0, m.SpillReply(play.low, put.request, Status(Code.INTERNAL, "no memory")))
    assert of_kind(m.Migrated, replies) == [m.Migrated(1, ())]
    assert of_kind(m.Quiesce, play.at(2.0) + play.at(3.0)) == []


def test_a_lower_session_makes_way_for_an_exclusive_slice():
    play = PressurePlay("1x1x1", suspend_lower=SuspendLower.MEMORY)
    play.session = play.high
    replies = play.send(m.AddSlice(1, SliceRequest(1, exclusive=True)))
    assert (of_kind(m.SliceAdded, replies), of_kind(m.Quiesce, replies)) == ([], [m.Quiesce(1)])
    play.session = play.low
    (put,) = of_kind(m.SpillRequest, play.send(m.Quiesced(1)))
    (added,) = of_kind(m.SliceAdded, play.put(put))
    assert added.status.ok
    assert of_kind(m.SendSpilled, play.at(1.0)) == []
    play.session = play.high
    play.send(m.ReleaseSlice(added.slice))
    (send,) = of_kind(m.SendSpilled, play.at(2.0))
    assert len(send.pieces) == 2


def test_an_exclusive_slice_that_would_not_fit_suspends_nobody():
    play = PressurePlay("1x1x1", suspend_lower=SuspendLower.MEMORY)
    play.session = play.high
    (added,) = of_kind(m.SliceAdded, play.send(m.AddSlice(1, SliceRequest(3, exclusive=True))))
    assert added.status.code == Code.RESOURCE_EXHAUSTED
    assert play.controller.suspensions.by_session == {}
