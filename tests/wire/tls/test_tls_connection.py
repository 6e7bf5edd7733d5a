"""Tests of control connections with TLS on an event loop: messages, roles, and the errors of both sides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop
from msgspec.structs import replace

from atoll.errors import AccessError, ConnectError
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.roles import Role
from atoll.wire import endpoints as module
from atoll.wire.address import Address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.tls.identity import Identity
from tests.certificates import clock_ahead_by, identity

LOOPBACK = Address(host="127.0.0.1", tls=True)


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    text: str


Main = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_a_loop(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    def run(main: Main) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded())

    return run


class Served:
    """A server that echoes, and what it saw."""

    def __init__(self) -> None:
        self.address = Address()
        self.made: list[Connection] = []
        self.lost: list[str] = []

    def accept(self) -> Connection:
        def on_message(message: Any) -> None:
            connection.send(message)

        connection = Connection(Note, on_message, self.lost.append, name="a client", on_made=self.made.append)
        return connection


@contextlib.asynccontextmanager
async def serving(own: Identity | None, address: Address = LOOPBACK) -> AsyncIterator[Served]:
    served = Served()
    server, served.address = await listen(address, served.accept, own)
    try:
        yield served
    finally:
        server.close()
        for connection in served.made:
            connection.close()


async def echoed(address: Address, own: Identity | None, text: str) -> tuple[Any, Connection]:
    """Return the echoed message, or the reason why the connection was lost."""
    answers: asyncio.Queue[Any] = asyncio.Queue()
    connection = await connect(
        address, Note, answers.put_nowait, answers.put_nowait, name="the controller", identity=own, timeout=5.0
    )
    connection.send(Note(text))
    return await answers.get(), connection


def test_messages_go_both_ways_and_the_server_knows_the_role(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            for text in ("short", "x" * 1_000_000):
                answer, connection = await echoed(served.address, identity(Role.CLIENT), text)
                assert answer == Note(text)
                assert connection.peer_role == "controller"
                connection.close()
            assert [each.peer_role for each in served.made] == ["client", "client"]
            assert served.made[0].peer_name == "a client of a test"

    on_a_loop(main)


def test_a_blocking_connection_talks_to_it(on_a_loop: Callable[[Main], None]) -> None:
    def talk(address: Address) -> list[Any]:
        connection = BlockingConnection.dial(address, Note, name="the controller", identity=identity(Role.HOST))
        connection.send(Note("a"), Note("b" * 300_000))
        received = connection.receive()
        found = [next(received), next(received)]
        connection.close()
        return found

    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            assert await asyncio.to_thread(talk, served.address) == [Note("a"), Note("b" * 300_000)]
            while not served.lost:
                await asyncio.sleep(0.01)
            assert "closed the connection" in served.lost[0]

    on_a_loop(main)


def test_a_peer_that_is_not_trusted_keeps_nobody_from_the_next_address(on_a_loop: Callable[[Main], None]) -> None:
    def dialed(address: Address) -> None:
        BlockingConnection.dial(address, Note, name="the controller", identity=identity(Role.HOST)).close()

    async def main() -> None:
        stranger = identity(Role.CONTROLLER, CertificateAuthority.make("another"))
        async with serving(stranger) as first, serving(identity(Role.CONTROLLER)) as second:
            both = replace(first.address, others=(second.address,))
            answer, connection = await echoed(both, identity(Role.CLIENT), "a")
            assert answer == Note("a")
            connection.close()
            await asyncio.to_thread(dialed, both)
            neither = replace(first.address, others=(first.address,))
            words = f"not from the CA of the join token.*The attempt also failed at {first.address}"
            with pytest.raises(AccessError, match=words):
                await echoed(neither, identity(Role.CLIENT), "a")
            with pytest.raises(AccessError, match=words):
                await asyncio.to_thread(dialed, neither)

    on_a_loop(main)


def test_who_is_refused_while_it_sends_learns_why_and_nothing_is_raised(on_a_loop: Callable[[Main], None]) -> None:
    with clock_ahead_by(-48 * 3600):
        expired = identity(Role.CLIENT)

    async def main() -> None:
        failed: list[Any] = []
        lost: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        async with serving(identity(Role.CONTROLLER)) as served:
            connection = await connect(
                served.address, Note, lost.append, lost.append, name="the controller", identity=expired
            )
            while not lost:
                connection.send(Note("x"))  # once a turn of the loop, so also in that in which the refusal comes
                await asyncio.sleep(0)
            assert "certificate has expired" in lost[0]
        assert not failed

    on_a_loop(main)


def test_a_renewed_certificate_is_that_of_new_connections(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        authority = CertificateAuthority.make()
        controller, client = identity(Role.CONTROLLER, authority), identity(Role.CLIENT, authority)
        async with serving(controller) as served:
            _, before = await echoed(served.address, client, "before")
            controller.renew(authority.certificate_for(Role.CONTROLLER, "renewed"))
            _, after = await echoed(served.address, client, "after")
            assert (before.peer_name, after.peer_name) == ("a controller of a test", "renewed")
            assert not before.is_closed
            before.close()
            after.close()

    on_a_loop(main)


def test_who_has_no_certificate_is_let_in_without_a_role(on_a_loop: Callable[[Main], None]) -> None:
    """The listener serves those who join, and looks at the role."""

    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            own = identity(Role.CLIENT)
            bare = module.ssl.SSLContext(module.ssl.PROTOCOL_TLS_CLIENT)
            bare.load_verify_locations(cadata=own.certificate.authority.decode())
            own.dialing = bare
            answer, connection = await echoed(served.address, own, "hello")
            assert answer == Note("hello")
            assert [each.peer_role for each in served.made] == [""]
            connection.close()

    on_a_loop(main)


STRANGERS = CertificateAuthority.make("somebody else's")


def test_a_server_of_another_cluster_or_role_is_not_trusted(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        for own, words in (
            (identity(Role.CONTROLLER, STRANGERS), "not from the CA of the join token"),
            (identity(Role.HOST), "its certificate is for another role"),
        ):
            async with serving(own) as served:
                with pytest.raises(AccessError, match=words):
                    await echoed(served.address, identity(Role.CLIENT), "hello")
                assert served.made == []

    on_a_loop(main)


def test_a_client_that_the_server_does_not_trust_learns_why(on_a_loop: Callable[[Main], None]) -> None:
    stranger = identity(Role.CLIENT, STRANGERS)
    stranger.dialing.load_verify_locations(cadata=identity(Role.CLIENT).certificate.authority.decode())
    with clock_ahead_by(-48 * 3600):
        expired = identity(Role.CLIENT)

    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            for own, words in ((stranger, "does not know the CA"), (expired, "certificate has expired")):
                try:
                    reason, _ = await echoed(served.address, own, "hello")
                except AccessError as error:
                    reason = str(error)
                assert "the controller" in reason
                assert words in reason
            assert served.made == []

    on_a_loop(main)


def test_tls_where_the_other_side_has_none_is_an_error_at_once(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving(None, Address(host="127.0.0.1")) as served:
            with pytest.raises(
                AccessError, match=r"the controller at tls://127.0.0.1:\d+ .*does not use TLS.*--insecure"
            ):
                await echoed(served.address.secured(), identity(Role.CLIENT), "hello")
            assert "uses TLS, and this side does not" in served.lost[0]

    on_a_loop(main)


def test_no_tls_where_the_other_side_has_it_is_an_error_at_once(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            plain = Address(host="127.0.0.1", port=served.address.port)
            reason, _ = await echoed(plain, None, "hello")
            assert "the controller" in reason
            assert "uses TLS, and this side does not" in reason
            assert served.made == []

    on_a_loop(main)


def test_a_handshake_that_is_not_finished_ends_in_time(
    on_a_loop: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)

    def half_open(address: Address) -> bytes:
        with socket.create_connection((address.host, address.port), 10.0) as sock:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            return sock.recv(1)

    async def main() -> None:
        async with serving(identity(Role.CONTROLLER)) as served:
            waiting = [asyncio.create_task(asyncio.to_thread(half_open, served.address)) for _ in range(5)]
            answer, connection = await echoed(served.address, identity(Role.CLIENT), "others are served meanwhile")
            assert isinstance(answer, Note)
            connection.close()
            for each in waiting:
                with contextlib.suppress(ConnectionResetError):
                    assert await each == b""

    on_a_loop(main)


def test_a_listener_that_never_answers_the_handshake_is_named_in_time(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = Address(host="127.0.0.1", port=silent.getsockname()[1], tls=True)
            with pytest.raises(ConnectError, match=f"the controller at {address} did not"):
                await connect(
                    address, Note, print, print, name="the controller", identity=identity(Role.CLIENT), timeout=0.3
                )

    on_a_loop(main)


def test_dialing_in_vain_leaves_nothing_that_goes_off_later(
    on_a_loop: Callable[[Main], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            address = Address(host="127.0.0.1", port=gone.getsockname()[1], tls=True)
        for _ in range(3):
            with pytest.raises(ConnectError, match="the controller at tls://"):  # a busy machine refuses too late
                await connect(
                    address, Note, print, print, name="the controller", identity=identity(Role.CLIENT), timeout=0.1
                )
        await asyncio.sleep(0.3)

    on_a_loop(main)
    assert caplog.text == ""


def test_without_an_identity_the_error_says_what_to_set(on_a_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        with pytest.raises(AccessError, match="ATOLL_JOIN"):
            await connect(Address(host="10.0.0.1", port=7, tls=True), Note, print, print, name="the controller")

    on_a_loop(main)
