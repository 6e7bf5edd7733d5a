"""Tests of TLS over blocking sockets: bytes, roles, and all kinds of failed handshakes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from atoll.errors import AccessError, ConnectError
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.byte_stream import SocketStream, dial_stream
from atoll.wire.tls.identity import Identity
from atoll.wire.tls.tls_stream import TlsSender, TlsStream
from tests.certificates import clock_ahead_by, identity
from tests.transfers.ends import tcp_pair

SECONDS = 10.0
HOUR = 3600.0


def in_thread(call: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Calls it on a thread; what it raises is the result of what is returned."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> BaseException | None:
        thread.join(SECONDS)
        assert not thread.is_alive(), "it hangs"
        return raised[0] if raised else None

    return join


class Pair:
    """Two ends that have not shaken hands."""

    def __init__(
        self, dialing: Identity, serving: Identity, wanted: str = "host", kind: type[TlsStream | TlsSender] = TlsStream
    ) -> None:
        here, there = tcp_pair()
        self.client = kind.dialed(here, wanted, dialing, "a data port at tls://10.0.0.1:7")
        self.server = TlsStream.accepted(there, serving)

    def secure(self, seconds: float = SECONDS) -> tuple[BaseException | None, BaseException | None]:
        """The errors of client and server. A client learns with its first byte that the server does not take it."""
        serve = in_thread(lambda: self.server.secure(seconds))
        client = None
        try:
            self.client.secure(seconds)
        except ConnectError as error:
            client = error
        served = serve()
        if client is None and served is not None:
            with pytest.raises(ConnectError) as caught:
                self.client.receive_into(memoryview(bytearray(1)))
            client = caught.value
        return client, served

    def close(self) -> None:
        self.client.close()
        self.server.close()


@contextlib.contextmanager
def pair(
    dialing: Identity, serving: Identity, wanted: str = "host", kind: type[TlsStream | TlsSender] = TlsStream
) -> Iterator[Pair]:
    made = Pair(dialing, serving, wanted, kind)
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[Pair]:
    with pair(identity(Role.CLIENT), identity(Role.HOST)) as made:
        assert made.secure() == (None, None)
        yield made


def received(stream: TlsStream, count: int) -> bytes:
    content = bytearray(count)
    position = 0
    while position < count:
        got = stream.receive_into(memoryview(content)[position:])
        assert got, f"closed after {position} bytes"
        position += got
    return bytes(content)


@pytest.fixture(params=[TlsStream, TlsSender])
def either(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Whether the end that dials goes both ways or only sends."""
    with pair(identity(Role.CLIENT), identity(Role.HOST), kind=request.param) as made:
        assert made.secure() == (None, None)
        yield made


def test_each_end_knows_the_others_role(either: Pair) -> None:
    ends = either
    assert (ends.client.peer_role, ends.server.peer_role) == ("host", "client")
    assert ends.server.peer_name == "a client of a test"


