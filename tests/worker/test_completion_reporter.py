"""Tests of reports of ended units, once after their last reads, and of the units that keep devices busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.worker.completion_reporter import CompletionReporter, Occupancy
from atoll.worker.completions import DeletionGuard, RunCompletion
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun, Read
from atoll.worker.function_records import FunctionRecords
from atoll.worker.read_threads import ReadThreads
from atoll.worker.step_runner import StepRunner

SECONDS = 120.0


class Pending:
    """Completion whose readiness the test sets."""

    ready_means_complete = True

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def is_ready(self) -> bool:
        return self.is_over.is_set()

    def block_until_ready(self) -> None:
        assert self.is_over.wait(SECONDS)


class Watching:
    """Watched unit, with all reports as clock ticks."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.watched: list[Sequence[Any]] = []
        self.ticks = iter(range(1, 1000))
        self.readers = ReadThreads()
        steps: Any = SimpleNamespace(device_of=lambda segment: 0)
        occupancy = Occupancy(self.report, lambda unit: (), lambda array: ())
        self.reporter = CompletionReporter(steps, occupancy, self, self.readers, lambda: next(self.ticks))
        plan = p.Plan("f", (), (p.Segment(0, ()),), ())
        self.unit = DispatchUnit(PlanRun(m.Run(7, 1, 1, (), (), ()), plan), 0, 1, 7, 0)

    def report(self, *messages: Any) -> None:
        self.reports.extend(messages)

    def watch(self, device: int, sequence: int, started: int, completions: Sequence[Any]) -> None:
        self.watched.append(completions)

    def end(self) -> list[Any]:
        self.readers.shutdown()
        self.reporter.report_completed()
        return self.reports


def read(call: Callable[[], Any] = lambda: None, wait: Callable[[], Any] = lambda: None, at_once: bool = False) -> Read:
    def call_at_once() -> bool:
        if at_once:
            call()
        return at_once

    return Read(wait, call, call_at_once)


def test_it_ends_once_with_the_last_of_its_reads_and_began_with_the_first() -> None:
    case, first, last = Watching(), threading.Event(), threading.Event()
    case.unit.reads = [read(first.set), read(lambda: last.wait(SECONDS)), read()]
    case.reporter.watch(case.unit)
    assert first.wait(SECONDS)
    while next(case.ticks) < 50:
        pass
    assert not case.reports
    last.set()
    ((sequence, started, ended),) = case.end()[0].runs
    assert (len(case.reports), sequence) == (1, 7)
    assert started < 50 < ended
    assert not case.watched


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_known_of_rows_comes_ahead_of_the_end_in_one_message(at_once: bool) -> None:
    case = Watching()
    unit = case.unit
    unit.rows.append((0, 5))
    unit.reads = [read(lambda: unit.rows.append((10, 0)), at_once=at_once)]
    if not at_once:
        unit.reads.append(read(lambda: unit.rows.append((100, 0))))
    case.reporter.watch(unit)
    moved, done = case.end()
    assert moved == m.RowsMoved(7, 10 if at_once else 110, 5)
    assert done.runs[0][0] == 7


def test_a_read_that_fails_fails_it_once_when_nobody_reads_any_more() -> None:
    case, last = Watching(), threading.Event()

    def fail() -> None:
        raise StatusError(Code.DATA_LOSS, "gone")

    case.unit.reads = [read(fail), read(fail), read(lambda: last.wait(SECONDS))]
    case.reporter.watch(case.unit)
    last.set()
    (failed,) = case.end()
    assert (failed.sequence, failed.status.code) == (7, Code.DATA_LOSS)
    assert "gone" in failed.status.message


def test_a_read_that_fails_at_once_fails_it() -> None:
    case = Watching()

    def fail() -> None:
        raise StatusError(Code.DATA_LOSS, "gone")

    case.unit.reads = [read(fail, at_once=True)]
    case.reporter.watch(case.unit)
    (failed,) = case.reports
    assert (failed.sequence, failed.status.code) == (7, Code.DATA_LOSS)


def test_rows_that_are_read_beside_what_is_watched_are_reported_by_who_reads_them() -> None:
    case, computed, first = Watching(), Pending(), threading.Event()
    unit = case.unit
    unit.completions.append(computed)
    unit.rows.append((0, 1))
    unit.reads = [read(lambda: (first.wait(SECONDS), unit.rows.append((2, 0))))]
    case.reporter.watch(unit)
    assert case.reports == [m.RowsMoved(7, 0, 1)]
    first.set()
    case.readers.shutdown()
    assert case.reports[1:] == [m.RowsMoved(7, 2, 0)]
    ((_, beside),) = case.watched
    assert beside.is_ready()


