"""Tests of opening a session with a controller in this process, over a real socket, and with fake hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from atoll.errors import AccessError, Code, ConnectError, Status, VersionError
from atoll.protocol import messages as m
from atoll.session import channels, session_opening
from atoll.session.cluster_session import ClusterSession
from atoll.session.session_opening import open_session
from atoll.transfers.channel import DataChannel
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume, Resumed, ResumeRefused, ResumeToken
from tests.session.fake_cluster import welcome
from tests.session.test_channels import FakeChannel
from tests.waiting import PATIENCE_SECONDS, until_async


class Controller:
    """Controller that replies to Hello with `answer(connection, hello)`, and keeps all other messages."""

    def __init__(self, answer: Callable[[Connection, m.Hello], None]) -> None:
        self.answer = answer
        self.connections: list[Connection] = []
        self.received: list[Any] = []

    def accept(self) -> Connection:
        def handle(message: Any) -> None:
            if isinstance(message, m.Hello):
                self.answer(connection, message)
            else:
                self.received.append(message)

        connection = Connection(m.ToController, handle, lambda reason: None)
        self.connections.append(connection)
        return connection


class ResumingController(Controller):
    """Controller that allows its peer to resume its connection for `grace` seconds, and pings it ten times a second."""

    def __init__(self, grace: float) -> None:
        super().__init__(self._admit)
        self._grace = grace
        self.resumed_at: list[float] = []

    def _admit(self, connection: Connection, hello: m.Hello) -> None:
        connection.send_link(ResumeToken(1, "secret", 1, self._grace))
        lets_in(connection, hello)

    def accept(self) -> Connection:
        def on_link(message: AnyLinkMessage) -> None:
            if isinstance(message, Resume):
                connection.send_link(Resumed(1, message.whole, message.pieced))
                self.resumed_at.append(asyncio.get_running_loop().time())
                self._ping(connection)

        def handle(message: Any) -> None:
            if isinstance(message, m.Hello):
                self._admit(connection, message)

        connection = Connection(m.ToController, handle, lambda reason: None, on_link=on_link)
        self.connections.append(connection)
        return connection

    def _ping(self, connection: Connection) -> None:
        connection.send(m.Ping(10.0))
        asyncio.get_running_loop().call_later(0.1, self._ping, connection)


class Hosts:
    """Data ports, some of which do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unreachable: set[str]) -> None:
        self.unreachable = unreachable
        self.channels: dict[str, FakeChannel] = {}
        monkeypatch.setattr(DataChannel, "connect", self._open)

    def _open(self, address: Address, session: int, secret: str, identity: None = None, **_: Any) -> FakeChannel:
        assert (session, secret) == (5, "secret")
        if address.path in self.unreachable:
            raise ConnectError(f"cannot reach a data port at {address}: nobody there")
        channel = self.channels[address.path] = FakeChannel()
        return channel


def play(directory: Path, controller: Controller, work: Callable[[Address], Awaitable[None]]) -> None:
    async def run() -> None:
        path = str(directory / "controller.sock")
        server = await asyncio.get_running_loop().create_unix_server(controller.accept, path)
        try:
            await asyncio.wait_for(work(Address(path=path)), PATIENCE_SECONDS)
        finally:
            for connection in controller.connections:
                connection.close()
            server.close()
            await asyncio.sleep(0.05)

    asyncio.run(run())


def opened(address: Address, patience: float = 0.2) -> Awaitable[ClusterSession]:
    return open_session(address, "token", "a test", 42, patience, first_handle=1000)


def lets_in(connection: Connection, hello: m.Hello) -> None:
    assert (hello.role, hello.token, hello.pid, hello.label) == ("proxy", "token", 42, "a test")
    connection.send(welcome(hosts=2))


def test_a_session_opens_with_channels_to_all_hosts(tmp_path, monkeypatch):
    hosts = Hosts(monkeypatch, set())

    async def work(address: Address) -> None:
        session = await opened(address)
        assert sorted(hosts.channels) == ["/0", "/1"]
        assert session.mint() == 1000
        session.close()

    play(tmp_path, Controller(lets_in), work)


