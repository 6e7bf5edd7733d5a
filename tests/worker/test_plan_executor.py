"""Tests of plans: segments run in order, block while bytes are missing, and keep the order of collectives."""

from __future__ import annotations

import gc
import threading
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.ir.exchange import spread
from atoll.ir.row_exchange import RowExchange
from atoll.ir.types import Replicated
from atoll.protocol import messages as m
from atoll.worker.plan_executor import CollectiveOrder, ExecutorStatistics
from tests.waiting import until
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, copying, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_plan_executor")


def left(rig: Rig) -> ExecutorStatistics:
    """Return what the executor has not finished."""
    return rig.executor.plan_executor.statistics()


def start_segments(
    rig: Rig, segments: tuple[p.Segment, ...], argument: int, results: int = 1
) -> tuple[int, tuple[int, ...]]:
    """Dispatch the first segment. Return its sequence number, and the results' handles."""
    plan, sequence = rig.fresh(), rig.fresh()
    body = p.Plan("train_step", (0,), segments, tuple(value for segment in segments for value in segment.results))
    handles = tuple(rig.fresh() for _ in range(results))
    rig.executor.submit(m.RegisterPlan(plan, body))
    rig.executor.submit(m.Run(sequence, rig.session, plan, (argument,), handles, ()))
    return sequence, handles


def doubling_segments(name: str) -> tuple[p.Segment, ...]:
    """Return segments in which each value is twice the previous one. The last value is the result."""
    calls = [p.Execute(name, (i, i), i + 1, (), (), False) for i in range(3)]
    return tuple(p.Segment(i, (call,), (3,) if i == 2 else (), drops=(i,)) for i, call in enumerate(calls))


@BEHAVIOURS.add
def it_runs_a_plan_segment_by_segment_as_they_are_dispatched(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, (result,) = start_segments(rig, doubling_segments(name), rig.ones())
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first
    # Others get in between.
    _, (other,) = rig.call(name, rig.ones(), rig.ones())
    assert rig.shard(other)[0] == 2
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1), (first + 102, 1))))
    ended = [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    while len(ended) < 2:
        ended += [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    assert ended == [first + 101, first + 102]
    assert rig.shard(result)[0] == 8


@BEHAVIOURS.add
def it_tells_messages_that_free_or_read_few_arrays_from_others(rig: Rig) -> None:
    is_short = rig.executor.plan_executor.is_short
    get, add = p.Get(0, 1, 0, (4,), None, (0,), (((0, 4),),)), p.Execute("add", (0, 0), 1, (), (), False)
    reading, calling, missing = rig.fresh(), rig.fresh(), rig.fresh()
    for plan, steps in ((reading, (get,)), (calling, (add, get))):
        body = p.Plan("f", (0,), (p.Segment(0, steps, (1,)),), (1,))
        rig.executor.submit(m.RegisterPlan(plan, body, acknowledge=True))
        assert isinstance(rig.reports.get(timeout=SECONDS), m.PlanRegistered)

    def run(plan: int, arguments: int = 1) -> m.Run:
        return m.Run(rig.fresh(), rig.session, plan, tuple(range(arguments)), (rig.fresh(),), (rig.fresh(),))

    assert is_short(run(reading))
    assert not is_short(run(reading, arguments=1000))
    assert not is_short(run(calling))
    assert not is_short(run(missing))
    assert is_short(m.Free(rig.session, (1,)))
    assert not is_short(m.Free(rig.session, (1,), delete=True))
    assert not is_short(m.Free(rig.session, tuple(range(1000))))


@BEHAVIOURS.add
def it_runs_several_segments_in_one_dispatch_unit(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, (result,) = start_segments(rig, doubling_segments(name), rig.ones())
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 2),)))
    assert [run[0] for run in rig.reports.get(timeout=SECONDS).runs] == [first + 101]
    assert rig.shard(result)[0] == 8
    assert left(rig).plan_runs == 0


@BEHAVIOURS.add
def it_runs_no_segment_after_one_that_failed(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    segments = list(doubling_segments(name))
    segments[1] = p.Segment(1, (p.Execute("no such", (1, 1), 2, (), (), False),), drops=(1,))
    first, (result,) = start_segments(rig, tuple(segments), rig.ones())
    rig.reports.get(timeout=SECONDS)
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1), (first + 102, 1))))
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.code) == (first + 101, Code.NOT_FOUND)
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first + 102
    says(rig.failure(rig.call(name, result, result)), Code.NOT_FOUND, "no such")


