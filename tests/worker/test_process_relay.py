"""The relay of a process: what it forwards to which hosts, and the ends that it reports together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.worker.host_group import HostGroup
from atoll.worker.process_relay import ProcessRelay

BROKEN = Status(Code.INTERNAL, "division by zero")
RUN = m.Run(0, 1, 7, (), (), ())


class Host:
    """Takes the messages for one incarnation of a host."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive_message(self, message: Any) -> None:
        self.received.append(message)


class Process:
    """A process with hosts 0 to 2, which the controller has added. Timers end when `ring` is called."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.timers: list[Callable[[], None]] = []
        self.relay = ProcessRelay(self.reports.append, lambda seconds, call: self.timers.append(call))
        self.hosts: dict[int, Host] = {}
        for host in range(3):
            self.start(host, 0)
            self.relay.handle(m.AddMember(host, 0))

    def start(self, host: int, incarnation: int) -> Host:
        started = self.hosts[host] = Host()
        self.relay.host_started(host, incarnation, cast(HostGroup, started))
        return started

    def end(self, host: int) -> None:
        self.relay.host_ended(host, cast(HostGroup, self.hosts[host]))

    def forward(self, message: Any, units: tuple[int, ...], **runs: int) -> None:
        """Forward a message to the hosts `h0` to `h2` in `runs`, with the numbers of their runs."""
        hosts = tuple(int(name[1:]) for name in runs)
        content = msgspec.msgpack.encode(message)
        self.relay.handle(m.Forward(hosts, content, units, runs=tuple(runs.values())))

    def ring(self) -> None:
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    def done(self, host: int, *sequences: int) -> list[Any]:
        """Return the reports that follow from the ends of these units."""
        self.relay.ended(host, tuple((sequence, 10 * host, 10 * host + 1) for sequence in sequences))
        return self.reported()

    def reported(self) -> list[Any]:
        reports, self.reports[:] = list(self.reports), []
        return reports


@pytest.fixture
def process() -> Process:
    return Process()


def test_each_host_starts_its_run_under_its_number(process):
    process.forward(RUN, (0,), h0=40, h2=42)
    process.forward(m.Dispatch(1, 0, ((5, 2), (9, 1))), (5, 9), h2=42)
    assert process.hosts[0].received == [msgspec.structs.replace(RUN, sequence=40)]
    assert process.hosts[1].received == []
    assert process.hosts[2].received == [
        msgspec.structs.replace(RUN, sequence=42),
        m.Dispatch(1, 42, ((47, 2), (51, 1))),
    ]


def test_a_message_without_runs_is_the_same_for_all_hosts(process):
    process.relay.handle(m.Forward((0, 1), msgspec.msgpack.encode(m.Free(1, (3,)))))
    assert [process.hosts[host].received for host in range(3)] == [[m.Free(1, (3,))], [m.Free(1, (3,))], []]


def test_ends_of_units_that_started_together_are_reported_together(process):
    process.forward(RUN, (0,), h0=40, h1=41, h2=42)
    assert process.done(1, 41) == []
    assert process.done(0, 40) == []
    assert process.done(2, 42) == [m.MembersDone((1, 0, 2), (41, 40, 42), (10, 11, 0, 1, 20, 21))]
    process.ring()
    assert process.reported() == []
    assert process.relay.statistics() == {"hosts": 3, "units": 0}


def test_the_units_of_a_dispatch_are_reported_one_by_one(process):
    process.forward(m.Dispatch(1, 0, ((5, 1), (9, 1))), (5, 9), h0=40, h1=41)
    process.done(0, 45, 49)
    assert process.done(1, 46) == [m.MembersDone((0, 1), (45, 46), (0, 1, 10, 11))]
    assert process.done(1, 50) == [m.MembersDone((0, 1), (49, 50), (0, 1, 10, 11))]


def test_an_end_does_not_wait_for_others_for_long(process):
    process.forward(RUN, (0,), h0=40, h1=41, h2=42)
    assert process.done(0, 40) == []
    process.ring()
    assert process.reported() == [m.MembersDone((0,), (40,), (0, 1))]
    assert process.done(1, 41) == []
    assert process.done(2, 42) == [m.MembersDone((1, 2), (41, 42), (10, 11, 20, 21))]


def test_a_failure_is_reported_at_once_and_not_awaited(process):
    process.forward(RUN, (0,), h0=40, h1=41)
    failure = m.MemberFailed(0, 40, BROKEN)
    process.relay.failed(failure)
    assert process.reported() == [failure]
    assert process.done(1, 41) == [m.MembersDone((1,), (41,), (10, 11))]


def test_a_unit_that_came_without_the_relay_is_reported_at_once(process):
    assert process.done(0, 7) == [m.MembersDone((0,), (7,), (0, 1))]


def test_a_host_that_has_ended_is_not_awaited_and_receives_nothing(process):
    process.forward(RUN, (0,), h0=40, h1=41)
    process.done(1, 41)
    process.end(0)
    assert process.reported() == [m.MembersDone((1,), (41,), (10, 11))]
    process.forward(RUN, (0,), h0=50, h1=51)
    assert len(process.hosts[0].received) == 1
    assert process.done(1, 51) == [m.MembersDone((1,), (51,), (10, 11))]


def test_a_new_incarnation_receives_nothing_that_was_sent_to_the_former_one(process):
    process.end(0)
    new = process.start(0, 1)
    process.forward(RUN, (0,), h0=40)
    process.relay.handle(m.AddMember(0, 0))
    process.forward(RUN, (0,), h0=41)
    assert new.received == []
    process.relay.handle(m.AddMember(0, 1))
    process.forward(RUN, (0,), h0=42)
    assert [each.sequence for each in new.received] == [42]


def test_a_late_end_of_a_former_incarnation_does_not_end_the_new_one(process):
    former = process.hosts[0]
    process.start(0, 1)
    process.relay.handle(m.AddMember(0, 1))
    process.relay.host_ended(0, cast(HostGroup, former))
    process.forward(RUN, (0,), h0=42)
    assert len(process.hosts[0].received) == 1


def test_the_answers_to_a_ping_are_one_message_of_the_process(process):
    process.relay.handle(m.Forward((0, 1, 7), msgspec.msgpack.encode(m.Ping(10.0, 1.0)), asks=True))
    assert process.hosts[1].received == [m.Ping(10.0, 1.0)]
    process.relay.answered(1, m.Pong(1.0, 5))
    assert process.reported() == []
    process.relay.answered(0, m.Pong(1.0, 6, (3,)))
    (report,) = process.reported()
    assert [(each.host, each.clock, each.running) for each in report.pongs] == [(1, 5, ()), (0, 6, (3,))]
    assert (report.hosts, report.sequences, report.times) == ((), (), ())
