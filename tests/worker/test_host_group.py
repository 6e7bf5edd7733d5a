"""Tests of a group of hosts: the controller's messages stay in order on all ways, and ends are gathered."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from atoll.errors import Code, FrameError, Status
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.wire.framing import PIECE_BYTES
from atoll.worker import host_group
from atoll.worker.host_group import TRANSITIONS, HostGroup, Membership
from tests.state_tables import check_table

BROKEN = Status(Code.INTERNAL, "division by zero")


def run(sequence: int) -> m.Run:
    return m.Run(sequence, 1, 7, (), (), ())


class Group:
    """Three hosts, the first of which is the relay. Messages between them arrive when `settle` delivers them."""

    def __init__(self) -> None:
        self.handled: dict[int, list[Any]] = {host: [] for host in range(3)}
        self.reports: list[tuple[int, Any]] = []
        self.links: deque[tuple[int, bytes]] = deque()
        self.in_pieces: list[bytes] = []  # of these
        self.hosts = {host: self._host(host) for host in range(3)}

    def _host(self, host: int) -> HostGroup:
        def handle(message: Any) -> bool:
            self.handled[host].append(message)
            return True

        def report(*messages: Any) -> None:
            self.reports.extend((host, message) for message in messages)

        def send(to: int, content: bytes, in_pieces: bool = False) -> None:
            self.links.append((to, content))
            if in_pieces:
                self.in_pieces.append(content)

        return HostGroup(host, handle, send, report)

    def join(self, *hosts: int) -> None:
        for host in hosts:
            assert self.hosts[host].take(m.JoinGroup(0, (0, 1, 2)))

    def forward(self, message: m.Run, *hosts: int) -> None:
        self.hosts[0].take(m.Forward(hosts, msgspec.msgpack.encode(message), (message.sequence,)))

    def done(self, host: int, *sequences: int) -> None:
        self.hosts[host].report(m.Done(tuple((sequence, 10 * host, 10 * host + 1) for sequence in sequences)))

    def settle(self) -> None:
        while self.links:
            to, content = self.links.popleft()
            self.hosts[to].receive(content)

    def reported(self) -> list[tuple[int, Any]]:
        self.settle()
        reports, self.reports = self.reports, []
        return reports


@pytest.fixture
def group() -> Group:
    group = Group()
    group.join(0, 1, 2)
    return group


def test_a_host_handles_the_messages_that_have_waited_before_it_has_joined():
    states: list[Membership] = []

    def handle(message: Any) -> bool:
        states.append(host.state)
        return True

    host = HostGroup(1, handle, lambda *_: None, lambda *_: None)
    for number in (1, 2):
        host.receive(msgspec.msgpack.encode(run(number)))
    assert states == []
    host.take(m.JoinGroup(0, (0, 1)))
    host.receive(msgspec.msgpack.encode(run(3)))
    assert states == [Membership.JOINING, Membership.JOINING, Membership.JOINED]


def test_the_membership_changes_only_by_the_transitions_of_the_table():
    def make(state: Membership) -> HostGroup:
        host = HostGroup(1, lambda message: True, lambda *_: None, lambda *_: None)
        host.state = state
        return host

    check_table(make, Membership, TRANSITIONS)


def test_a_host_without_a_group_reports_to_the_controller():
    group = Group()
    group.done(2, 1)
    assert group.reported() == [(2, m.Done(((1, 20, 21),)))]


def test_a_message_reaches_the_hosts_that_it_is_for(group: Group):
    group.forward(run(1), 0, 2)
    group.settle()
    assert group.handled == {0: [run(1)], 1: [], 2: [run(1)]}


def test_what_the_relay_sends_waits_for_what_the_controller_has_sent_before():
    group = Group()
    group.join(0)
    group.forward(run(2), 0, 1)
    group.settle()
    assert group.handled[1] == [], "the connection to the controller is slower"
    group.hosts[1].take(run(1))
    group.join(1)
    group.forward(run(3), 0, 1)
    group.settle()
    assert [message.sequence for message in group.handled[1]] == [1, 2, 3]


def test_the_ends_of_a_unit_are_one_message_of_the_group(group: Group):
    group.forward(run(1), 0, 1, 2)
    group.settle()
    group.done(2, 1)
    group.done(0, 1)
    assert group.reported() == []
    group.done(1, 1)
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (0, 2, 1), (0, 1, 20, 21, 10, 11)),)))]


def test_a_failure_is_reported_at_once_and_the_other_ends_when_all_are_there(group: Group):
    group.forward(run(1), 0, 1, 2)
    group.settle()
    group.done(2, 1)
    group.hosts[1].report(m.Failed(1, BROKEN))
    assert group.reported() == [(0, m.MemberFailed(1, 1, BROKEN))]
    group.done(0, 1)
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (2, 0), (20, 21, 0, 1)),)))]


def test_ends_that_wait_for_a_host_are_reported_after_a_while(group: Group):
    """So that the controller can say which host is missing."""
    group.forward(run(1), 0, 1, 2)
    group.settle()
    group.done(2, 1)
    group.settle()
    group.hosts[0].take(m.Ping(10.0))
    assert group.reported() == []
    group.hosts[0].take(m.Ping(10.0))
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (2,), (20, 21)),)))]
    group.done(1, 1)
    group.done(0, 1)
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (0, 1), (0, 1, 10, 11)),)))]


def test_what_the_controller_started_before_there_was_a_group_is_not_gathered(group: Group):
    group.done(2, 1)
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (2,), (20, 21)),)))]


def test_all_else_is_said_to_the_controller_directly(group: Group):
    group.hosts[2].report(m.Pong())
    assert group.reported() == [(2, m.Pong())]


def test_a_large_message_reaches_the_hosts_in_pieces_and_the_relay_whole(group: Group):
    plan = m.RegisterPlan(7, p.Plan("x" * 3 * PIECE_BYTES, (), (), ()), True)
    group.hosts[0].take(m.Forward((0, 1), msgspec.msgpack.encode(plan), (), True))
    assert group.handled[0] == [plan]
    ((to, content),) = group.links
    assert (to, group.in_pieces) == (1, [content])
    group.links.clear()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    group.hosts[1].receive(msgspec.msgpack.encode(m.RelayedPiece(halves[0], False)))
    group.forward(run(1), 1)
    group.settle()
    assert group.handled[1] == [run(1)], "it overtakes"
    group.hosts[1].receive(msgspec.msgpack.encode(m.RelayedPiece(halves[1], True)))
    assert group.handled[1] == [run(1), plan]


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([m.RelayedPiece(b"", False)], "no bytes"),
        ([m.RelayedPiece(b"\x93nonsense", True)], "invalid message"),
        ([m.RelayedPiece(bytes(600), False)] * 2, "over the limit of 1000 bytes"),
    ],
)
def test_pieces_of_no_message_are_refused(
    group: Group, pieces: list[m.RelayedPiece], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_group, "MAX_FRAME", 1000)
    *before, last = pieces
    for piece in before:
        group.hosts[1].receive(msgspec.msgpack.encode(piece))
    with pytest.raises(FrameError, match=reason):
        group.hosts[1].receive(msgspec.msgpack.encode(last))


def test_what_is_no_message_is_refused(group: Group):
    with pytest.raises(FrameError, match="invalid message"):
        group.hosts[1].receive(b"\x93nonsense")


def ping(group: Group, *hosts: int, seconds: float = 1.0) -> None:
    """The controller pings hosts through the relay, and their handlers get it."""
    group.hosts[0].take(m.Forward(hosts, msgspec.msgpack.encode(m.Ping(10.0, seconds)), asks=True))
    group.settle()


def answers(group: Group) -> list[tuple[int, list[int]]]:
    """Return which hosts have answered, by report."""
    return [(host, [each.host for each in message.pongs]) for host, message in group.reported()]


def test_the_answers_to_a_relayed_ping_are_one_message_of_the_group(group: Group):
    ping(group, 0, 1, 2)
    assert [type(group.handled[host][-1]) for host in range(3)] == [m.Ping] * 3
    group.hosts[2].report(m.Pong(1.0, 7))
    group.hosts[0].report(m.Pong(1.0, 8, (4,)))
    assert answers(group) == []
    group.hosts[1].report(m.Pong(1.0, 9))
    ((host, report),) = group.reported()
    assert host == 0
    found = [(each.host, each.seconds, each.clock, each.running) for each in report.pongs]
    assert sorted(found) == [(0, 1.0, 8, (4,)), (1, 1.0, 9, ()), (2, 1.0, 7, ())]
    assert min(each.held for each in report.pongs) >= 0


def test_with_the_next_ping_the_relay_reports_the_answers_that_it_has(group: Group):
    """So the controller knows which hosts are missing."""
    ping(group, 0, 1, 2)
    group.hosts[1].report(m.Pong(1.0))
    assert answers(group) == []
    ping(group, 0, 1, 2, seconds=2.0)
    assert answers(group) == [(0, [1])]


def test_a_direct_ping_is_answered_directly(group: Group):
    group.hosts[1].take(m.Ping(10.0, 3.0))
    group.hosts[1].report(m.Pong(3.0))
    assert group.reported() == [(1, m.Pong(3.0))]


def test_a_relayed_ping_reports_the_ends_of_units_that_some_hosts_have_yet_to_end(group: Group):
    group.forward(run(1), 0, 1)
    group.settle()
    group.done(1, 1)
    group.settle()
    ping(group, 0, 1, 2)
    assert group.reported() == []
    ping(group, 0, 1, 2, seconds=2.0)
    assert group.reported() == [(0, m.Gathered((m.GroupEnds(1, (1,), (10, 11)),)))]


def test_an_answer_is_held_for_as_long_as_the_relay_waits_for_others():
    now = 0
    pongs = host_group.PongRound(lambda: now)
    pongs.begin(2)
    assert pongs.answered(1, m.Pong(1.0, 5)) == ()
    now = 3000
    assert pongs.answered(2, m.Pong(1.0, 6)) == (m.RelayedPong(1, 1.0, 5, (), 3000), m.RelayedPong(2, 1.0, 6, (), 0))