@BEHAVIOURS.add
def it_reports_a_collective_that_it_left_out_as_failed(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    _, *others = doubling_segments(name)
    bad = p.Segment(0, (p.Execute("no such", (0, 0), 1, (), (), False),), drops=(0,))
    collective = msgspec.structs.replace(others[0], collective=True)
    sequence, _ = start_segments(rig, (bad, collective, others[1]), rig.ones())
    assert rig.reports.get(timeout=SECONDS).sequence == sequence
    rig.executor.submit(m.Dispatch(rig.session, sequence, ((sequence + 101, 1), (sequence + 102, 1))))
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.code) == (sequence + 101, Code.NOT_FOUND)
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == sequence + 102
    assert left(rig).plan_runs == 0
    rig.executor.submit(m.CollectiveEnded(sequence + 101))


@BEHAVIOURS.add
def it_starts_no_collective_while_others_may_wait_in_one_that_it_left_out(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    a, segments = rig.ones(), doubling_segments(name)
    bad = p.Segment(0, (p.Execute("no such", (0, 0), 1, (), (), False),), (3,), collective=True)
    sequence, _ = start_segments(rig, (bad,), a)
    assert rig.reports.get(timeout=SECONDS).sequence == sequence
    collective = msgspec.structs.replace(segments[0], results=(1,), drops=(), collective=True)
    session = rig.fresh()
    rig.executor.submit(m.OpenStore(session, "secret"))
    rig.session, before = session, rig.session
    other, _ = start_segments(rig, (collective,), rig.ones())
    rig.session = before
    report, _ = rig.call(name, a, a)
    assert report.runs[0][0] != other, "runs without collectives continue"
    assert left(rig).blocked_collectives == 1
    rig.executor.submit(m.CollectiveEnded(sequence))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == other
    rig.executor.submit(m.CloseStore(session))


@BEHAVIOURS.add
def it_begins_no_run_that_has_ended_with_its_world(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    a, segments = rig.ones(), doubling_segments(name)
    bad = p.Segment(0, (p.Execute("no such", (0, 0), 1, (), (), False),), (3,), collective=True)
    left_out, _ = start_segments(rig, (bad,), a)
    assert rig.reports.get(timeout=SECONDS).sequence == left_out
    collective = msgspec.structs.replace(segments[0], results=(1,), drops=(), collective=True)
    blocked, _ = start_segments(rig, (collective,), a)
    until(lambda: left(rig).blocked_collectives == 1)
    on_its_way = blocked + 3
    closing = m.CloseWorld(7, Status(Code.DATA_LOSS, "host 1 is gone"), ended=(left_out, blocked, on_its_way))
    rig.executor.units.end(closing.ended, closing.status)
    arrived, _ = start_segments(rig, (collective,), a)
    rig.executor.submit(closing)
    rig.executor.submit(m.CollectiveEnded(left_out))
    failed = [rig.reports.get(timeout=SECONDS) for _ in range(2)]
    assert [each.sequence for each in failed] == [blocked, arrived]
    assert arrived == on_its_way
    for each in failed:
        assert (each.status.code, each.status.message) == (Code.DATA_LOSS, "host 1 is gone (in train_step)")
        rig.executor.submit(m.CollectiveEnded(each.sequence))
    later, _ = start_segments(rig, (collective,), a)
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == later
    assert not rig.executor.plan_executor.ended_runs


class InWorld:
    """A loaded function that runs together with hosts of another island, in a world."""

    def __init__(self, loaded: Any, world: int) -> None:
        self._loaded = loaded
        self.world = world
        self.is_joint = True
        self.error: Exception | None = None  # of a run that fails inside the call, or that waits on a thread
        self.has_begun, self.has_failed = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    def execute(self, *arguments: Any) -> Any:
        if self.has_failed.is_set() and self.error is not None:
            raise self.error
        outputs, token = self._loaded.execute(*arguments)
        self.has_begun.set()
        return outputs, token if self.error is None else self

    def block_until_ready(self) -> None:
        assert self.has_failed.wait(SECONDS)
        assert self.error is not None
        raise self.error


def in_world(rig: Rig, world: int) -> tuple[tuple[p.Segment, ...], InWorld]:
    """Return the segment of a function in a world, and the function."""
    name = rig.function(add, spec(), spec())
    function = rig.functions.records.get(name)
    made = InWorld(function.loaded, world)
    function.loaded = cast(Any, made)
    rig.functions.placer.note_loaded(function)
    return (p.Segment(0, (p.Execute(name, (0, 0), 1, (), (), False),), (1,), collective=True),), made


GONE = Status(Code.UNAVAILABLE, "host 1 has left the world")


@BEHAVIOURS.add
def it_waits_in_a_new_world_for_a_run_that_other_hosts_may_begin_there(rig: Rig) -> None:
    segment, function = in_world(rig, 7)
    function.error = RuntimeError("Connection closed by peer")
    a = rig.ones()
    begun, _ = start_segments(rig, segment, a)
    assert function.has_begun.wait(SECONDS)
    rig.worlds.note_closing(m.CloseWorld(7, GONE, 8, ended=(begun - 1,)))
    rig.executor.submit(m.CloseWorld(7, GONE, 8, ended=(begun - 1,)))
    function.has_failed.set()
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.details.retriable) == (begun, True)
    assert "only some of its hosts may have begun it: host 1 has left the world" in failed.status.message
    function.world, function.error = 8, None
    later, _ = start_segments(rig, segment, a)
    until(lambda: left(rig).blocked_collectives == 1)
    rig.executor.submit(m.CollectiveEnded(begun))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == later


@BEHAVIOURS.add
def it_names_the_cause_if_a_run_waits_in_the_call_that_starts_it_until_its_world_is_closed(rig: Rig) -> None:
    segment, function = in_world(rig, 9)
    function.error = RuntimeError("Connection closed by peer")
    function.has_failed.set()
    rig.worlds.note_closing(m.CloseWorld(9, GONE))
    sequence, _ = start_segments(rig, segment, rig.ones())
    failed = rig.reports.get(timeout=SECONDS)
    assert (failed.sequence, failed.status.message) == (sequence, "host 1 has left the world (in train_step)")
    rig.executor.submit(m.CollectiveEnded(sequence))


@BEHAVIOURS.add
def it_does_not_wait_for_a_collective_that_it_left_out(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    a = rig.ones()
    blocked = []
    for _ in range(2):  # sessions, each with something to compute together behind bytes that are awaited
        feed, plan, sequence = rig.fresh(), rig.fresh(), rig.fresh()
        receive = p.Segment(0, (p.Receive(0, local(0), copying(1)),))
        call = p.Segment(1, (p.Execute(name, (0, 0), 1, (), (), False),), (1,), (0,), collective=True)
        rig.executor.submit(m.OpenStore(rig.session + 1000 * len(blocked), "secret"))
        session = rig.session + 1000 * len(blocked)
        rig.executor.submit(m.RegisterPlan(plan, p.Plan("train_step", (), (receive, call), (1,))))
        rig.executor.submit(m.Run(sequence, session, plan, (), (rig.fresh(),), (), feed))
        rig.executor.submit(m.Dispatch(session, sequence, ((sequence + 500, 1),)))
        blocked.append((session, feed, sequence))
    until(lambda: left(rig).blocked_collectives == 2)
    (_, feed, first), (other, failing, second) = blocked
    rig.inbox.fail(other, failing, 1, Status(Code.DATA_LOSS, "gone"))
    failed = [rig.reports.get(timeout=SECONDS).sequence for _ in range(2)]
    assert failed == [second, second + 500]
    rig.inbox.put(rig.session, feed, np.ones(16, np.uint8))
    ended: list[int] = []
    while len(ended) < 2:
        ended += [run[0] for run in rig.reports.get(timeout=SECONDS).runs]
    assert ended == [first, first + 500]
    report, _ = rig.call(name, a, a)
    assert isinstance(report, m.Done)
    assert left(rig).blocked_collectives == 0
    rig.executor.submit(m.CollectiveEnded(second + 500))


def receive(rig: Rig, count: int = 1) -> tuple[list[int], list[int]]:
    """Start a run that only receives this many arrays, whose bytes have not arrived.

    Return the feeds and the results' handles.
    """
    feeds = [rig.fresh() for _ in range(count)]
    steps = [p.Receive(i, local(0), msgspec.structs.replace(copying(1), first=i)) for i in range(count)]
    return feeds, list(rig.start(steps, (), count, host_feeds=feeds[0]))


@BEHAVIOURS.add
def it_runs_what_follows_a_receive_before_its_bytes_are_here_unless_that_needs_them(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    a = rig.ones()
    (feed,), (expected,) = receive(rig)
    report, (sum_,) = rig.call(name, a, a)
    assert isinstance(report, m.Done)
    assert rig.shard(sum_)[0] == 2
    calls = [p.Execute(name, (0, 0), 1, (), (), False)]
    (doubled,) = rig.start(calls, (expected,))
    (after,) = rig.start(calls, (a,))  # in order behind what waits
    rig.inbox.put(rig.session, feed, np.full(4, 3, np.float32).view(np.uint8))
    ended = 0
    while ended < 3:
        ended += len(rig.reports.get(timeout=SECONDS).runs)
    assert [rig.shard(handle)[0] for handle in (expected, doubled, after)] == [3, 6, 2]
    assert (left(rig).background, left(rig).blocked) == (0, 0)


@BEHAVIOURS.add
def it_frees_and_deletes_what_is_still_expected(rig: Rig) -> None:
    freed, deleted = receive(rig), receive(rig)
    rig.executor.submit(m.Free(rig.session, tuple(freed[1])))
    rig.executor.submit(m.Free(rig.session, tuple(deleted[1]), delete=True))
    for (feed,), _ in (freed, deleted):
        rig.inbox.put(rig.session, feed, np.ones(16, np.uint8))
        assert isinstance(rig.reports.get(timeout=SECONDS), m.Done)
    name = rig.function(add, spec(), spec())
    says(rig.failure(rig.call(name, deleted[1][0], deleted[1][0])), Code.INVALID_ARGUMENT, "delete")
    says(rig.failure(rig.call(name, freed[1][0], freed[1][0])), Code.NOT_FOUND, "is not on this host")


@BEHAVIOURS.add
def it_fails_what_needs_bytes_that_will_not_come(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    (feed,), (expected,) = receive(rig)
    rig.start([p.Execute(name, (0, 0), 1, (), (), False)], (expected,))
    rig.inbox.fail(rig.session, feed, 1, Status(Code.DATA_LOSS, "host 7 is gone"))
    for _ in range(2):
        report = rig.reports.get(timeout=SECONDS)
        assert (report.status.code, "host 7 is gone" in report.status.message) == (Code.DATA_LOSS, True)


@BEHAVIOURS.add
def it_reports_a_unit_in_the_background_when_its_session_ends(rig: Rig) -> None:
    receive(rig, count=2)
    rig.executor.submit(m.CloseStore(rig.session))
    assert len(rig.reports.get(timeout=SECONDS).runs) == 1
    assert left(rig).background == 0


@BEHAVIOURS.add
def it_forgets_a_run_that_is_dropped(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    first, _ = start_segments(rig, doubling_segments(name), rig.ones())
    rig.reports.get(timeout=SECONDS)
    rig.executor.submit(m.DropRun(rig.session, first))
    rig.executor.submit(m.Dispatch(rig.session, first, ((first + 101, 1),)))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == first + 101
    assert left(rig).plan_runs == 0


@BEHAVIOURS.add
def it_does_nothing_for_a_session_that_has_ended(rig: Rig) -> None:
    rig.executor.submit(m.Run(78, 999_999, 1, (), (), ()))
    assert rig.reports.get(timeout=SECONDS).runs[0][0] == 78


@BEHAVIOURS.add
def it_frees_an_array_whose_rows_were_sent_without_the_collector(rig: Rig) -> None:
    import jax

    count = 50_021  # no other array here has as many rows
    rows, sizes = rig.ones(shape=(count, 2)), rig.put(local(0, shape=(1, 1), dtype="int32"), np.full((1, 1), 7, "<i4"))
    doubled = rig.function(add, spec((count, 2)), spec((count, 2)))
    here = spread((count, 2), Replicated(), (0,))
    exchange = RowExchange(here, here, 1, 0, 0)
    steps = [
        p.Execute(doubled, (0, 0), 2, (), (), False),
        p.SendRows((2, 1), (0,), (0,), (exchange,)),
        p.ReceiveRows(3, local(0, shape=(count, 2)), -1, None, (exchange,)),
    ]
    drops = [(0,), (1, 2), (3,)]

    def alive() -> int:
        return sum(array.shape == (count, 2) for array in jax.live_arrays())

    before = alive()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            plan, sequence = rig.fresh(), rig.fresh()
            segments = tuple(p.Segment(i, (step,), (), drops[i]) for i, step in enumerate(steps))
            rig.executor.submit(m.RegisterPlan(plan, p.Plan("route", (0, 1), segments, ())))
            rig.executor.submit(m.Run(sequence, rig.session, plan, (rows, sizes), (), (), rig.fresh()))
            units = ((sequence + 501, 1), (sequence + 502, 1))
            rig.executor.submit(m.Dispatch(rig.session, sequence, units))
            rig.executor.submit(m.DropPlan(plan))
            ended = 0
            while ended < 3:
                report = rig.reports.get(timeout=SECONDS)
                assert isinstance(report, m.Done | m.RowsMoved), report
                ended += len(report.runs) if isinstance(report, m.Done) else 0
        until(lambda: alive() <= before)
    finally:
        gc.enable()


@BEHAVIOURS.add
def it_fails_a_run_whose_plan_it_does_not_have(rig: Rig) -> None:
    rig.executor.submit(m.Run(77, rig.session, 999_999, (), (), ()))
    report = rig.reports.get(timeout=SECONDS)
    assert (report.sequence, report.status.code) == (77, Code.INTERNAL)


@BEHAVIOURS.add
def it_passes_an_error_on_to_what_is_made_of_it(rig: Rig) -> None:
    name = rig.function(add, spec(), spec())
    _, (bad,) = rig.call(name, 999_999, 999_999, name="first")
    says(rig.failure(rig.call(name, bad, rig.ones())), Code.NOT_FOUND, "array 999999", "first")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_the_plan_executor(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()


# ---- the order of collectives on one host


def test_one_that_is_parked_holds_up_those_after_it_and_none_before():
    order = CollectiveOrder()
    first, second, third = order.add(), order.add(), order.add()
    order.block(second)
    order.block(third)
    assert order.may_start(first)
    assert order.may_start(second)
    assert not order.may_start(third)
    order.unblock(second)
    assert order.may_start(third)


def test_one_that_was_left_out_holds_up_later_ones_until_it_has_ended_everywhere():
    order = CollectiveOrder()
    first, second = order.add(), order.add()
    order.skip(70, first)
    assert not order.may_start(second)
    assert not order.ended(71)
    assert not order.may_start(second)
    assert order.ended(70)
    assert order.may_start(second)
    assert not order.ended(70)


def test_one_that_was_parked_and_is_left_out_then_still_holds_up_later_ones():
    order = CollectiveOrder()
    first, second = order.add(), order.add()
    order.block(first)
    order.skip(70, first)
    order.unblock(first)
    assert not order.may_start(second)


@given(st.lists(st.sampled_from(["comes", "starts", "is left out", "ends"]), max_size=40), st.data())
def test_what_starts_is_never_before_what_waits(steps: list[str], data: st.DataObject) -> None:
    order = CollectiveOrder()
    waiting: list[int] = []  # blocked or left out
    left_out: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step == "comes":
            index = order.add()
            assert order.may_start(index) == (not waiting)
            if waiting or data.draw(st.booleans()):
                order.block(index)
                waiting.append(index)
        elif step == "starts" and waiting and waiting[0] not in left_out.values():
            assert order.may_start(waiting[0])
            assert not any(map(order.may_start, waiting[1:]))
            order.unblock(waiting.pop(0))
        elif step == "is left out" and waiting:
            index = data.draw(st.sampled_from(waiting))
            if index not in left_out.values():
                order.skip(number, index)
                order.unblock(index)
                left_out[number] = index
        elif step == "ends" and left_out:
            sequence = data.draw(st.sampled_from(sorted(left_out)))
            assert order.ended(sequence)
            waiting.remove(left_out.pop(sequence))
