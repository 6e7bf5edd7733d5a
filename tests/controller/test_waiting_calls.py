"""Tests of calls of Python that have failed on one host while others wait for it: their processes end."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.islands.waiting_calls import WAITING_CALL_SECONDS
from atoll.errors import Code, Details, Kind, Status, failure
from atoll.ir.program import STORAGE_STREAM, Call, single
from atoll.protocol import messages as m
from tests.controller.play import Play, on, runs

RAISED = Status(Code.INTERNAL, "a Python function on the host raised:\nValueError: bad")
LATE = int(WAITING_CALL_SECONDS)


class Calls(Play):
    """A session with a function of Python on device 0 of each of two hosts."""

    def __init__(self, topology: str = "1x2x1", **settings: Any) -> None:
        super().__init__(topology, **settings)
        self.name = self.with_function(1, (0, 1))
        self._handle = 10

    def call(self, stream: int = 0) -> int:
        """Call the function. Return the sequence number of the run on the first host."""
        self._handle += 1
        program = self._handle
        self.send(m.RegisterProgram(program, single("f", (), Call(1, (), (on(0, 1),), (0, 1), stream=stream))))
        first, second = sorted(runs(self.send(m.Launch(program, (), (self._handle,), ()))), key=lambda r: r.sequence)
        self.of_host = {0: first.sequence, 1: second.sequence}
        return int(first.sequence)

    def fail(self, sequence: int, host: int = 0, status: Status = RAISED) -> None:
        self.report(host, m.Failed(sequence, status))

    def stops(self, first: int, last: int) -> list[tuple[tuple[str, int], m.StopRun]]:
        """Let time pass. Return the requests to end processes, with their hosts."""
        for now in range(first, last + 1):
            self.tick(float(now))
        return [(to, each) for to, each in self.sent() if isinstance(each, m.StopRun)]


@pytest.mark.parametrize("topology", ["1x2x1", "2x1x1"], ids=["an island", "two islands"])
def test_the_processes_of_a_call_that_waits_for_a_failed_host_end_on_all_hosts(topology: str) -> None:
    calls = Calls(topology)
    calls.call()
    calls.send(m.Await(5, (11,)))
    calls.fail(calls.of_host[0])
    assert calls.stops(1, LATE) == []
    stops = calls.stops(LATE + 1, LATE + 5)
    assert [to for to, _ in stops] == [("host", 0), ("host", 1)], "once"
    for _, stop in stops:
        assert stop.function == calls.name
        assert stop.text == (
            f"was ended, because f had not returned on hosts [1] {LATE} s after it had failed on host 0: "
            f"{RAISED.message}"
        )
    assert [each.text for each in calls.controller.history.events() if each.kind == "hangs"] == [
        stops[0][1].text.removeprefix("was ended, because ")
    ]
    ended = failure(Code.ABORTED, stops[0][1].text, Details(Kind.PYTHON, retriable=True))
    sent = calls.report(1, m.Failed(calls.of_host[1], ended))
    assert [each.status for each in sent if isinstance(each, m.Awaited)] == [RAISED]
    assert not calls.controller.launches.in_flight
    assert calls.stops(LATE + 6, 4 * LATE) == []


def ended(messages: list[Any]) -> list[m.CollectiveEnded]:
    return [each for each in messages if isinstance(each, m.CollectiveEnded)]


@pytest.mark.parametrize("topology", ["1x2x1", "2x1x1"], ids=["an island", "two islands"])
def test_a_host_on_which_a_call_failed_starts_later_ones_when_it_has_ended_on_all_hosts(topology: str) -> None:
    """Before, a host that waits in the call would compute with a later call of the host that failed."""
    calls = Calls(topology)
    calls.call()
    assert ended(calls.report(0, m.Failed(calls.of_host[0], RAISED))) == []
    assert ended(calls.done(calls.of_host[1], host=1)) == [m.CollectiveEnded(calls.of_host[0])]


def busy_island(launches: int) -> tuple[Calls, list[int]]:
    """Launch a function on the second of two islands. Return the sequence numbers of the runs that it takes."""
    calls = Calls("2x1x1")
    calls.with_function(2, (1,))
    calls.send(m.RegisterProgram(5, single("busy", (), Call(2, (), (on(1),), (1,)))))
    sent = [each for handle in range(100, 100 + launches) for each in calls.send(m.Launch(5, (), (handle,), ()))]
    return calls, [run.sequence for run in runs(sent)]


def test_a_call_begins_on_all_of_its_islands_or_on_none() -> None:
    """Before, an island that never began a call which failed computed later ones with an island that waits in it."""
    _, taken = busy_island(20)
    assert len(taken) < 20
    calls, taken = busy_island(len(taken))
    calls.send(m.RegisterProgram(6, single("f", (), Call(1, (), (on(0, 1),), (0, 1), stream=0))))
    assert runs(calls.send(m.Launch(6, (), (11,), ()))) == [], "island 1 takes no more"
    assert len(runs(calls.done(*taken, host=1))) == 2


def test_a_persistence_request_that_fails_on_a_host_holds_back_no_other() -> None:
    calls = Calls()
    calls.call(STORAGE_STREAM)
    calls.fail(calls.of_host[0])
    assert ended(calls.done(calls.of_host[1], host=1)) == []


def test_a_call_may_return_a_while_after_it_has_failed_on_another_host() -> None:
    calls = Calls()
    sequence = calls.call()
    calls.fail(sequence)
    assert calls.stops(1, LATE) == []
    calls.done(sequence, host=1)
    assert calls.stops(LATE + 1, 3 * LATE) == []


def test_a_call_that_has_failed_on_no_host_may_take_any_time() -> None:
    calls = Calls()
    sequence = calls.call()
    calls.done(sequence, host=0)
    assert calls.stops(1, 10 * LATE) == []


def test_a_persistence_request_may_take_any_time() -> None:
    calls = Calls()
    calls.fail(calls.call(STORAGE_STREAM))
    assert calls.stops(1, 10 * LATE) == []


def test_the_time_counts_from_the_end_of_earlier_calls_of_the_same_stream() -> None:
    """Until then, the host has not begun the call that failed on another one."""
    calls = Calls()
    earlier, later = calls.call(), calls.call()
    calls.done(earlier, host=0)
    calls.fail(later)
    assert calls.stops(1, 3 * LATE) == []
    calls.done(earlier, host=1)
    assert calls.stops(3 * LATE + 1, 4 * LATE) == []
    assert [stop.sequence for _, stop in calls.stops(4 * LATE + 1, 4 * LATE + 2)] == [later, later]


def test_calls_of_other_streams_do_not_count() -> None:
    calls = Calls()
    calls.call(stream=1)
    sequence = calls.call(stream=2)
    calls.fail(sequence)
    assert [stop.sequence for _, stop in calls.stops(1, LATE + 2)] == [sequence, sequence]


def test_a_call_whose_process_has_ended_on_one_host_waits_for_the_others_only_for_a_while() -> None:
    """The processes end by themselves when they lose another one, except a process that is stuck."""
    calls = Calls()
    sequence = calls.call()
    calls.fail(sequence, 1, failure(Code.ABORTED, "the process exited with 3", Details(Kind.PYTHON, retriable=True)))
    stops = calls.stops(1, LATE + 2)
    assert [to for to, _ in stops] == [("host", 0), ("host", 1)]
    assert "on hosts [0] 30 s after it had failed on host 1: the process exited with 3" in stops[0][1].text