def test_a_host_that_cannot_be_reached_keeps_no_session_out_and_is_served_once_it_is_back(tmp_path, monkeypatch):
    hosts = Hosts(monkeypatch, {"/1"})
    controller = Controller(lets_in)

    async def work(address: Address) -> None:
        session = await opened(address)
        assert sorted(hosts.channels) == ["/0"]
        session.upload([0, 1], 7, [b"contents"])
        assert hosts.channels["/0"].sent == [(7, [b"contents"])]
        controller.connections[0].send(m.HostsRestarted(((1, "unix:/again"),)))
        await until_async(lambda: "/again" in hosts.channels and bool(hosts.channels["/again"].sent))
        assert hosts.channels["/again"].sent == [(7, [b"contents"])]
        session.close()

    play(tmp_path, controller, work)


def test_hosts_are_dialled_at_once(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())
    dial = DataChannel.connect
    started: list[str] = []

    def slow(address: Address, session: int, secret: str, identity: None = None, **_: Any) -> Any:
        """Answer after all hosts were asked."""
        started.append(address.path)
        for _ in range(1000):
            if len(started) == 2:
                return dial(address, session, secret)
            time.sleep(0.01)
        raise ConnectError("the others were not dialled")

    monkeypatch.setattr(DataChannel, "connect", slow)

    async def work(address: Address) -> None:
        (await opened(address)).close()

    play(tmp_path, Controller(lets_in), work)


def test_a_cluster_of_which_no_host_can_be_reached_is_an_error(tmp_path, monkeypatch):
    Hosts(monkeypatch, {"/0", "/1"})
    controller = Controller(lets_in)

    async def work(address: Address) -> None:
        patience = 0.1
        while len(controller.connections) < 2:  # on a busy machine, one attempt may take the whole patience
            controller.connections.clear()
            patience *= 2
            with pytest.raises(ConnectError, match=r"none of the cluster's hosts can be reached: .*nobody there"):
                await opened(address, patience)
        assert patience < 10, "it tries only once"

    play(tmp_path, controller, work)


def test_a_session_opens_while_no_host_is_up(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())

    def answer(connection: Connection, hello: m.Hello) -> None:
        connection.send(welcome(hosts=0))

    async def work(address: Address) -> None:
        (await opened(address)).close()

    play(tmp_path, Controller(answer), work)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNAUTHENTICATED, AccessError),
        (Code.FAILED_PRECONDITION, VersionError),
        (Code.RESOURCE_EXHAUSTED, ConnectError),
    ],
)
def test_a_refusal_is_final(tmp_path, code, kind):
    controller = Controller(lambda connection, hello: connection.send(m.Refused(Status(int(code), "no"))))

    async def work(address: Address) -> None:
        with pytest.raises(kind, match="no"):
            await opened(address, patience=10.0)
        assert len(controller.connections) == 1

    play(tmp_path, controller, work)


def test_the_reason_of_a_wait_is_logged(tmp_path, monkeypatch, caplog):
    Hosts(monkeypatch, set())

    def answer(connection: Connection, hello: m.Hello) -> None:
        connection.send(m.Late("this script waits for a name"))
        lets_in(connection, hello)

    async def work(address: Address) -> None:
        session = await opened(address)
        session.close()

    play(tmp_path, Controller(answer), work)
    assert "this script waits for a name" in caplog.messages


def test_a_controller_that_goes_away_instead_of_answering_is_an_error(tmp_path):
    async def work(address: Address) -> None:
        with pytest.raises(ConnectError, match="the Atoll controller is gone"):
            await opened(address)

    play(tmp_path, Controller(lambda connection, hello: connection.close()), work)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (True, r"opened no session within 0 s: not all of its workers have started"),
        (False, r"opened no session within 0 s, and does not answer other requests: it was stopped"),
    ],
)
def test_a_controller_that_is_silent_is_told_from_one_whose_workers_start(tmp_path, monkeypatch, answers, reason):
    monkeypatch.setattr(session_opening, "_ANSWER_SECONDS", 10.0 if answers else 0.2)

    def answer(connection: Connection, hello: m.Hello) -> None:
        if answers and hello.role == "operator":
            connection.send(m.StatusReply(b"{}"))

    controller = Controller(answer)

    async def work(address: Address) -> None:
        with pytest.raises(ConnectError, match=reason):
            await open_session(address, "token", "a test", 42, 0.0, welcome_seconds=0.1)
        assert controller.received == [m.StatusRequest()]

    play(tmp_path, controller, work)