def test_a_unit_is_watched_although_its_function_has_been_dropped() -> None:
    unused: Any = SimpleNamespace(release_memory=None, inbox=None, shards=None)
    placer = SimpleNamespace(closing_status=None)
    functions: Any = SimpleNamespace(records=FunctionRecords(), followers=None, placer=placer, python=None)
    steps = StepRunner(unused, functions, unused, unused, unused, unused, unused)
    assert steps.device_of(p.Segment(0, (p.Execute("f", (), 0, (), (), False),))) == 0


# ---- units that keep devices busy


class Output:
    """An output whose readiness the test sets, on all devices or on each."""

    def __init__(self, devices: int = 0) -> None:
        self.ready = False
        self.deleted = False
        self.shards = [Output() for _ in range(devices)]

    def is_deleted(self) -> bool:
        return self.deleted

    def is_ready(self) -> bool:
        return self.ready


class Host:
    """Runs by unit, and the devices of what the executor's thread enqueues."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.enqueuing: tuple[int, ...] = ()
        self.occupancy = Occupancy(
            lambda *messages: self.reports.extend(messages), lambda unit: self.enqueuing, lambda array: array.shards
        )

    def begin(self, sequence: int, *devices: int) -> Output:
        output, token = Output(len(devices)), None
        completion: Any = RunCompletion(token, [output], DeletionGuard(), devices)
        self.occupancy.begun(sequence, [completion] if devices else [])
        return output

    def running(self) -> list[int]:
        return self.occupancy.running()


def test_the_first_unit_on_its_devices_keeps_them_busy():
    host = Host()
    first = host.begin(1, 0)
    host.begin(2, 0)
    host.begin(3, 1)
    assert host.running() == [1, 3]
    first.ready = True
    assert host.running() == [2, 3], "what is left of it, such as a read, keeps no device busy"


def test_a_unit_behind_one_that_waits_is_not_running():
    host = Host()
    host.begin(1, 0)
    host.begin(2, 0, 1)
    host.begin(3, 1)
    assert host.running() == [1]


def test_runs_on_several_devices_are_done_one_at_a_time():
    host = Host()
    host.begin(1, 0, 1)
    host.begin(2, 2, 3)
    assert host.running() == [1]


def test_a_unit_that_runs_nothing_on_devices_is_not_running():
    host = Host()
    host.begin(1)
    host.begin(2, 0)
    assert host.running() == [2]


def test_the_devices_of_a_unit_are_counted_while_it_keeps_them_busy():
    host = Host()
    one, several = host.begin(1, 0), host.begin(2, 1, 2, 3)
    assert [host.occupancy.count_devices(each) for each in (1, 2, 3)] == [1, 3, 0]
    one.ready = several.ready = True
    assert [host.occupancy.count_devices(each) for each in (1, 2)] == [0, 0]
    unit: Any = SimpleNamespace(sequence=3)
    host.occupancy.executing, host.enqueuing = unit, (1, 3)
    assert [host.occupancy.count_devices(each) for each in (3, 4)] == [2, 0]


def test_the_devices_of_a_unit_on_which_its_run_has_ended_are_not_counted():
    """A loop is stopped when all of them are in a check, and those that have ended never will be."""
    host = Host()
    output = host.begin(1, 1, 2, 3)
    output.shards[0].ready = output.shards[2].ready = True
    assert host.occupancy.count_devices(1) == 1
    output.deleted = True
    assert host.occupancy.count_devices(1) == 3, "it is not known where the run has ended"


def test_a_unit_that_has_ended_is_not_running():
    host = Host()
    host.begin(1, 0)
    host.begin(2, 1)
    done, failed = m.Done(((1, 0, 1),)), m.Failed(2, Status(Code.CANCELLED, "stopped"))
    host.occupancy.report(done, failed)
    assert host.reports == [done, failed]
    assert host.running() == []


def test_a_unit_inside_the_call_that_enqueues_it_is_running_unless_another_is_before_it():
    host = Host()
    unit: Any = type("Unit", (), {"sequence": 9})
    host.occupancy.executing, host.enqueuing = unit, (0,)
    assert host.running() == [9]
    host.begin(1, 0, 1)
    assert host.running() == [1]
    host.occupancy.executing = None
    assert host.running() == [1]