@pytest.mark.parametrize("size", [1, 4, 16383, 16384, 16385, 300_000, 3_000_000])
def test_bytes_arrive_whole_and_in_order_whatever_the_reader_asks_for(either: Pair, size: int) -> None:
    ends = either
    content = bytes(range(256)) * (size // 256 + 1)
    send = in_thread(lambda: ends.client.send((content[:size], b"", memoryview(content)[:7])))
    beginning = bytearray(3)
    got = ends.server.receive_into(memoryview(beginning)[: min(3, size)])
    assert beginning[:got] + received(ends.server, size + 7 - got) == content[:size] + content[:7]
    assert send() is None


def test_one_thread_reads_while_others_send_both_ways(ends: Pair) -> None:
    size, count = 40_000, 60
    lock = threading.Lock()

    def send(stream: TlsStream, letter: bytes) -> None:
        for _ in range(count):
            with lock if stream is ends.client else contextlib.nullcontext():
                stream.send((letter * size,))

    waiting = [
        in_thread(lambda: send(ends.client, b"a")),
        in_thread(lambda: send(ends.client, b"b")),
        in_thread(lambda: send(ends.server, b"c")),
    ]
    arrived: list[bytes] = []
    waiting.append(in_thread(lambda: arrived.append(received(ends.client, size * count))))
    both = received(ends.server, 2 * size * count)
    assert [each() for each in waiting] == [None] * 4
    assert arrived == [b"c" * size * count]
    blocks = [both[i : i + size] for i in range(0, len(both), size)]
    assert sorted(blocks) == [b"a" * size] * count + [b"b" * size] * count


def test_an_end_that_closes_ends_the_others_reading(either: Pair) -> None:
    ends = either
    ends.client.send((b"last",))
    ends.client.close()
    assert received(ends.server, 4) == b"last"
    assert ends.server.receive_into(memoryview(bytearray(4))) == 0
    with pytest.raises(OSError, match=r"Broken pipe|reset|Bad file|EOF occurred"):
        send_for_long(ends.server)


def send_for_long(stream: TlsStream | TlsSender) -> None:
    for _ in range(100):
        stream.send((b"x" * 100_000,))


def test_shutting_down_wakes_a_reader(either: Pair) -> None:
    for end in (either.server, either.client):
        reading = in_thread(lambda end=end: end.receive_into(memoryview(bytearray(4))))
        end.shut_down()
        assert reading() is None


def test_who_only_sends_learns_that_the_peer_has_closed_and_fails_then() -> None:
    with pair(identity(Role.CLIENT), identity(Role.HOST), kind=TlsSender) as ends:
        assert ends.secure() == (None, None)
        assert ends.client.peer_role == "host"
        reading = in_thread(lambda: ends.client.receive_into(memoryview(bytearray(1))))
        ends.server.close()
        assert reading() is None
        with pytest.raises(OSError, match=r"Broken pipe|reset|EOF occurred"):
            send_for_long(ends.client)


def test_a_new_certificate_leaves_open_connections_alone_and_counts_for_new_ones(ends: Pair) -> None:
    authority = CertificateAuthority.make()
    host, client = identity(Role.HOST, authority), identity(Role.CLIENT, authority)
    with pair(client, host) as before:
        assert before.secure() == (None, None)
        fresh = authority.certificate_for(Role.HOST, "renewed")
        host.renew(fresh)
        before.client.send((b"still",))
        assert received(before.server, 5) == b"still"
        with pair(client, host) as after:
            assert after.secure() == (None, None)
            certificate = after.client._tls.getpeercert()
            assert certificate is not None
            assert (("commonName", "renewed"),) in certificate["subject"]


# ---- not trusted

STRANGERS = CertificateAuthority.make("somebody else's")


@pytest.mark.parametrize("kind", [TlsStream, TlsSender])
@pytest.mark.parametrize("role", [Role.CLIENT, Role.ENGINE, Role.CONTROLLER])
def test_who_listens_in_another_role_is_not_trusted(role: Role, kind: type[TlsStream | TlsSender]) -> None:
    with pair(identity(Role.CLIENT), identity(role), kind=kind) as made:
        client, served = made.secure()
    assert isinstance(client, AccessError)
    assert "a data port at tls://10.0.0.1:7 is not trusted: its certificate is for another role" in str(client)
    assert isinstance(served, AccessError)


def test_another_clusters_certificates_are_not_trusted_by_either_side() -> None:
    with pair(identity(Role.CLIENT), identity(Role.HOST, STRANGERS)) as made:
        client, _ = made.secure()
    assert isinstance(client, AccessError)
    assert "not from the CA of the join token" in str(client)
    with pair(identity(Role.CLIENT, STRANGERS), identity(Role.HOST)) as made:
        made.client._tls.context.load_verify_locations(cadata=identity(Role.HOST).certificate.authority.decode())
        client, served = made.secure()
    assert isinstance(served, AccessError)
    assert isinstance(client, AccessError)
    assert "does not know the CA of this process's certificate" in str(client)


def test_an_expired_certificate_is_refused_with_a_word_about_clocks() -> None:
    of_server = "has expired according to this machine's clock (it is 20"
    of_client = "this process's certificate has expired"
    with clock_ahead_by(-48 * HOUR):
        host, client = identity(Role.HOST), identity(Role.CLIENT)
    with pair(identity(Role.CLIENT), host) as made:
        error, _ = made.secure()
    assert isinstance(error, AccessError)
    assert of_server in str(error)
    assert "try again in a minute" in str(error)
    with pair(client, identity(Role.HOST)) as made:
        error, _ = made.secure()
    assert isinstance(error, AccessError)
    assert of_client in str(error)
    assert "is renewed within a minute" in str(error)


@pytest.mark.parametrize("years", [1, 20])
def test_a_clock_that_was_set_back_after_the_cluster_started_refuses_no_connection(years: int) -> None:
    """The operator must be able to stop the cluster."""
    with clock_ahead_by(years * 365 * 24 * HOUR):
        authority = CertificateAuthority.make()
        host, client = identity(Role.HOST, authority), identity(Role.CLIENT, authority)
    with pair(identity(Role.CLIENT, authority), host) as made:
        assert made.secure() == (None, None)
    with pair(client, identity(Role.HOST, authority)) as made:
        assert made.secure() == (None, None)


# ---- no TLS, or no answer


@pytest.mark.parametrize("one_way", [False, True])
def test_a_listener_without_tls_is_named_at_once(one_way: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(host="127.0.0.1", port=server.getsockname()[1], tls=True)

        def serve(answer: bytes) -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4)
                sock.sendall(answer)

        for answer in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
            served = in_thread(lambda answer=answer: serve(answer))
            with pytest.raises(AccessError, match=rf"a data port at {address} .*does not use TLS.*--insecure"):
                dial_stream(address, "host", identity(Role.CLIENT), what="a data port", one_way=one_way)
            assert served() is None


def test_a_client_without_tls_is_refused_at_once() -> None:
    here, there = tcp_pair()
    plain, server = SocketStream(here), TlsStream.accepted(there, identity(Role.HOST))
    plain.send((b"\x20\0\0\0 a frame in the clear",))
    with pytest.raises(AccessError, match="does not use TLS"):
        server.secure(SECONDS)
    plain.close()
    server.close()


@pytest.mark.parametrize("trickle", [b"", b"\x16\x03\x01\x02\x00"])
def test_a_handshake_that_is_not_finished_ends_in_time_however_slowly_it_goes_on(trickle: bytes) -> None:
    here, there = tcp_pair()
    server = TlsStream.accepted(there, identity(Role.HOST))
    done = threading.Event()

    def send_slowly() -> None:
        for each in trickle + bytes(500):
            if done.wait(0.02):
                return
            here.sendall(bytes((each,)) if trickle else b"")

    slow = in_thread(send_slowly)
    started = time.monotonic()
    with pytest.raises(ConnectError, match="did not finish the TLS handshake in time"):
        server.secure(0.3)
    assert time.monotonic() - started < 60
    done.set()
    assert slow() is None
    here.close()
    server.close()


@pytest.mark.parametrize("kind", [TlsStream, TlsSender])
def test_a_peer_that_does_not_answer_is_given_up_in_time(kind: type[TlsStream | TlsSender]) -> None:
    here, there = tcp_pair()
    client = kind.dialed(here, "host", identity(Role.CLIENT), "a data port at tls://10.0.0.1:7")
    with pytest.raises(ConnectError, match="did not finish the TLS handshake in time"):
        client.secure(0.2)
    client.close()
    there.close()


def test_without_an_identity_the_error_says_what_to_set() -> None:
    address = Address(host="10.0.0.1", port=7, tls=True)
    with pytest.raises(AccessError, match=r"10\.0\.0\.1:7 uses TLS.*ATOLL_JOIN.*--join-file"):
        dial_stream(address, "controller", None, what="the Atoll controller")
