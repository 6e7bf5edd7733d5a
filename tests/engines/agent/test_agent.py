"""Tests that a host agent reconnects to a controller: the previous one, or one that has taken over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.cluster.processes.process_runtime import StopEvent
from atoll.cluster.topology import RankSlot
from atoll.engines.agent.agent import HostAgent
from atoll.engines.agent.agent_options import AgentOptions
from atoll.errors import ClusterError
from atoll.protocol import messages as m
from atoll.wire.address import Address, parse_address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import listen
from atoll.wire.resumption.link_messages import AlternateAddresses
from tests.cluster_process import free_port
from tests.waiting import until_async

SECONDS = 60.0
START = m.StartWorker(
    7,
    island=0,
    host=0,
    rank=0,
    hosts=1,
    devices=1,
    platform="cpu",
    coordinator_address="",
    bulk_tls=False,
    lease=SECONDS,
)


class Dialed:
    """Stand-in for a controller, and for the engine behind it if it `renews`."""

    def __init__(self, *, renews: bool = True) -> None:
        self.address = parse_address(f"127.0.0.1:{free_port()}")
        self.renews = renews
        self.came = asyncio.Event()  # of an agent
        self.ended: asyncio.Future[m.AgentWorkerEnded] = asyncio.get_running_loop().create_future()
        self.worker_came = asyncio.Event()
        self.unanswered = 0  # Renews
        self.connection: Connection
        self._server: asyncio.Server

    async def begin(self) -> None:
        self._server, _ = await listen(self.address, self._accept)

    def _accept(self) -> Connection:
        def on_message(message: Any) -> None:
            if isinstance(message, m.Hello) and message.role == "worker":
                self.worker_came.set()
            if not isinstance(message, m.AgentSays):
                return
            decoded = m.read_from_agent(message.content)
            if isinstance(decoded, m.AgentWorkerEnded):
                self.ended.set_result(decoded)
            elif isinstance(decoded, m.AgentAlive):
                self.unanswered -= 1
            elif isinstance(decoded, m.AgentHello):
                self.connection = connection
                if self.renews:
                    self.tell(m.Renew(0.5, 60.0))
                self.came.set()

        connection = Connection(m.ToController, on_message, lambda reason: None, name="an agent")
        return connection

    async def start_worker(self) -> None:
        """Return after the agent has started its worker."""
        self.tell(START)
        self.tell(m.Renew(SECONDS, SECONDS))
        await until_async(lambda: not self.unanswered)

    def tell(self, message: m.Renew | m.StartWorker) -> None:
        self.unanswered += isinstance(message, m.Renew)
        self.connection.send(m.TellAgent(0, m.agent_content(message)))

    def elsewhere(self, *addresses: Address) -> None:
        self.connection.send_link(AlternateAddresses(tuple(map(str, addresses))))

    def stop_listening(self) -> None:
        self._server.close()

    def end(self) -> None:
        self.stop_listening()
        self.connection.close()


def play(scene: Callable[[Dialed, Dialed], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with an agent that knows the first of two controllers."""

    async def main() -> None:
        first, second = Dialed(), Dialed()
        await first.begin()
        await second.begin()
        stop = asyncio.Event()
        agent = HostAgent(AgentOptions(first.address, RankSlot(), machine="m"), "", lambda: None)
        running = asyncio.create_task(agent.run(stop))
        try:
            await first.came.wait()
            await scene(first, second)
        finally:
            stop.set()
            await running
            for each in (first, second):
                each.stop_listening()

    asyncio.run(asyncio.wait_for(main(), SECONDS))


@pytest.fixture(autouse=True)
def insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_INSECURE", "1")


def test_where_the_controller_is_gone_an_agent_goes_to_the_one_that_it_was_told_of() -> None:
    async def scene(first: Dialed, second: Dialed) -> None:
        first.elsewhere(second.address)
        await asyncio.sleep(0.1)
        first.end()
        await second.came.wait()

    play(scene)


def test_a_controller_that_takes_connections_and_says_nothing_is_left_for_the_other_one() -> None:
    async def scene(first: Dialed, second: Dialed) -> None:
        first.elsewhere(second.address)
        first.renews = False
        await second.came.wait()

    play(scene)


def test_an_agent_comes_back_where_the_other_one_has_not_taken_over() -> None:
    async def scene(first: Dialed, second: Dialed) -> None:
        second.renews = False
        first.elsewhere(second.address)
        first.came.clear()
        await asyncio.sleep(0.1)
        first.connection.close()
        await first.came.wait()

    play(scene)


