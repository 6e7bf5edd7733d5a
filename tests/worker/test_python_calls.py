"""Tests of Python calls in an executor: futures that are resolved, fail, are awaited, and are freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.ir.program import STORAGE_STREAM
from atoll.protocol import messages as m
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, copying, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_python_calls")


class FakePython:
    """Takes calls, which the test lets return."""

    def __init__(self, rig: Rig) -> None:
        self.calls: list[tuple[list[Any], Callable[[Any], None]]] = []
        self.units: list[int] = []
        self.left_out: list[tuple[int, int]] = []
        self.resumed: list[int] = []
        rig.executor.plan_executor._steps._python = self

    def call(
        self, function: str, stream: int, inputs: Any, results: Any, on_outcome: Callable[[Any], None], sequence: int
    ) -> None:
        if function == "unknown":
            raise KeyError(function)
        self.calls.append((list(inputs), on_outcome))
        self.units.append(sequence)

    def leave_out(self, function: str, stream: int, sequence: int) -> None:
        self.left_out.append((stream, sequence))

    def resume(self, sequence: int) -> None:
        self.resumed.append(sequence)


def call_python(rig: Rig, *arguments: int, function: str = "f", results: int = 1, stream: int = 0) -> tuple[int, ...]:
    """Start a call that returns one array on device 0. Return the results' handles."""
    count = len(arguments)
    given = tuple((i, count + i, local(0)) for i in range(results))
    return rig.start([p.Python(function, stream, tuple((i, i) for i in range(count)), given, -1)], arguments, results)


def settled(rig: Rig) -> None:
    """Wait until all submitted work is complete or blocked."""
    rig.ones()


def done(rig: Rig, units: int) -> None:
    """Return whether this many units have completed, reported together or not."""
    while units:
        report = rig.reports.get(timeout=SECONDS)
        assert isinstance(report, m.Done), report
        units -= len(report.runs)


@BEHAVIOURS.add
def it_replaces_a_future_by_the_result_of_its_call(rig: Rig) -> None:
    python = FakePython(rig)
    (result,) = call_python(rig, rig.ones())
    settled(rig)
    ((argument,), on_outcome) = python.calls[0]
    assert (argument.dtype, argument.shapes, argument.at_once) == ("float32", ((4,),), True)
    assert argument.read()[0].tolist() == [1, 1, 1, 1]
    on_outcome([[np.full(4, 7, np.float32)]])
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Done)
    assert rig.shard(result).tolist() == [7, 7, 7, 7]


@BEHAVIOURS.add
def it_completes_others_of_the_session_while_a_call_runs(rig: Rig) -> None:
    python = FakePython(rig)
    name = rig.function(add, spec(), spec())
    call_python(rig, rig.ones())
    report, (result,) = rig.call(name, rig.ones(), rig.ones())
    assert isinstance(report, m.Done)
    assert rig.shard(result)[0] == 2
    python.calls[0][1]([[np.zeros(4, np.float32)]])
    rig.reports.get(timeout=SECONDS)


@BEHAVIOURS.add
def it_fails_what_needs_an_array_that_will_never_be_with_the_reason(rig: Rig) -> None:
    python = FakePython(rig)
    name = rig.function(add, spec(), spec())
    (futures,) = call_python(rig, rig.ones())
    settled(rig)
    python.calls[0][1](Status(int(Code.ABORTED), "its process has ended"))
    says(rig.reports.get(timeout=SECONDS).status, Code.ABORTED, "its process has ended")
    says(rig.failure(rig.call(name, futures, futures)), Code.ABORTED, "its process has ended")


@BEHAVIOURS.add
def it_resumes_the_calls_behind_one_that_has_ended_on_all_hosts(rig: Rig) -> None:
    python = FakePython(rig)
    call_python(rig, rig.ones())
    settled(rig)
    python.calls[0][1](Status(int(Code.INTERNAL), "it has raised"))
    failed = rig.reports.get(timeout=SECONDS)
    assert isinstance(failed, m.Failed)
    rig.executor.submit(m.CollectiveEnded(failed.sequence))
    settled(rig)
    assert python.units == python.resumed == [failed.sequence]


@BEHAVIOURS.add
def it_passes_a_future_to_the_next_call_without_waiting(rig: Rig) -> None:
    python = FakePython(rig)
    (futures,) = call_python(rig, rig.ones())
    call_python(rig, futures)
    settled(rig)
    ((argument,), on_outcome) = python.calls[1]
    assert not argument.at_once
    python.calls[0][1]([[np.full(4, 5, np.float32)]])
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Done)
    assert argument.read()[0].tolist() == [5, 5, 5, 5]
    on_outcome([[np.zeros(4, np.float32)]])
    rig.reports.get(timeout=SECONDS)


@BEHAVIOURS.add
def it_gives_the_next_call_a_future_that_was_deleted_meanwhile(rig: Rig) -> None:
    python = FakePython(rig)
    (futures,) = call_python(rig, rig.ones())
    call_python(rig, futures)
    rig.executor.submit(m.Free(rig.session, (futures,), True))
    settled(rig)
    ((argument,), on_outcome) = python.calls[1]
    python.calls[0][1]([[np.full(4, 5, np.float32)]])
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Done)
    assert argument.read()[0].tolist() == [5, 5, 5, 5]
    report, _ = rig.read(futures)
    says(report.status, Code.INVALID_ARGUMENT, "deleted")
    on_outcome([[np.zeros(4, np.float32)]])
    rig.reports.get(timeout=SECONDS)


