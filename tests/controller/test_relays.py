"""Tests of groups of an island's hosts: which messages a relay forwards, and what is lost with a connection."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.controller.islands.relay_groups import relay_groups
from atoll.errors import OK, Code
from atoll.ir.program import Call, Program, single
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import BROKEN, Play, joining

ALL = ArraySpec("float32", (4,), Sharding((0, 1, 2, 3), Tiled((4,), (0, 1, 2, 3))))
_decode = msgspec.msgpack.Decoder(m.ToWorker).decode


def playing(topology: str = "1x4x1", group: int = 2, **settings: Any) -> Play:
    return Play(topology, relay_group=group, **settings)


def forwarded(messages: list[Any]) -> list[tuple[tuple[int, ...], Any]]:
    """Return the messages that relays forward, in order, with their hosts."""
    return [(each.hosts, _decode(each.content)) for each in messages if isinstance(each, m.Forward)]


def with_call(play: Play, nodes: int = 1) -> None:
    """Register program 1, which calls a function on all four devices, and make its argument, handle 10, using program
    2.
    """
    play.send(m.RegisterFunction(1, "content", 900, ((0, 1, 2, 3),)))
    for host in range(4):
        play.report(host, m.FeedsArrived(play.session, (900,)))
    name = play.controller.sessions[play.session].functions[1]
    for host in range(4):
        play.report(host, m.Compiled(name, OK, b"", 0.1, False))
    everywhere = (0, 1, 2, 3)
    play.send(m.RegisterProgram(2, single("make", (), Call(1, (), (ALL,), everywhere))))
    chain = tuple(Call(1, (i,), (ALL,), everywhere) for i in range(nodes))
    play.send(m.RegisterProgram(1, Program("steps", (ALL,), chain, (nodes,))))
    (run, *_) = [each for _, each in forwarded(play.send(m.Launch(2, (), (10,), ())))]
    for relay in (0, 2):
        gathered(play, relay, run.sequence, relay, relay + 1)


def gathered(play: Play, relay: int, sequence: int, *hosts: int) -> list[Any]:
    return play.report(relay, m.Gathered((m.GroupEnds(sequence, hosts, (0, 1) * len(hosts)),)))


@pytest.mark.parametrize(
    ("hosts", "size", "groups"),
    [
        (4, 16, []),
        (15, 16, []),
        (16, 16, [16]),
        (40, 16, [16, 16, 8]),
        (17, 16, [16]),
        (4, 2, [2, 2]),
        (512, 16, [16] * 32),
        (512, 0, []),
    ],
)
def test_an_island_has_groups_where_it_has_hosts_for_one(hosts: int, size: int, groups: list[int]):
    """A last host without a partner is in no group."""
    found = relay_groups(range(hosts), size)
    assert [len(group) for group in found] == groups
    assert [host for group in found for host in group] == list(range(sum(groups)))


def test_groups_are_made_once_all_hosts_know_of_each_other():
    play = Play("1x4x1", relay_group=2)
    assert [(host, message.relay, message.hosts) for _, host, message in joining(play)] == [
        (0, 0, (0, 1)),
        (1, 0, (0, 1)),
        (2, 2, (2, 3)),
        (3, 2, (2, 3)),
    ]
    sends = [action for action in play.actions if isinstance(action, a.Send)]
    for host in range(4):
        own = [type(each.message) for each in sends if play.name_of(each.connection) == ("host", host)]
        assert own.index(m.Peers) < own.index(m.JoinGroup)


def test_a_gang_of_a_whole_island_is_one_message_a_group_and_so_are_its_ends():
    play = playing()
    with_call(play)
    sent = play.send(m.Launch(1, (10,), (11,), ()))
    runs = forwarded(sent)
    assert [hosts for hosts, _ in runs] == [(0, 1), (2, 3)]
    assert len({message.sequence for _, message in runs}) == 1
    assert len(sent) == 2
    assert {each.units for each in sent} == {(runs[0][1].sequence,)}
    sequence = runs[0][1].sequence
    assert gathered(play, 0, sequence, 0, 1) == []
    assert play.controller.launches.in_flight.keys() == {sequence}
    assert gathered(play, 2, sequence, 2, 3) == [m.CreditReturned(1)]
    assert not play.controller.launches.in_flight


def test_what_is_for_one_host_of_a_group_comes_by_the_relay_too():
    """The message keeps its order relative to messages for the whole group."""
    play = playing()
    play.proxy(play.session, m.RegisterFunction(2, "one", 901, ((3,),)))
    assert [hosts for hosts, _ in forwarded(play.report(3, m.FeedsArrived(play.session, (901,))))] == [(3,)]


def pings(play: Play, now: float) -> list[tuple[tuple[str, int], tuple[int, ...], m.Ping]]:
    """Let a second pass. Return the receivers of pings, the hosts to which they forward the ping, and the pings."""
    play.event(e.Tick(now))
    found: list[tuple[tuple[str, int], tuple[int, ...], m.Ping]] = []
    for each in play.flush():
        message = each.message if isinstance(each, a.Send) else None
        if isinstance(message, m.Ping):
            found.append((play.name_of(each.connection), (), message))
        elif isinstance(message, m.Forward) and message.asks:
            found.append((play.name_of(each.connection), message.hosts, _decode(message.content)))
    return found


def to_hosts(play: Play, now: float) -> list[tuple[int, tuple[int, ...], float]]:
    """Return the pings to hosts, with their leases."""
    return [(name[1], hosts, ping.lease) for name, hosts, ping in pings(play, now) if name[0] == "host"]


def answer(play: Play, relay: int, *hosts: int, asked: float = 0.0, running: tuple[int, ...] = ()) -> None:
    """Report, as a relay, that these hosts have answered."""
    clock = int(1e9 * asked) + 5
    pongs = tuple(m.RelayedPong(host, asked, clock, running, 0) for host in hosts)
    play.worker(relay, m.Gathered((), pongs))


def test_a_ping_is_one_message_for_a_group():
    play = playing("1x4x1+1x1x1")
    assert to_hosts(play, 1.0) == [(0, (0, 1), 10.0), (2, (2, 3), 10.0), (4, (), 10.0)]


def test_answers_to_relayed_pings_renew_the_leases_of_their_hosts():
    play = playing(lease_seconds=3.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        assert to_hosts(play, now) == [(0, (0, 1), 3.0), (2, (2, 3), 3.0)]
        play.now = now
        answer(play, 0, 0, 1, asked=now)
        answer(play, 2, 2, 3, asked=now)
    assert play.controller.resources.islands[0].works
    assert play.controller.trace.clock(3).samples == 6


def test_a_host_that_its_relay_reports_nothing_of_is_pinged_directly_and_then_named():
    """The relay may be at fault. The lease of a forwarded ping is the shortest lease of its hosts."""
    play = playing(lease_seconds=4.0)
    found = {}
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        found[now] = to_hosts(play, now)
        play.now = now
        answer(play, 0, 0, 1, asked=now)
        answer(play, 2, 2, asked=now)
    assert found[2.0] == [(0, (0, 1), 4.0), (2, (2, 3), 3.0)]
    assert found[3.0] == [(0, (0, 1), 4.0), (2, (2,), 4.0), (3, (), 2.0)]
    assert found[4.0][-1] == (3, (), 1.0)
    failure = play.controller.resources.islands[0].last_failure
    assert failure is not None
    assert "host 3 of island 0 has not answered" in failure.message


def test_a_relay_that_answers_nothing_is_named_and_its_hosts_answer_directly():
    play = playing(lease_seconds=4.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        asked = to_hosts(play, now)
        play.now = now
        answer(play, 2, 2, 3, asked=now)
        if (1, (), 2.0) in asked:
            play.worker(1, m.Pong(now, 5))
    failure = play.controller.resources.islands[0].last_failure
    assert failure is not None
    assert "host 0 of island 0 has not answered" in failure.message


def test_a_relay_answers_only_for_its_own_hosts():
    play = playing(lease_seconds=3.0)
    play.now = 2.0
    answer(play, 0, 0, 2, asked=2.0)
    assert play.controller.leases.silence(0, 2.0) == 0.0
    assert play.controller.leases.silence(2, 2.0) == 2.0


@pytest.mark.parametrize(
    "pong",
    [
        (4, 0.0, 5, (), 0),
        (0, float("nan"), 5, (), 0),
        (0, 0.0, -2, (), 0),
        (0, 0.0, 1 << 62, (), 0),
        (0, 0.0, 5, (-1,), 0),
        (0, 0.0, 5, (), 1 << 62),
    ],
)
def test_an_impossible_answer_ends_the_island_of_its_relay(pong):
    play = playing()
    play.report(0, m.Gathered((), (m.RelayedPong(*pong),)))
    assert not play.controller.resources.islands[0].works


def test_freed_memory_is_named_once_a_group():
    play = playing()
    with_call(play)
    assert forwarded(play.send(m.Release((10,)))) == [
        ((0, 1), m.Free(play.session, (10,))),
        ((2, 3), m.Free(play.session, (10,))),
    ]


def test_a_failure_that_a_relay_passes_on_is_that_hosts():
    play = playing()
    with_call(play)
    ((_, run), _) = forwarded(play.send(m.Launch(1, (10,), (11,), ())))
    play.report(2, m.MemberFailed(3, run.sequence, BROKEN))
    (gang,) = play.controller.launches.in_flight.values()
    assert gang.run.hosts_left == {0, 1, 2}
    assert gang.run.failure == BROKEN


def test_hosts_that_cannot_reach_each_other_have_their_island_restarted_with_the_reason():
    play = playing("2x4x1")
    play.report(4, m.LinkLost(6, "host 6 cannot be reached: no route to host"))
    play.tick(1.0)
    assert not [each for each in play.outbox() if isinstance(each, m.RestartIsland)], "the engine may know the cause"
    play.tick(2.5)
    play.tick(3.5)
    (restart,) = [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    assert restart.island == 1
    assert "host 6 cannot be reached: no route to host" in restart.reason
    play.tick(9.0)
    assert not [each for each in play.outbox() if isinstance(each, m.RestartIsland)]


def test_a_drained_island_has_groups_again_when_it_is_back():
    play = playing("2x4x1")
    play.drain_and_return(1)
    assert [each.relay for each in play.outbox() if isinstance(each, m.JoinGroup)] == [4, 4, 6, 6]


def test_a_lost_island_has_groups_again_when_it_is_back():
    play = playing()
    with_call(play)
    ((_, run), _) = forwarded(play.send(m.Launch(1, (10,), (11,), ())))
    play.lose(1, "killed")
    play.outbox()
    assert gathered(play, 0, run.sequence, 0, 1) == [], "messages in transit do not count"
    entry = play.controller.sessions[play.session].directory.entries[11]
    assert entry.error is not None
    assert entry.error.code == Code.DATA_LOSS
    before = len(joining(play))
    play.send(m.FailureAcknowledged((0, 1, 2, 3)))
    sent = play.join_again(0, 1, 2, 3)
    groups = [message for message in sent if isinstance(message, m.JoinGroup)]
    assert [message.relay for message in groups] == [0, 0, 2, 2]
    assert len(joining(play)) == before + 4