def test_a_worker_that_was_started_before_another_controller_took_over_looks_for_it_there_too() -> None:
    async def scene(first: Dialed, second: Dialed) -> None:
        first.elsewhere(second.address)
        await first.start_worker()
        first.end()
        await second.worker_came.wait()
        assert not second.ended.done()

    play(scene)


def test_a_worker_that_does_not_know_where_the_controller_is_now_is_not_waited_for() -> None:
    async def scene(first: Dialed, second: Dialed) -> None:
        await first.start_worker()
        first.elsewhere(second.address)  # as sent by a controller that learns of the worker's end
        first.end()
        ended = await second.ended
        assert ended.incarnation == 7
        assert str(second.address) in ended.reason

    play(scene)


def test_an_agent_says_what_happens_to_it() -> None:
    async def main() -> list[str]:
        decoded: list[str] = []
        controller = Dialed()
        await controller.begin()
        stop = StopEvent()
        options = AgentOptions(controller.address, RankSlot(), machine="m", grace_seconds=0.1)
        agent = HostAgent(options, "", lambda: decoded.append("joined"), decoded.append)
        running = asyncio.create_task(agent.run(stop))
        await controller.came.wait()
        await controller.start_worker()
        stop.set_by(signal.SIGTERM)
        await running
        controller.stop_listening()
        return decoded

    decoded = asyncio.run(asyncio.wait_for(main(), SECONDS))
    assert decoded[:4] == [
        "joined",
        "this machine is host 0 of island 0 (rank 0 of 1): its worker starts",
        "SIGTERM: leaving; the cluster has 0 s to move what is on host 0 of island 0",
        "0 s are over: this host agent ends",
    ]
    assert decoded[4:] == ["the worker of host 0 of island 0 has ended: killed by SIGKILL"]


async def left_alone(*, stays: bool, grace: float = 0.0) -> tuple[Dialed, asyncio.Event, asyncio.Task[None]]:
    """Run an agent that gives up after half a second, and end its controller. Return how to find and stop it."""
    controller = Dialed(renews=False)
    await controller.begin()
    stop = asyncio.Event()
    options = AgentOptions(controller.address, RankSlot(), stays=stays, away_seconds=0.5, machine="m")
    running = asyncio.create_task(HostAgent(options, "", lambda: None).run(stop))
    await controller.came.wait()
    controller.tell(m.Renew(0.5, grace))
    await until_async(lambda: not controller.unanswered)
    controller.came.clear()
    controller.end()
    return controller, stop, running


async def comes_back_after(seconds: float, *, stays: bool, grace: float = 0.0) -> None:
    controller, stop, running = await left_alone(stays=stays, grace=grace)
    await asyncio.sleep(seconds)
    await controller.begin()
    await controller.came.wait()
    stop.set()
    await running
    controller.stop_listening()


def test_an_agent_whose_cluster_has_ended_while_it_was_away_ends() -> None:
    async def main() -> str:
        controller, _, running = await left_alone(stays=False)
        with pytest.raises(ClusterError) as raised:
            await running
        return str(raised.value).replace(str(controller.address), "ADDRESS")

    text = asyncio.run(asyncio.wait_for(main(), SECONDS))
    assert text.startswith("no controller of the cluster has served this host at ADDRESS for 0 s, so the cluster has ")
    assert "with --stay" in text


def test_an_agent_that_stays_or_whose_cluster_may_be_away_for_longer_dials_on() -> None:
    asyncio.run(asyncio.wait_for(comes_back_after(1.5, stays=True), SECONDS))
    asyncio.run(asyncio.wait_for(comes_back_after(1.5, stays=False, grace=SECONDS), SECONDS))


def test_an_agent_that_has_not_joined_yet_waits_for_its_cluster() -> None:
    async def main() -> None:
        controller, stop = Dialed(), asyncio.Event()
        options = AgentOptions(controller.address, RankSlot(), away_seconds=0.1, machine="m")
        running = asyncio.create_task(HostAgent(options, "", lambda: None).run(stop))
        await asyncio.sleep(0.6)
        await controller.begin()
        await controller.came.wait()
        stop.set()
        await running
        controller.stop_listening()

    asyncio.run(asyncio.wait_for(main(), SECONDS))
