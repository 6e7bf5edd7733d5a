"""Tests of the engine `hosts`: the messages to its agents, in order, and the reports about their workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from atoll._version import __version__
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import RankSlot
from atoll.engines.engine_interface import HostEnd, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts import hosts_engine as module
from atoll.engines.hosts.hosts_engine import DRAIN_RETRY_SECONDS, HostsEngine, MachineDrains
from atoll.errors import OK, AddressError, Code, Status
from atoll.protocol import messages as m
from tests.waiting import until_async


class Scene:
    """An engine with its agents, which records all messages and reports.

    Each agent's connection has the agent's number.
    """

    def __init__(self, islands: str = "1x2x4", **settings: Any) -> None:
        options = EngineOptions(ClusterSettings(islands, engine="hosts", **settings), "/nowhere", "10.0.0.1:7000")
        self.engine = HostsEngine(options)
        self.sent: list[tuple[int, Any]] = []
        self.to_controller: list[Any] = []
        self.ends: list[tuple[int, HostEnd]] = []
        self.placed: list[tuple[str, ...]] = []
        self.processes: dict[int, Any] = {}
        self.engine.begin(self._send)

    def _send(self, message: Any) -> None:
        if isinstance(message, m.TellAgent):
            self.sent.append((message.agent, m.read_to_agent(message.content)))
        else:
            self.to_controller.append(message)

    def send(self, agent: int, message: Any) -> None:
        self.engine.agent_said(agent, m.agent_content(message))

    def come(self, agent: int, rank_slot: RankSlot | None = None, connection: int = 0, **more: Any) -> None:
        hello = m.AgentHello(
            f"agent {agent}",
            f"m{agent}",
            f"10.0.0.{agent}",
            __version__,
            rank_slot or RankSlot(),
            coordinator_address=f"m{agent}:9000",
            **more,
        )
        self.send(connection or agent, hello)

    def place(self, island: int = 0, hosts: int = 2, incarnation: int = 7, first: int = -1, **more: Any) -> None:
        """Start the workers of an island as soon as it has machines."""
        first = first if first >= 0 else island * hosts
        devices, platform = more.get("devices", 4), more.get("platform", "cpu")

        starts = [HostStart(island, first + rank, rank, hosts, devices, incarnation, platform) for rank in range(hosts)]

        def then(machines: Sequence[str]) -> None:
            self.placed.append(tuple(machines))
            for start in starts:
                number = start.host
                self.processes[number] = self.engine.start_host(start, lambda end, n=number: self.ends.append((n, end)))  # type: ignore[misc]

        self.engine.place(island, starts, then)

    def start(self) -> None:
        """Start island 0 on agents 1 and 2."""
        self.place()
        self.come(1)
        self.come(2)
        self.take_sent()

    def take_sent(self) -> list[tuple[int, Any]]:
        """Return the messages to agents since the last call."""
        received, self.sent = self.sent, []
        return [each for each in received if not isinstance(each[1], m.Renew)]

    @property
    def report(self) -> m.EngineReport:
        return next(each for each in reversed(self.to_controller) if isinstance(each, m.EngineReport))


def played(scene: Callable[[], Any]) -> None:
    async def play() -> None:
        result = scene()
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(play())


def start(rank: int, incarnation: int = 7) -> m.StartWorker:
    return m.StartWorker(incarnation, 0, rank, rank, 2, 4, "cpu", "m1:9000")


def test_an_island_starts_when_all_of_its_machines_are_there_and_meets_at_the_first() -> None:
    def scene() -> None:
        play = Scene()
        play.place()
        assert play.engine.missing() == "island 0 waits for 2 of 2 hosts: ranks 0, 1"
        play.come(1)
        assert play.take_sent() == []
        assert dict(play.report.waits)[0] == "waits for 1 of 2 hosts: rank 1 (rank 0 would be m1)"
        assert [each.state for each in play.report.machines] == ["waits for the other hosts of island 0"]
        play.come(2)
        assert play.take_sent() == [(1, start(0)), (2, start(1))]
        assert play.placed == [("m1", "m2")]
        assert play.report.waits == ()
        assert [each.state for each in play.report.machines] == ["host 0 of island 0", "host 1 of island 0"]

    played(scene)


def test_an_agent_is_told_that_it_has_joined_before_its_worker_starts() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.come(1)
        assert [type(message) for _, message in play.sent] == [m.Renew, m.StartWorker]

    played(scene)


def test_the_end_of_a_worker_is_reported_once_and_its_agent_is_free_again() -> None:
    def scene() -> None:
        play = Scene()
        play.start()
        play.send(1, m.AgentWorkerEnded(7, -9, "m1:9001"))
        play.send(1, m.AgentWorkerEnded(7, -9, "m1:9001"))
        assert play.ends == [(0, HostEnd(-9, "killed by SIGKILL"))]
        play.processes[1].kill()
        play.take_sent()
        play.send(2, m.AgentWorkerEnded(7, -9, "m2:9001"))
        play.place(incarnation=8)
        assert [(agent, each.incarnation, each.coordinator_address) for agent, each in play.take_sent()] == [
            (1, 8, "m1:9001"),
            (2, 8, "m1:9001"),
        ]

    played(scene)


def test_an_agent_that_is_back_in_time_keeps_its_worker() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.come(1)
        play.engine.agent_lost(1, "it closed the connection")
        assert play.report.machines[0].state == "away (host 0 of island 0)"
        play.come(1, connection=9, running=7)
        assert play.ends == []
        play.processes[0].kill()
        assert play.take_sent()[-1] == (9, m.EndWorker(7, force=True))

    played(scene)


def test_what_ended_while_an_agent_was_away_is_reported_when_it_is_back() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.come(1)
        play.engine.agent_lost(1, "it closed the connection")
        play.come(1, connection=9, ended=(7, -11))
        assert play.ends == [(0, HostEnd(-11, "killed by SIGSEGV"))]

    played(scene)


def test_an_agent_whose_worker_ended_while_it_was_away_gets_the_next_one_once() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        incarnation = 7

        def restart(end: HostEnd) -> None:
            play.ends.append((0, end))
            play.engine.place(0, [HostStart(0, 0, 0, 1, 4, incarnation)], begin)

        def begin(machines: Sequence[str]) -> None:
            nonlocal incarnation
            incarnation += 1
            play.engine.start_host(HostStart(0, 0, 0, 1, 4, incarnation), restart)

        play.engine.place(0, [HostStart(0, 0, 0, 1, 4, incarnation)], begin)
        play.come(1)
        play.engine.agent_lost(1, "it closed the connection")
        play.take_sent()
        play.come(1, connection=9, ended=(8, -9))
        assert [(agent, message.incarnation) for agent, message in play.take_sent()] == [(9, 9)]
        assert play.ends == [(0, HostEnd(-9, "killed by SIGKILL"))]

    played(scene)


def test_an_agent_that_stays_away_is_lost_with_its_worker_and_a_spare_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.01)

    async def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.come(1)
        play.come(2)
        play.engine.agent_lost(1, "it closed the connection")
        await asyncio.sleep(0.05)
        ((host, end),) = play.ends
        assert (host, end.status) == (0, None)
        assert "m1 (10.0.0.1)" in end.text
        play.place(hosts=1, incarnation=8)
        assert play.placed == [("m1",), ("m2",)]
        play.take_sent()
        # It was only away, and returns with a worker that has ended.
        play.come(1, connection=9, running=7)
        assert play.take_sent() == [(9, m.EndWorker(7, force=True))]
        assert play.report.machines[-1].state == "ends a worker that is over"
        play.send(9, m.AgentWorkerEnded(7, -9))
        assert play.report.machines[-1].state == "free"
        assert len(play.ends) == 1

    played(scene)


def test_a_silent_agent_is_lost_when_its_lease_is_over() -> None:
    async def scene() -> None:
        play = Scene("1x1x4", lease_seconds=0.1)
        play.place(hosts=1)
        play.come(1)
        for _ in range(20):
            play.send(1, m.AgentAlive())
            await asyncio.sleep(0.01)
        assert play.ends == []
        renewals = [each.lease for _, each in play.sent if isinstance(each, m.Renew)]
        assert renewals
        assert max(renewals) <= 0.1
        await asyncio.sleep(0.3)
        ((_, end),) = play.ends
        assert end.status is None
        assert "the host agent on m1 (10.0.0.1) sent nothing" in end.text
        assert play.report.machines == ()

    played(scene)


def test_machines_that_leave_have_their_island_drained_and_are_dismissed_when_they_hold_nothing() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.come(1)
        play.come(2)
        play.take_sent()
        play.send(2, m.AgentLeaves(30.0))
        assert play.take_sent() == [(2, m.Dismiss("its work is done"))]
        play.send(1, m.AgentLeaves(30.0))
        assert m.DrainRequest(0, returns=True) in play.to_controller
        assert play.take_sent() == []
        play.engine.drained(OK, "")
        play.processes[0].terminate()
        play.send(1, m.AgentWorkerEnded(7, 0))
        assert play.take_sent() == [(1, m.EndWorker(7)), (1, m.Dismiss("its work is done"))]

    played(scene)


def test_a_machine_of_which_others_say_that_it_goes_leaves_once() -> None:
    def scene() -> None:
        play = Scene("1x1x4")
        play.place(hosts=1)
        play.engine.host_leaves(0, 0, 60.0)  # no agent is connected yet
        play.come(1, RankSlot(0, 0))
        play.take_sent()
        for seconds in (60.0, 59.5, math.inf):
            play.engine.host_leaves(0, 0, seconds)
            play.engine.host_leaves(0, 1, seconds)
        assert play.to_controller.count(m.DrainRequest(0, returns=True)) == 1
        play.processes[0].terminate()
        play.send(1, m.AgentWorkerEnded(7, 0))
        assert play.take_sent() == [(1, m.EndWorker(7)), (1, m.Dismiss("its work is done"))]

    played(scene)


def test_a_drain_that_is_refused_for_want_of_room_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.engines.hosts.hosts_engine.DRAIN_RETRY_SECONDS", 0.2)

    async def scene() -> None:
        play = Scene("1x1x4", lease_seconds=3.0)
        play.place(hosts=1)
        play.come(1)
        play.send(1, m.AgentLeaves(30.0))
        for asked in (1, 2, 3):
            await until_async(lambda asked=asked: play.to_controller.count(m.DrainRequest(0, returns=True)) >= asked)
            play.engine.drained(Status(Code.FAILED_PRECONDITION, "island 0 is the only one that is ready"), "")
        play.send(1, m.AgentWorkerEnded(7, 0))  # its machine is lost
        await asyncio.sleep(1.0)
        assert play.to_controller.count(m.DrainRequest(0, returns=True)) == 3

    played(scene)


def test_an_island_that_is_missed_goes_before_one_that_was_drained() -> None:
    def scene() -> None:
        play = Scene("2x1x4")
        play.place(0, hosts=1)
        play.come(1)
        play.send(1, m.AgentLeaves(30.0))
        play.engine.drained(OK, "")
        play.send(1, m.AgentWorkerEnded(7, 0))
        play.place(0, hosts=1, incarnation=8)  # for the next machine that is available
        play.place(1, hosts=1)
        play.come(2)
        play.come(3)
        assert [message.island for _, message in play.take_sent() if isinstance(message, m.StartWorker)] == [0, 1, 0]

    played(scene)


def test_hosts_of_another_version_are_refused_with_both() -> None:
    def scene() -> None:
        play = Scene()
        play.send(1, m.AgentHello("agent", "m1", "10.0.0.1", "0.0.1"))
        ((_, dismissed),) = play.take_sent()
        assert dismissed.error
        assert "m1 has 0.0.1" in dismissed.text

    played(scene)


def test_what_is_no_message_of_an_agents_is_refused() -> None:
    def scene() -> None:
        play = Scene()
        play.engine.agent_said(1, b"\xff\xff")
        ((_, dismissed),) = play.take_sent()
        assert dismissed.error

    played(scene)


def test_islands_that_differ_get_each_the_machines_that_fit() -> None:
    def scene() -> None:
        play = Scene("1x2x4+1x1x8")
        play.place(0, hosts=2, devices=4, platform="cuda")
        play.place(1, hosts=1, devices=8, platform="cuda", first=2)
        play.come(1, devices={"cuda": 4})
        # of the cluster: it is the only host of the second island
        play.come(2, devices={"cuda": 8}, rank_slot=RankSlot(rank=2))
        assert play.placed == [("m2",)]
        ((_, text),) = play.report.waits
        assert text == "waits for 1 of 2 hosts: rank 1 (rank 0 would be m1)"
        play.come(3, devices={"cuda": 4})
        assert play.placed == [("m2",), ("m1", "m3")]
        starts = [message for _, message in play.take_sent()]
        assert [(each.island, each.host, each.rank, each.hosts, each.devices) for each in starts] == [
            (1, 2, 0, 1, 8),
            (0, 0, 0, 2, 4),
            (0, 1, 1, 2, 4),
        ]

    played(scene)


def test_a_machine_with_too_few_devices_is_named_and_not_taken() -> None:
    def scene() -> None:
        play = Scene("1x1x4", platform="cuda")
        play.place(hosts=1, platform="cuda")
        play.come(1, devices={"cuda": 2})
        assert play.placed == []
        assert "m1 has 2 cuda devices of the 4 that a host needs" in play.engine.missing()
        play.come(2, devices={"cuda": 4})
        assert play.placed == [("m2",)]

    played(scene)


def test_a_cluster_of_other_machines_must_listen_where_they_reach_it() -> None:
    with pytest.raises(AddressError, match="choose where the controller listens"):
        HostsEngine(EngineOptions(ClusterSettings(engine="hosts"), "/nowhere"))


def test_while_the_engine_is_cut_off_from_the_controller_no_agent_is_lost() -> None:
    async def scene() -> None:
        play = Scene("1x1x4", lease_seconds=0.1, grace_seconds=5.0)
        play.place(hosts=1)
        play.come(1)
        play.engine.cut_off(True)
        play.sent.clear()
        await asyncio.sleep(0.3)
        assert play.sent == []
        play.engine.cut_off(False)
        await asyncio.sleep(0.05)
        assert play.ends == []
        assert {each.grace for _, each in play.sent if isinstance(each, m.Renew)} == {5.0}

    played(scene)


def test_with_another_controller_agents_come_anew_with_what_they_hold() -> None:
    def scene() -> None:
        play = Scene()
        play.start()
        play.engine.begin(play._send)
        assert [each.state for each in play.report.machines] == [
            "away (host 0 of island 0)",
            "away (host 1 of island 0)",
        ]
        play.come(1, connection=11, running=7)
        play.come(2, connection=12, running=7)
        assert play.ends == []
        assert play.take_sent() == []
        assert [each.state for each in play.report.machines] == ["host 0 of island 0", "host 1 of island 0"]

    played(scene)


def test_a_worker_that_is_killed_while_its_agent_is_away_ends_when_that_is_back() -> None:
    def scene() -> None:
        play = Scene()
        play.start()
        play.engine.agent_lost(1, "the link was cut")
        play.processes[0].kill()
        assert play.take_sent() == []
        play.come(1, connection=11, running=7)
        assert play.take_sent() == [(11, m.EndWorker(7, force=True))]

    played(scene)


# ---- first causes, and distinguishing machines


def states(play: Scene) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in play.report.machines]


def test_a_machine_that_leaves_is_shown_and_is_the_reason_of_its_workers_end() -> None:
    def scene() -> None:
        play = Scene("1x2x4")
        play.start()
        play.send(2, m.AgentLeaves(30.0, "SIGTERM"))
        assert states(play) == [("m1", "host 0 of island 0"), ("m2", "leaves (host 1 of island 0)")]
        assert [(each.host, each.leaves) for each in play.report.machines] == [(0, ""), (1, "SIGTERM")]
        play.send(2, m.AgentWorkerEnded(7, -9))
        assert play.ends == [(1, HostEnd(None, "m2 left: SIGTERM"))]
        play.send(1, m.AgentLeaves(0.0, "the process 7 that started its agent has ended"))
        play.engine.agent_lost(1, "it closed the connection")
        play.engine._still_away(play.engine._agents["agent 1"])
        assert play.ends[1:] == [(0, HostEnd(None, "m1 left: the process 7 that started its agent has ended"))]

    played(scene)


def test_a_drain_says_whether_there_are_spares() -> None:
    def scene() -> None:
        play = Scene("1x2x4")
        play.start()
        play.come(3)
        play.send(2, m.AgentLeaves(30.0, "SIGTERM"))
        assert m.DrainRequest(0, returns=True, has_spares=True) in play.to_controller

    played(scene)


@pytest.mark.parametrize(("spares", "expected"), [((3,), ("m1", "m3")), ((), ("m1", "m2"))])
def test_a_machine_that_is_avoided_is_replaced_if_there_is_a_spare(
    spares: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    def scene() -> None:
        play = Scene("1x2x4")
        play.start()
        for each in spares:
            play.come(each)
        play.engine.avoid(1)
        for agent in (1, 2):
            play.send(agent, m.AgentWorkerEnded(7, -9))
        play.place(incarnation=8)
        assert play.placed == [("m1", "m2"), expected]
        for number, machine in enumerate(expected):
            play.send(int(machine[1]), m.AgentWorkerEnded(8, -9))
            assert number in play.processes
        play.place(incarnation=9)
        assert play.placed[-1] == expected, "the machines of the last time are the first choice again"

    played(scene)


def test_agents_of_one_machine_are_told_apart_and_a_place_that_does_not_exist_is_named() -> None:
    def scene() -> None:
        play = Scene("1x2x4")
        play.start()
        for agent in (3, 4):
            hello = m.AgentHello(f"agent {agent}", "m3", "10.0.0.3", __version__, RankSlot(-1, 7 if agent == 4 else -1))
            play.send(agent, hello)
        assert states(play)[2:] == [
            ("m3 (1 of 2)", "free"),
            ("m3 (2 of 2)", f"free, but no island has a place for it: it asks for {RankSlot(-1, 7)}"),
        ]

    played(scene)


NO_ROOM = Status(Code.FAILED_PRECONDITION, "island 0 is the only one that is ready")
IN_USE = Status(Code.FAILED_PRECONDITION, "island 0 is in use: red: no room")


def test_a_drain_that_was_refused_is_asked_for_again_while_a_machine_of_the_island_leaves() -> None:
    drains = MachineDrains()
    assert drains.ask(0)
    assert drains.due(50.0, {0}) == []  # the reply has not arrived yet
    assert drains.answered(NO_ROOM, 100.0) == (0, NO_ROOM.message)
    assert drains.due(100.0 + DRAIN_RETRY_SECONDS - 0.1, {0}) == []
    assert drains.due(100.0 + DRAIN_RETRY_SECONDS, {0}) == [0]
    assert drains.due(100.0 + 2 * DRAIN_RETRY_SECONDS, {0}) == []
    assert drains.answered(OK, 120.0) == (0, "")
    assert drains.due(1000.0, {0}) == []


def test_where_the_machines_are_gone_a_drain_is_not_asked_for_again() -> None:
    drains = MachineDrains()
    drains.ask(0)
    drains.answered(NO_ROOM, 100.0)
    assert drains.due(101.0, set()) == []
    assert drains.due(100.0 + DRAIN_RETRY_SECONDS, {0}) == []  # the next machine that leaves asks again


def test_a_reason_is_given_once() -> None:
    drains = MachineDrains()
    replies = []
    for turn, status in enumerate((NO_ROOM, NO_ROOM, IN_USE)):
        drains.ask(0)
        replies.append(drains.answered(status, 10.0 * turn)[1])
    assert replies == [NO_ROOM.message, "", IN_USE.message]


def test_answers_come_in_the_order_of_what_was_asked_and_an_island_is_asked_for_once() -> None:
    drains = MachineDrains()
    assert [drains.ask(island) for island in (1, 0, 1)] == [True, True, False]
    assert drains.answered(OK, 1.0) == (1, "")
    assert drains.answered(NO_ROOM, 1.0)[0] == 0


# ---- workers of a lost engine


class Adopting(Scene):
    """An engine that adopts the workers of incarnation 7 of island 0."""

    def adopt(self) -> None:
        for rank in range(2):
            start = HostStart(0, rank, rank, 2, 4, 7, "cpu")
            self.processes[rank] = self.engine.adopt(start, lambda end, n=rank: self.ends.append((n, end)))  # type: ignore[misc]


def test_a_worker_of_a_lost_engine_is_adopted_when_its_agent_connects() -> None:
    def scene() -> None:
        play = Adopting()
        play.adopt()
        play.come(1, running=7, serves=(0, 0))
        play.come(2, running=7, serves=(0, 1))
        assert [each.state for each in play.report.machines] == ["host 0 of island 0", "host 1 of island 0"]
        assert play.take_sent() == []
        play.processes[1].kill()
        assert play.take_sent() == [(2, m.EndWorker(7, force=True))]
        play.send(2, m.AgentWorkerEnded(7, -9, "m2:9001"))
        assert play.ends == [(1, HostEnd(-9, "killed by SIGKILL"))]

    played(scene)


def test_an_adopted_worker_that_was_killed_before_its_agent_connected_is_ended_then() -> None:
    def scene() -> None:
        play = Adopting()
        play.adopt()
        play.processes[0].kill()
        play.come(1, running=7, serves=(0, 0))
        assert play.take_sent() == [(1, m.EndWorker(7, force=True))]

    played(scene)


def test_an_adopted_worker_has_ended_if_its_agent_says_so_or_does_not_connect_within_a_lease() -> None:
    async def scene() -> None:
        play = Adopting(lease_seconds=0.01)
        play.adopt()
        play.come(1, serves=(0, 0), ended=(7, 1))
        assert play.ends == [(0, HostEnd(1, "exit status 1"))]
        await until_async(lambda: len(play.ends) == 2)
        number, end = play.ends[1]
        assert (number, end.status) == (1, None)
        assert "did not connect after the loss of the engine" in end.text

    played(scene)


def test_an_island_whose_adopted_worker_has_ended_starts_once_on_its_agent() -> None:
    def scene() -> None:
        play = Adopting()
        for rank in range(2):
            island = HostStart(rank, rank, 0, 1, 4, 7, "cpu")
            play.engine.adopt(island, lambda end, n=rank: play.place(n, hosts=1, incarnation=8, first=n))  # type: ignore[misc]
        play.come(1, serves=(0, 0), ended=(7, 1))
        assert [(agent, each.incarnation, each.island) for agent, each in play.take_sent()] == [(1, 8, 0)]
        assert play.ends == []

    played(scene)


def test_the_worker_of_another_incarnation_is_not_adopted() -> None:
    def scene() -> None:
        play = Adopting()
        play.adopt()
        play.come(1, running=6, serves=(0, 0))
        assert play.take_sent() == [(1, m.EndWorker(6, force=True))]
        assert play.report.machines[0].state == "ends a worker that is over"

    played(scene)