@BEHAVIOURS.add
def it_copies_an_argument_that_is_donated_before_it_was_read(rig: Rig) -> None:
    python = FakePython(rig)
    name = rig.function(add, spec(), spec(), donate=(0,))
    a = rig.ones()
    call_python(rig, a)
    rig.call(name, a, rig.ones(), donated=(0,))
    ((argument,), on_outcome) = python.calls[0]
    assert argument.read()[0].tolist() == [1, 1, 1, 1]
    argument.release()
    argument.release()  # once more does nothing
    on_outcome([[np.zeros(4, np.float32)]])
    rig.reports.get(timeout=SECONDS)


@BEHAVIOURS.add
def it_keeps_nothing_of_a_result_that_was_freed_before_it_came(rig: Rig) -> None:
    python = FakePython(rig)
    (result,) = call_python(rig)
    rig.executor.submit(m.Free(rig.session, (result,)))
    settled(rig)
    python.calls[0][1](Status(int(Code.INTERNAL), "it raised"))
    says(rig.reports.get(timeout=SECONDS).status, Code.INTERNAL, "it raised")
    report, _ = rig.read(result)
    says(report.status, Code.NOT_FOUND, "not on this host")


@BEHAVIOURS.add
def it_deletes_a_result_that_was_deleted_before_it_came(rig: Rig) -> None:
    python = FakePython(rig)
    (result,) = call_python(rig)
    rig.executor.submit(m.Free(rig.session, (result,), True))
    settled(rig)
    python.calls[0][1]([[np.zeros(4, np.float32)]])
    rig.reports.get(timeout=SECONDS)
    report, _ = rig.read(result)
    says(report.status, Code.INVALID_ARGUMENT, "deleted")


@BEHAVIOURS.add
def it_fails_a_call_of_a_function_that_is_not_here(rig: Rig) -> None:
    FakePython(rig)
    call_python(rig, rig.ones(), function="unknown")
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Failed)


@BEHAVIOURS.add
def it_holds_back_the_calls_behind_one_that_fails_before_it_is_made(rig: Rig) -> None:
    python = FakePython(rig)
    deleted = rig.ones()
    rig.executor.submit(m.Free(rig.session, (deleted,), True))
    failed = []
    for function, argument in (("unknown", rig.ones()), ("f", deleted)):
        call_python(rig, argument, function=function)
        failed.append(rig.reports.get(timeout=SECONDS))
    assert all(isinstance(each, m.Failed) for each in failed)
    assert python.left_out == [(0, each.sequence) for each in failed]
    call_python(rig, deleted, function="f", stream=STORAGE_STREAM)
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Failed)
    assert len(python.left_out) == 2, "persistence requests need no other host"


@BEHAVIOURS.add
def it_reports_a_call_as_failed_that_an_earlier_unit_of_its_run_prevents(rig: Rig) -> None:
    """Other hosts may wait in it for this one."""
    python = FakePython(rig)
    name, x = rig.function(add, spec(), spec()), rig.ones(shape=(2,))
    segments = (
        p.Segment(0, (p.Execute(name, (0, 0), 1, (), (), False),), (1,)),
        p.Segment(1, (p.Python("f", 3, (), ((0, 2, local(0)),), -1),), (2,)),
    )
    plan, first, second = rig.fresh(), rig.fresh(), rig.fresh()
    rig.executor.submit(m.RegisterPlan(plan, p.Plan("step", (0,), segments, (1, 2))))
    rig.executor.submit(m.Run(first, rig.session, plan, (x,), (rig.fresh(), rig.fresh()), (), segments=1))
    rig.executor.submit(m.Dispatch(rig.session, first, ((second, 1),)))
    assert [rig.reports.get(timeout=SECONDS).sequence for _ in range(2)] == [first, second]
    assert python.left_out == [(3, second)]


@BEHAVIOURS.add
def it_drops_a_python_function_in_the_order_of_its_session(rig: Rig) -> None:
    python = FakePython(rig)
    dropped: list[int] = []
    rig.functions.python.session_of = lambda name: rig.session
    rig.functions.python.drop = lambda name: dropped.append(len(python.calls))
    feed = rig.fresh()
    # Parks the session, since it does more than to receive.
    rig.start([p.Receive(0, local(0), copying(1)), p.Move((0,), (1,), (local(0),), False)], host_feeds=feed)
    call_python(rig)
    rig.executor.submit(m.DropFunction("g"))
    while len(rig.executor.plan_executor._blocked.get(rig.session, ())) < 3:
        pass
    assert dropped == []
    rig.inbox.put(rig.session, feed, np.ones(16, np.uint8))
    done(rig, 1)
    settled(rig)
    assert dropped == [1]
    python.calls[0][1]([[np.zeros(4, np.float32)]])
    done(rig, 1)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_the_executor(outcomes: dict[str, str], name: str) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
