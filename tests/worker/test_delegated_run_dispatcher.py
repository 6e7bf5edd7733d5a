"""Delegated runs on a host, as tables: the messages to the plan executor and to the controller."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.ir.exchange import Exchange, spread
from atoll.ir.types import Replicated
from atoll.protocol import messages as m
from atoll.state.tallies import counts_of
from atoll.worker.delegated_run_dispatcher import (
    TRANSITIONS,
    DelegatedRunDispatcher,
    DelegatedRunState,
    DelegatedUnits,
    HostRun,
)
from tests.state_tables import check_table

SESSION, PLAN, FIRST = 7, 3, 100
MS = 1_000_000
CALL = p.Execute("f", (), 0, (), (), False)
BROKEN = Status(Code.INTERNAL, "division by zero")


class Host:
    """`DelegatedRunDispatcher` between a controller and an executor that do nothing by themselves."""

    def __init__(self, segments: int = 8, gangs: int = 2) -> None:
        self.executed: list[Any] = []
        self.output: list[Any] = []
        self.now = 0
        self.delegated = DelegatedUnits(
            lambda *messages: self.output.extend(messages), lambda ended: self.dispatcher.handle(ended)
        )
        self.dispatcher = DelegatedRunDispatcher(
            self.delegated, self.executed.append, self.await_feeds, lambda: self.now
        )
        self.here: set[int] = set()
        self.wakes: list[Any] = []
        # Every other gang of the program is on another island.
        plan = p.Plan("step", (), tuple(p.Segment(gangs * i, (CALL,)) for i in range(segments)), ())
        self.dispatcher.handle(m.RegisterPlan(PLAN, plan))
        self.executed.clear()
        self.segments = segments

    def run(self, sequence: int = FIRST, limit: int = 0, ahead: int = 12) -> None:
        run = m.Run(sequence, SESSION, PLAN, (), (), (), segments=limit or self.segments, ahead=ahead)
        self.dispatcher.handle(run)

    def await_feeds(self, session: int, feeds: list[int], wake: Any, who: int) -> bool:
        self.wakes.append(wake)
        return self.here.issuperset(feeds)

    def units(self) -> list[int]:
        """Sequence numbers of the units that the executor has got since the last time."""
        found = [
            message.sequence if type(message) is m.Run else message.units[0][0]
            for message in self.executed
            if type(message) in (m.Run, m.Dispatch)
        ]
        self.executed.clear()
        return found

    def end(self, *sequences: int, took: int = MS) -> None:
        for sequence in sequences:
            self.now += took
            self.delegated.report(m.Done(((sequence, self.now - took, self.now),)))

    def sent(self) -> list[Any]:
        replies, self.output[:] = list(self.output), []
        return replies


def ended(message: m.RunProgress) -> list[int]:
    """The segments that it is about, but for those that have failed."""
    ends = struct.unpack(f"<{len(message.times) // 8}q", message.times)[1::2]
    return [segment for segment, end in enumerate(ends, message.first) if end]


def test_units_start_as_earlier_ones_end_and_one_message_tells_of_all():
    host = Host(segments=5)
    host.run()
    (first, *_) = host.executed
    assert (first.sequence, first.segments, first.ahead) == (FIRST, 1, 0)
    assert host.units() == [100, 102, 104], "nobody knows yet how long they take"
    host.end(100, 102)
    assert host.units() == [106, 108]
    assert host.sent() == []
    host.end(104, 106, 108)
    (received,) = host.sent()
    assert (received.sequence, received.is_over, ended(received)) == (FIRST, True, [0, 1, 2, 3, 4])
    assert struct.unpack("<2q", received.times[:16]) == (0, MS)


def test_the_controller_knows_units_by_the_number_of_their_run():
    host = Host(segments=5)
    host.run()
    started = host.units()
    assert host.delegated.units_of(FIRST) == started == [100, 102, 104], "each is stopped if the run is"
    assert {host.delegated.gang_of(unit) for unit in started} == {FIRST}
    host.end(100)
    assert 100 not in host.delegated.units_of(FIRST)
    assert (host.delegated.gang_of(55), host.delegated.units_of(55)) == (55, [55]), "a unit of no delegated run"


def test_what_is_in_flight_is_bounded_by_time_and_by_what_memory_was_reserved_for():
    host = Host(segments=40)
    for took, most in ((50_000, 12), (20 * MS, 2)):
        host.run(ahead=12)
        open_ones, largest = host.units(), 0
        while open_ones:
            host.end(open_ones.pop(0), took=took)
            open_ones += host.units()
            largest = max(largest, len(open_ones))
        assert host.sent()[-1].is_over
        host.run(ahead=12)  # now it knows
        assert len(host.units()) == most
        host.dispatcher.handle(m.CloseStore(SESSION))
        host = Host(segments=40) if took == 50_000 else host


def test_the_next_call_is_enqueued_behind_a_long_one_whatever_is_sent_between_the_two():
    host = Host()
    send = p.Send(0, (0,), Exchange(spread((4,), Replicated(), (0,)), spread((4,), Replicated(), (1,)), False, 0))
    plan = p.Plan("step", (), tuple(p.Segment(i, (send if i % 3 else CALL,)) for i in range(12)), ())
    host.dispatcher.handle(m.RegisterPlan(PLAN, plan))
    host.segments = 12
    host.run()
    started = host.units()
    while started:  # from now on it is known how long each takes
        host.end(started[0], took=MS // 20 if (started[0] - FIRST) % 3 else 20 * MS)
        started = started[1:] + host.units()
    host.run(sequence=200)
    assert host.units() == [200, 201, 202, 203, 204, 205], "two calls, and what is sent between and after them"
    host.end(200, took=20 * MS)
    assert host.units() == [206, 207, 208]


def test_a_run_waits_for_the_one_before_it_in_its_session_to_be_dispatched():
    host = Host(segments=4)
    host.run()
    host.run(sequence=200)
    assert host.units() == [100, 102, 104]
    host.end(100)
    assert host.units() == [106]
    host.end(102)
    assert host.units()[0] == 200, "the end of the one before is not awaited"


@pytest.mark.parametrize("limit", range(2, 6))
def test_a_revoked_run_continues_up_to_its_limit(limit):
    host = Host(segments=5)
    host.run()
    host.end(100)
    started = len(host.units())
    host.dispatcher.handle(m.RevokeRuns(SESSION))
    before, revoked = host.sent()
    assert (ended(before), revoked) == ([0], m.RunsRevoked(SESSION, ((FIRST, started),))), (
        "times before the revocation come first"
    )
    host.end(*[100 + 2 * i for i in range(1, started)])
    assert (host.units(), host.sent()) == ([], []), "it waits for the controller"
    limit = max(limit, started)
    host.dispatcher.handle(m.SetRunLimit(SESSION, ((FIRST, limit),)))
    left = [100 + 2 * i for i in range(started, limit)]
    assert host.units() == left
    host.end(*left)
    (received,) = host.sent()
    assert received.is_over
    assert ended(received) == list(range(1, limit))


def test_all_segments_of_a_run_that_has_not_begun_are_revoked():
    host = Host(segments=4)
    host.run()
    host.run(sequence=200)
    host.units()
    host.dispatcher.handle(m.RevokeRuns(SESSION))
    assert host.sent() == [m.RunsRevoked(SESSION, ((100, 3), (200, 0)))]
    host.dispatcher.handle(m.SetRunLimit(SESSION, ((100, 3), (200, 0))))
    assert host.sent() == []
    host.end(100, 102, 104)
    assert [(each.sequence, each.is_over) for each in host.sent()] == [(100, True), (200, True)], "in order"


def test_a_failure_is_told_at_once_and_ends_the_run_when_all_that_was_started_has_ended():
    host = Host()
    host.run()
    host.units()
    host.delegated.report(m.Failed(100, BROKEN))
    assert host.sent() == [m.Failed(FIRST, BROKEN)]
    assert host.executed == [m.DropRun(SESSION, FIRST)]
    host.executed.clear()
    host.end(102, 104)
    (received,) = host.sent()
    assert (received.is_over, ended(received), host.units()) == (True, [1, 2], [])


@pytest.mark.parametrize("is_told_first", [False, True])
def test_what_stands_behind_a_failure_begins_when_the_controller_has_said_so(is_told_first):
    host = Host()
    host.run()
    host.run(sequence=200)
    host.units()
    drop, limit = m.DropRun(SESSION, FIRST), m.SetRunLimit(SESSION, ((200, 8),))
    if is_told_first:
        host.dispatcher.handle(drop)
    host.delegated.report(m.Failed(100, BROKEN))
    host.end(102, 104)
    assert host.units() == [], "it may need what was not made"
    if not is_told_first:
        host.dispatcher.handle(drop)
    host.dispatcher.handle(limit)
    assert host.units()[0] == 200


def test_the_table_has_all_transitions():
    run = m.Run(FIRST, SESSION, PLAN, (), (), ())
    plan = p.Plan("step", (), (), ())
    check_table(lambda state: HostRun(run, plan, [], [], 0, state=state), DelegatedRunState, TRANSITIONS)


def test_a_run_that_is_revoked_again_awaits_the_later_limit():
    host = Host()
    host.run()
    host.units()
    host.dispatcher.handle(m.RevokeRuns(SESSION))
    host.dispatcher.handle(m.RevokeRuns(SESSION))
    host.dispatcher.handle(m.SetRunLimit(SESSION, ((FIRST, 4),)))
    host.end(100, 102, 104)
    assert host.units() == [106]
    host.end(106)
    assert host.sent()[-1].is_over


def test_a_run_that_is_dropped_starts_nothing_more():
    host = Host()
    host.run()
    host.units()
    host.dispatcher.handle(m.DropRun(SESSION, FIRST))
    host.end(100, 102, 104)
    assert host.executed == [m.DropRun(SESSION, FIRST)]
    assert host.sent()[-1].is_over


def test_a_run_that_is_dropped_while_it_is_revoked_starts_nothing_more():
    host = Host()
    host.run()
    host.units()
    host.dispatcher.handle(m.RevokeRuns(SESSION))
    host.dispatcher.handle(m.CloseStore(SESSION))
    host.dispatcher.handle(m.SetRunLimit(SESSION, ((FIRST, 8),)))
    host.end(100, 102, 104)
    assert host.units() == []
    assert host.sent()[-1].is_over


def test_a_run_that_stood_behind_another_one_is_not_told_of_before_it_has_taken_a_second():
    host = Host(segments=3)
    host.run()
    host.run(sequence=200)
    host.end(100, 102, 104, took=400 * MS)
    assert [each.is_over for each in host.sent()] == [True]
    host.end(200, 202, 204)
    assert [each.is_over for each in host.sent()] == [True]


def test_of_gangs_that_end_out_of_order_those_behind_an_open_one_have_their_times_told_later():
    host = Host(segments=4)
    host.run()
    host.end(102, took=1001 * MS)
    (received,) = host.sent()
    assert (ended(received), received.ended.busy_ns) == ([], 1001 * MS), "but they are counted"
    host.end(100, 104, 106)
    (received,) = host.sent()
    assert (received.first, ended(received), received.ended.busy_ns) == (0, [0, 1, 2, 3], 3 * MS)


def test_a_gang_has_its_devices_from_the_end_of_the_one_before_it():
    host = Host(segments=3)
    host.dispatcher.handle(m.Run(FIRST, SESSION, PLAN, (), (), (), segments=3, ahead=12, sampled=(1,)))
    for sequence, now in ((100, 4), (102, 5), (104, 9)):
        host.delegated.report(m.Done(((sequence, 0, now * MS),)))
    (received,) = host.sent()
    counts = tuple(counts_of([4 * MS, MS, 4 * MS]))
    assert received.ended == m.GangsEnded(9 * MS, 0, 0, 9 * MS, counts, ((1, MS),))


def test_others_pass_and_long_runs_are_told_of_each_second():
    host = Host(segments=4)
    dispatch = m.Dispatch(SESSION, 50, ((51, 1),))
    host.dispatcher.handle(dispatch)
    assert host.executed == [dispatch]
    host.delegated.report(m.Done(((51, 0, 1),)))
    assert host.sent() == [m.Done(((51, 0, 1),))]
    host.run()
    host.end(100, took=1001 * MS)
    (received,) = host.sent()
    assert (received.is_over, ended(received)) == (False, [0])


def test_a_segment_that_awaits_bytes_starts_when_they_arrive_so_that_it_can_be_revoked():
    host = Host()
    exchange = Exchange(spread((4,), Replicated(), (1,)), spread((4,), Replicated(), (0,)), False, 0)
    receive = p.Receive(0, p.LocalArray("float32", (4,), ((4,),), (0,), (0,)), exchange)
    plan = p.Plan("step", (), (p.Segment(0, (CALL,)), p.Segment(1, (receive,)), p.Segment(2, (CALL,))), ())
    host.dispatcher.handle(m.RegisterPlan(PLAN, plan))
    host.segments = 3
    host.run()
    assert host.units() == [100]
    host.end(100)
    assert host.units() == []
    host.here.update(receive.feeds)
    host.wakes[-1]()
    assert host.units() == [101, 102]
