"""Tests of processes that serve several islands through a relay: which messages it forwards, and in which order."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any, cast

import msgspec
import pytest

from atoll.controller.admission import ENGINE_SAYS_SECONDS
from atoll.errors import OK, Code
from atoll.ir.program import Call, Program, single
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.launch.connections import Connections
from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.protocol.actions import Send
from atoll.protocol.events import ConnectionLost
from atoll.worker.host_group import HostGroup
from atoll.worker.process_relay import ProcessRelay
from tests.controller.play import BROKEN, Play

HOSTS = (0, 1, 2, 3)
ALL = ArraySpec("float32", (4,), Sharding(HOSTS, Tiled((4,), HOSTS)))
_decode = msgspec.msgpack.Decoder(m.ToWorker).decode


class Processes(Play):
    """Cluster of four islands with one host each. Even islands are in one process, and odd islands in another one."""

    def __init__(self, relays_first: bool = True) -> None:
        self.relays: list[int] = []
        self._relays_first = relays_first
        super().__init__("4x1x1", joint_islands=0)
        if not relays_first:
            self._connect_relays()
        self.joined = self.flush()

    def join(self, host: int, *arguments: Any, **options: Any) -> None:
        if self._relays_first and not self.relays:
            self._connect_relays()
        super().join(host, *arguments, **options, process=f"process {host % 2}")

    def _connect_relays(self) -> None:
        self.relays = [self.connect("relay", process=f"process {number}") for number in range(2)]
        for number, connection in enumerate(self.relays):
            self._names[connection] = ("relay", number)

    def with_calls(self, nodes: int = 1) -> None:
        """Register program 1, which calls a function on all islands, and make its argument, handle 10, using
        program 2.
        """
        self.send(m.RegisterFunction(1, "content", 900, (HOSTS,)))
        for host in HOSTS:
            self.report(host, m.FeedsArrived(self.session, (900,)))
        name = self.controller.sessions[self.session].functions[1]
        for host in HOSTS:
            self.report(host, m.Compiled(name, OK, b"", 0.1, False))
        self.send(m.RegisterProgram(2, single("make", (), Call(1, (), (ALL,), HOSTS))))
        calls = tuple(Call(1, (i,), (ALL,), HOSTS) for i in range(nodes))
        self.send(m.RegisterProgram(1, Program("steps", (ALL,), calls, (nodes,))))
        self.end_all(self.send(m.Launch(2, (), (10,), ())))

    def end_all(self, messages: list[Any]) -> list[Any]:
        """Report the ends of all units that these messages start. Return what the controller sends."""
        sent = []
        for each in [each for each in messages if isinstance(each, m.Forward)]:
            for unit in each.units:
                sequences = tuple(unit + run for run in each.runs)
                ends = m.MembersDone(each.hosts, sequences, (0, 1) * len(each.hosts))
                sent += self.relay_says(each.hosts[0] % 2, ends)
        return sent

    def lose_relay(self, number: int, reason: str) -> None:
        """Lose the connection to a relay, without a report of the engine."""
        self.event(ConnectionLost(self.now, self.relays[number], reason))
        self.flush()
        self.end_timers(ENGINE_SAYS_SECONDS)
        self.flush()

    def relay_says(self, number: int, message: Any) -> list[Any]:
        self.receive(self.relays[number], message)
        return self.outbox()


def forwards(messages: list[Any]) -> list[m.Forward]:
    return [each for each in messages if isinstance(each, m.Forward)]


def restarts(play: Processes) -> list[m.RestartIsland]:
    """Return the requests to restart islands that the engine has received."""
    sends = [each for each in play.actions if isinstance(each, Send)]
    return [each.message for each in sends if isinstance(each.message, m.RestartIsland)]


def added(play: Processes) -> list[tuple[int, m.AddMember]]:
    """Return the hosts that were added to relays, with the relays."""
    sends = [each for each in play.actions if isinstance(each, Send) and isinstance(each.message, m.AddMember)]
    return [(play.relays.index(each.connection), each.message) for each in sends]


@pytest.mark.parametrize("relays_first", [True, False])
def test_a_host_joins_the_relay_of_its_process_whichever_connects_first(relays_first):
    play = Processes(relays_first)
    assert sorted((relay, message.host) for relay, message in added(play)) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    joins = [each for each in play.actions if isinstance(each, Send) and isinstance(each.message, m.JoinGroup)]
    assert sorted(play.name_of(each.connection) for each in joins) == [("host", host) for host in HOSTS]
    assert {each.message for each in joins} == {m.JoinGroup(m.PROCESS_RELAY, ())}


def test_a_call_over_all_islands_is_one_message_per_process_and_so_are_its_ends():
    play = Processes()
    play.with_calls()
    sent = play.send(m.Launch(1, (10,), (11,), ()))
    assert [each.hosts for each in sent] == [(0, 2), (1, 3)]
    assert len({run for each in forwards(sent) for run in each.runs}) == 4, "each island has a gang"
    assert len(play.controller.launches.in_flight) == 4
    assert play.end_all(sent) == [m.CreditReturned(1)]
    assert not play.controller.launches.in_flight


def test_later_segments_of_a_run_are_one_message_per_process():
    play = Processes()
    play.with_calls(nodes=3)
    sent = forwards(play.send(m.Launch(1, (10,), (11,), ())))
    run, *_ = sent = sorted(sent, key=lambda each: each.hosts)  # the order between processes does not matter
    assert [(each.hosts, type(_decode(each.content))) for each in sent] == [
        ((0, 2), m.Run),
        ((0, 2), m.Dispatch),
        ((1, 3), m.Run),
        ((1, 3), m.Dispatch),
    ]
    assert sent[1].runs == run.runs
    assert _decode(sent[1].content).units == ((4, 1), (8, 1)), "relative to the run of each host"
    assert play.end_all(sent) == [m.CreditReturned(1)]


def test_freed_memory_is_named_once_per_process():
    play = Processes()
    play.with_calls()
    found = [(each.hosts, _decode(each.content)) for each in forwards(play.send(m.Release((10,))))]
    assert found == [((0, 2), m.Free(play.session, (10,))), ((1, 3), m.Free(play.session, (10,)))]


def test_a_failure_that_a_relay_passes_on_is_that_hosts():
    play = Processes()
    play.with_calls()
    sent = play.send(m.Launch(1, (10,), (11,), ()))
    play.relay_says(0, m.MemberFailed(2, forwards(sent)[0].runs[1], BROKEN))
    failures = {gang.island: gang.run.failure for gang in play.controller.launches.in_flight.values()}
    assert failures == {0: None, 1: None, 2: BROKEN, 3: None}


def test_a_relay_reports_nothing_about_hosts_of_another_process():
    play = Processes()
    play.with_calls()
    sent = forwards(play.send(m.Launch(1, (10,), (11,), ())))
    play.relay_says(1, m.MembersDone(sent[0].hosts, sent[0].runs, (0, 1, 0, 1)))
    play.relay_says(1, m.MemberFailed(0, sent[0].runs[0], BROKEN))
    assert len(play.controller.launches.in_flight) == 4


def test_an_island_that_restarts_leaves_the_relay_and_joins_it_again():
    play = Processes()
    play.with_calls()
    play.lose(2, "closed")
    assert not [each for each in forwards(play.outbox()) if 2 in each.hosts]
    error = play.controller.sessions[play.session].directory.entries[10].error
    assert error is not None
    assert Code(error.code) is Code.DATA_LOSS
    play.actions.clear()
    play.join_again(2)
    assert added(play) == [(0, m.AddMember(2, 2002))]


def test_the_islands_of_a_process_whose_relay_is_lost_are_restarted():
    play = Processes()
    play.with_calls()
    play.send(m.Launch(1, (10,), (11,), ()))
    play.actions.clear()
    play.lose_relay(0, "it closed the connection")
    assert sorted(each.island for each in restarts(play)) == [0, 2]
    states = play.controller.resources.islands
    assert [states[host].works for host in HOSTS] == [False, True, False, True]
    assert {gang.island for gang in play.controller.launches.in_flight.values()} == {1, 3}
    error = play.controller.sessions[play.session].directory.entries[11].error
    assert error is not None
    assert "the relay of the process of island 0 was lost: it closed the connection" in error.message


def test_a_relay_that_sends_an_invalid_message_is_lost():
    play = Processes()
    play.actions.clear()
    play.receive(play.relays[1], m.MembersDone((0, 1), (5,), (0, 1)))
    play.flush()
    play.end_timers(ENGINE_SAYS_SECONDS)
    play.flush()
    assert sorted(each.island for each in restarts(play)) == [1, 3]


def test_hosts_that_are_lost_with_their_relay_are_lost_for_their_own_reason():
    play = Processes()
    play.actions.clear()
    play.event(ConnectionLost(play.now, play.relays[0], "closed"))
    play.event(ConnectionLost(play.now, play._hosts[2], "killed"))
    play.lose(0, "killed")
    play.flush()
    assert restarts(play) == []
    failures = [play.controller.resources.islands[island].last_failure for island in (0, 2)]
    assert all(each is not None and "killed" in each.message for each in failures)


def test_islands_that_restart_without_their_relay_receive_messages_directly():
    play = Processes()
    play.lose_relay(0, "it closed the connection")
    for host in (0, 2):
        play.send(m.FailureAcknowledged((host,), (), ()))
    play.actions.clear()
    play.join_again(0, 2)
    assert added(play) == []
    play.with_put(3, 2)
    play.report(2, m.FeedsArrived(play.session, (20,)))
    (run,) = play.send(m.Launch(3, (), (12,), (20,)))
    assert type(run) is m.Run


def test_a_process_has_one_relay():
    play = Processes()
    second = play.connect("relay", process="process 0")
    assert [type(each.message) for each in play.flush() if isinstance(each, Send) and each.connection == second] == [
        m.Refused
    ]
    assert play.controller.connections.relays == {"process 0": play.relays[0], "process 1": play.relays[1]}


# ---- order


COUNT = 24  # hosts; up to six of them share a process


class Received:
    """The messages that each host receives, directly or through the relay of its process."""

    def __init__(self, processes: int) -> None:
        self.connections = Connections()
        self.connections.hosts.update((host, 100 + host) for host in range(COUNT))
        self.outbox = Outbox(self.connections)
        self.by_host: dict[int, list[Any]] = {host: [] for host in range(COUNT)}
        self._relays = {
            200 + number: ProcessRelay(lambda *messages: None, lambda seconds, call: None)
            for number in range(processes)
        }
        for host in range(COUNT):
            if processes and host % 4 < processes:  # each other host has its own process
                connection = 200 + host % 4
                self.start(host, connection, 0)
                self.outbox.join_process(host, 0, connection)
        self.deliver()
        for messages in self.by_host.values():
            messages.clear()

    def start(self, host: int, relay: int, incarnation: int) -> None:
        self._relays[relay].host_started(host, incarnation, cast(HostGroup, _Member(self.by_host[host])))

    def deliver(self) -> None:
        self.outbox.flush_frees()
        for action in self.outbox.take():
            if not isinstance(action, Send):
                continue
            relay = self._relays.get(action.connection)
            if relay is None:
                self.by_host[action.connection - 100].append(action.message)
            else:
                relay.handle(action.message)


class _Member:
    def __init__(self, received: list[Any]) -> None:
        self._received = received

    def receive_message(self, message: Any) -> None:
        self._received.append(message)


def act(outbox: Outbox, choices: random.Random) -> None:
    """Queue random messages, as a launcher does: starts and segments of runs, frees, others.

    A run has one gang per host, or a joint one.
    """
    begun: dict[tuple[int, int], int] = {}
    number = 1
    for launch in range(choices.randrange(1, 4)):
        hosts = sorted(choices.sample(range(COUNT), choices.randrange(1, COUNT + 1)))
        run = m.Run(number, 1, launch, (launch,), (), ())
        is_joint = choices.random() < 0.4
        for node in range(choices.randrange(1, 4)):
            if is_joint and node:
                outbox.dispatch(tuple(hosts), 1, run.sequence, number, 1 + node)
            elif is_joint:
                outbox.to_hosts(tuple(hosts), run)
            number += is_joint
            for host in () if is_joint else hosts:
                if choices.random() < 0.9:
                    first = begun.get((launch, host))
                    if first is None:
                        begun[launch, host] = number
                        outbox.start((host,), run, number)
                    else:
                        outbox.dispatch((host,), 1, first, number, 1 + node)
                number += 1
            if choices.random() < 0.5:
                outbox.to_hosts(tuple(choices.sample(hosts, choices.randrange(1, len(hosts) + 1))), m.DropPlan(number))
            if choices.random() < 0.3:
                outbox.to_host(choices.choice(hosts), m.CollectiveEnded(number))
            if choices.random() < 0.3:
                outbox.free(tuple(hosts), 1, [number])
                outbox.flush_frees()


@pytest.mark.parametrize("seed", range(60))
def test_every_host_receives_the_same_messages_in_the_same_order_with_and_without_relays(seed):
    """Only the points at which consecutive dispatches are joined may differ."""
    found = []
    for processes in (0, 1, 3):
        received = Received(processes)
        choices = random.Random(seed)
        for _ in range(3):
            act(received.outbox, choices)
            received.deliver()
        found.append({host: [*chain(*map(_parts, messages))] for host, messages in received.by_host.items()})
    assert any(found[0].values())
    assert found[0] == found[1] == found[2]


def test_a_host_that_has_just_joined_shares_no_message_that_precedes_its_joining():
    received = Received(1)
    outbox, message = received.outbox, m.DropPlan(7)
    outbox.forget_host(4)
    received.deliver()
    received.connections.hosts[4] = 104
    received.start(4, 200, 1)
    outbox.to_host(0, message)
    outbox.join_process(4, 1, 200)
    outbox.to_host(4, message)
    received.deliver()
    assert received.by_host[0] == [message]
    assert received.by_host[4] == [m.JoinGroup(m.PROCESS_RELAY, ()), message]


def _parts(message: Any) -> list[Any]:
    """Return the units of a dispatch, or the message itself."""
    return [(message.run, unit) for unit in message.units] if isinstance(message, m.Dispatch) else [message]