def test_a_session_that_opens_while_the_controller_is_asked_is_used(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())

    def answer(connection: Connection, hello: m.Hello) -> None:
        if hello.role == "operator":
            lets_in(controller.connections[0], replace(hello, role="proxy"))
            asyncio.get_running_loop().call_later(0.2, connection.send, m.StatusReply(b"{}"))  # after the welcome

    controller = Controller(answer)

    async def work(address: Address) -> None:
        session = await open_session(address, "token", "a test", 42, 0.0, 1000, welcome_seconds=0.1)
        assert session.mint() == 1000
        session.close()

    play(tmp_path, controller, work)


def test_what_follows_the_welcome_at_once_is_for_the_session(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())

    def answer(connection: Connection, hello: m.Hello) -> None:
        lets_in(connection, hello)
        connection.send(m.Quiesce(3))

    controller = Controller(answer)

    async def work(address: Address) -> None:
        session = await opened(address)
        await until_async(lambda: bool(controller.received))
        assert (controller.received, session.is_quiesced) == ([m.Quiesced(3)], True)
        session.close()

    play(tmp_path, controller, work)


def test_a_controller_that_is_not_there_yet_is_waited_for(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())
    path = str(tmp_path / "late.sock")

    async def run() -> None:
        opening = asyncio.ensure_future(opened(Address(path=path), patience=10.0))
        await asyncio.sleep(0.1)
        controller = Controller(lets_in)
        server = await asyncio.get_running_loop().create_unix_server(controller.accept, path)
        (await opening).close()
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_controller_that_admits_nobody_now_is_waited_for_longer_than_one_that_is_not_there(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())
    began = time.monotonic()

    def answer(connection: Connection, hello: m.Hello) -> None:
        if time.monotonic() - began > 1.0:
            lets_in(connection, hello)
        else:
            connection.send_link(ResumeRefused("it does not hold its lease", final=False))
            connection.close()

    controller = Controller(answer)

    async def work(address: Address) -> None:
        (await opened(address, patience=0.1)).close()
        assert len(controller.connections) > 1

    play(tmp_path, controller, work)


def test_no_process_at_the_address_is_an_error_when_patience_ends(tmp_path):
    async def run() -> None:
        with pytest.raises(ConnectError, match="cannot reach the Atoll controller"):
            await opened(Address(path=str(tmp_path / "nobody.sock")))

    asyncio.run(run())


def test_a_controller_that_is_silent_from_its_welcome_on_is_missed(tmp_path, monkeypatch):
    Hosts(monkeypatch, set())

    def welcomes(connection: Connection, hello: m.Hello) -> None:
        connection.send(msgspec.structs.replace(welcome(hosts=1), lease=0.01))

    async def work(address: Address) -> None:
        session = await opened(address)
        await until_async(lambda: session.lost is not None)
        assert "the Atoll controller is gone: it was silent" in session.lost.message

    play(tmp_path, Controller(welcomes), work)


def test_a_session_keeps_for_the_grace_of_a_controller_that_continues_which_host_it_has_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(channels, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(channels, "_LOOK_SECONDS", 0.05)
    hosts = Hosts(monkeypatch, set())
    grace = 0.7
    controller = ResumingController(grace)

    async def work(address: Address) -> None:
        session = await opened(address)
        controller.connections[0].abort()
        await until_async(lambda: bool(controller.resumed_at))
        hosts.channels["/0"].close()
        await until_async(lambda: session.lost is not None)
        assert asyncio.get_running_loop().time() - controller.resumed_at[0] >= grace

    play(tmp_path, controller, work)
