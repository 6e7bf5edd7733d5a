"""Tests of a cluster on TCP with TLS, from the side of peers that join, that may not join, and that attack it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from atoll.errors import AccessError, ConnectError
from atoll.operate.log_replay import replay
from atoll.operate.operator_requests import request_dump, request_report, request_stop
from atoll.protocol import messages as m
from atoll.security.access import joined
from atoll.security.join_token import JoinToken, host_join_file, join_file, read_join
from atoll.security.roles import Role
from atoll.transfers.channel import DataChannel
from atoll.wire.address import Address, parse_address
from atoll.wire.blocking import BlockingConnection
from atoll.wire.tls.identity import Identity
from tests.cluster_process import free_port
from tests.end_to_end.refusals import refusals
from tests.end_to_end.remote_python import RemoteError, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.two_islands import from_island_to_island
from tests.waiting import until

SECONDS = 30.0


def join_of(cluster: StandingCluster) -> JoinToken:
    return read_join(str(join_file(cluster.directory)))


def data_addresses(cluster: StandingCluster) -> list[Address]:
    """Return the addresses of the workers' data ports, as they report them."""
    join = join_of(cluster)
    dump = request_dump(join.address, "", join)
    output = [event.message for event, _ in replay(dump.splitlines()) if hasattr(event, "message")]
    return [parse_address(each.data_address) for each in output if isinstance(each, m.WorkerReady)]


def start(start_cluster: StartCluster, **settings: Any) -> StandingCluster:
    """Start a cluster that listens on all interfaces, so that data ports use TCP.

    Join tokens contain the loopback address.
    """
    cluster = start_cluster(islands="2x1x1", listen=f"tls://0.0.0.0:{free_port()}", advertise="127.0.0.1", **settings)
    return cluster


@pytest.fixture(scope="module")
def secured(start_cluster: StartCluster) -> StandingCluster:
    return start(start_cluster)


@pytest.fixture
def client(secured: StandingCluster) -> Identity:
    return joined(join_of(secured), Role.CLIENT, "a test")


@pytest.fixture
def host(secured: StandingCluster) -> Identity:
    return joined(read_join(str(host_join_file(secured.directory))), Role.HOST, "a test")


# ---- peers that join


def test_a_script_with_the_join_string_alone_runs_over_tls(secured: StandingCluster, start_python: StartPython) -> None:
    addresses = data_addresses(secured)
    assert len(addresses) == 2
    assert all(address.tls and not address.is_unix for address in addresses)
    for output in (str(join_file(secured.directory)), str(join_of(secured))):
        python = start_python(ATOLL_JOIN=output)
        assert python.call(from_island_to_island) == (2, 55.0)
        python.close()
    join = join_of(secured)
    assert len(request_report(join.address, "", join)) > 100


def on_own_channels() -> tuple[list[bool], bool]:
    """Return whether values are right before and after the script's channels to hosts end, and whether these are used.

    Runs in a child on Atoll.
    """
    import jax

    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    x = np.arange(1 << 19, dtype=np.float32)
    add_one = jax.jit(lambda y: y + 1)

    def are_right() -> list[bool]:
        return [np.array_equal(add_one(jax.device_put(x, device)), x + 1) for device in jax.devices()]

    found = are_right()
    until(lambda: all(map(CLIENT_CHANNEL.sends_to, jax.devices())))
    found += are_right()
    counts = [channel.liveness.counts() for channel in CLIENT_CHANNEL.direct_channels if channel.liveness is not None]
    for channel in CLIENT_CHANNEL.direct_channels:
        channel.shut_down()
    return found + are_right(), [min(both) >= x.nbytes for both in counts] == [True, True]


def test_large_arrays_use_the_scripts_own_channels_to_hosts_on_other_machines(
    secured: StandingCluster, start_python: StartPython
) -> None:
    python = start_python(ATOLL_JOIN=str(join_of(secured)))
    assert python.call(on_own_channels) == ([True] * 6, True)
    python.close()


def test_bulk_tls_off_leaves_data_connections_in_the_clear_and_control_connections_not(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start(start_cluster, bulk_tls="off")
    assert all(not address.tls and not address.is_unix for address in data_addresses(cluster))
    python = start_python(ATOLL_JOIN=str(join_of(cluster)))
    assert python.call(from_island_to_island) == (2, 55.0)
    python.close()


def test_secrets_are_on_no_command_line_and_in_no_log(secured: StandingCluster) -> None:
    tokens = [read_join(str(file(secured.directory))).token for file in (join_file, host_join_file)]
    assert tokens[0] != tokens[1]
    lines = [" ".join(process.cmdline()) for process in secured.processes().values()]
    join = join_of(secured)
    texts = [*lines, request_dump(join.address, "", join).decode(), request_report(join.address, "", join).decode()]
    assert not [token for token in tokens for text in texts if token in text]
    for name in ("authority.pem", "join", "join-hosts"):
        assert (secured.directory / name).stat().st_mode & 0o077 == 0


def test_certificates_are_renewed_under_a_session_that_goes_on(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start(start_cluster, environment={"ATOLL_CERTIFICATE_SECONDS": "3"})
    python = start_python(ATOLL_JOIN=str(join_of(cluster)))
    assert python.call(from_island_to_island) == (2, 55.0)
    sessions = cluster_sessions(cluster)
    time.sleep(4.0)
    assert python.call(from_island_to_island) == (2, 55.0)
    assert cluster_sessions(cluster) == sessions, "it is the same session, on the same connections"
    # A worker that starts now, and the proxy that connects to it, have valid certificates.
    cluster.worker(0, join_of(cluster)).kill()
    deadline = time.monotonic() + 60
    while True:
        try:
            assert python.call(from_island_to_island) == (2, 55.0)
            break
        except RemoteError:  # lost with the worker
            assert time.monotonic() < deadline
    python.close()


def cluster_sessions(cluster: StandingCluster) -> list[int]:
    report = cluster.report(join_of(cluster))
    return [session["id"] for session in report["sessions"]]


# ---- peers that may not join


def introduced(address: Address, own: Identity, role: str, token: str) -> list[Any]:
    """Return the controller's messages to a peer with this Hello, until it closes the connection or accepts
    the peer.
    """
    connection = BlockingConnection.dial(address, m.Refused | m.Welcome | m.StatusReply, name="it", identity=own)
    connection.send(m.Hello(m.PROTOCOL, role, token, os.getpid(), "0", "hostile"))
    try:
        return list(connection.receive())
    finally:
        connection.close()


@pytest.mark.parametrize("role", ["worker", "engine", "agent"])
def test_a_client_cannot_pose_as_what_belongs_to_the_cluster(
    secured: StandingCluster, client: Identity, role: str
) -> None:
    join = join_of(secured)
    for token in (join.token, read_join(str(host_join_file(secured.directory))).token):
        (refused,) = introduced(join.address, client, role, token)
        assert f"announced itself as a {role}, but its certificate is that of a client" in refused.status.message
    report = secured.report(join)
    assert [island["state"] for island in report["islands"]] == ["ready", "ready"]


def test_a_host_is_no_client_and_no_engine(secured: StandingCluster, host: Identity) -> None:
    join = join_of(secured)
    for role in ("proxy", "operator", "engine"):
        (refused,) = introduced(join.address, host, role, join.token)
        assert "certificate is that of a host" in refused.status.message
    with pytest.raises(AccessError, match=r"is for a client, not for a host"):
        joined(join, Role.HOST, "an impostor")


def test_the_certificate_does_not_stand_for_the_token(secured: StandingCluster, client: Identity) -> None:
    (refused,) = introduced(join_of(secured).address, client, "proxy", "guessed")
    assert "asks for a token" in refused.status.message


def test_without_a_certificate_nobody_gets_beyond_joining(secured: StandingCluster, client: Identity) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=client.certificate.authority.decode())
    client.dialing = bare
    join = join_of(secured)
    assert introduced(join.address, client, "proxy", join.token) == []
    for address in data_addresses(secured):
        with pytest.raises(ConnectionError, match=r"it requires a certificate|closed|reset|Broken"):
            open_data_port(address, client, 1, "secret")


def open_data_port(address: Address, own: Identity, session: int, secret: str) -> None:
    channel = DataChannel.connect(Address(host="127.0.0.1", port=address.port, tls=True), session, secret, own)
    with contextlib.closing(channel):
        channel.receive(lambda *_: None)
    raise ConnectionResetError("closed")


def test_a_client_cannot_open_a_data_port_as_a_host(secured: StandingCluster, client: Identity, host: Identity) -> None:
    def is_closed(own: Identity, address: Address) -> None:
        with pytest.raises(ConnectionError, match="closed"):
            open_data_port(address, own, 0, "guessed")  # no joiner has the secret of the other hosts

    with ThreadPoolExecutor() as pool:  # a host waits for a while for a secret that it does not know yet
        attempts = [pool.submit(is_closed, own, to) for own in (client, host) for to in data_addresses(secured)]
    for each in attempts:
        each.result()
    log = (secured.directory.parent / "log").read_text()
    assert "a client is not a host" in log
    assert "its secret is not the session's" in log


def test_a_script_learns_why_it_may_not(
    secured: StandingCluster, start_cluster: StartCluster, start_python: StartPython
) -> None:
    join = join_of(secured)
    other = JoinToken(join.address, "0" * 64, join.token)
    token = JoinToken(join.address, join.fingerprint, "guessed")
    plain = f"127.0.0.1:{join.address.port}"
    attempts = [
        ({"ATOLL_JOIN": str(other)}, "is not that of the join token"),
        ({"ATOLL_JOIN": str(token)}, "its token is not the cluster's"),
        ({"ATOLL_JOIN": "/nowhere/join"}, "neither a join token"),
        ({"ATOLL_ADDRESS": plain}, "uses TLS, for which this process needs the cluster's join token"),
        ({"ATOLL_ADDRESS": plain, "ATOLL_INSECURE": "1"}, "uses TLS, and this side does not"),
    ]
    for text, (_, words) in zip(start_python().call(refusals, *(each for each, _ in attempts)), attempts, strict=True):
        assert words in text


@pytest.fixture(scope="module")
def in_the_clear(start_cluster: StartCluster) -> StandingCluster:
    """Connect with a token and without TLS."""
    return start_cluster(islands="1x1x1", listen=f"127.0.0.1:{free_port()}", token="a token", platform="null")


def test_a_join_string_for_a_cluster_in_the_clear_says_so(
    in_the_clear: StandingCluster, start_python: StartPython
) -> None:
    join = JoinToken(parse_address(in_the_clear.address).secured(), "0" * 64, "a token")
    (text,) = start_python().call(refusals, {"ATOLL_JOIN": str(join)})
    assert re.search(r"does not use TLS.*--insecure", text)


def test_a_holder_of_the_clients_token_is_no_engine_on_a_cluster_in_the_clear_either(
    in_the_clear: StandingCluster,
) -> None:
    connection = BlockingConnection.dial(parse_address(in_the_clear.address), m.Refused, name="it")
    connection.send(m.Hello(m.PROTOCOL, "engine", "a token", os.getpid(), "0", "hostile"))
    (refused,) = connection.receive()
    connection.close()
    assert "needs the token of this cluster's hosts" in refused.status.message


# ---- attackers


@contextlib.contextmanager
def half_open(ports: list[int], count: int) -> Iterator[list[socket.socket]]:
    """Open connections that never finish their handshake."""
    socks = [socket.create_connection(("127.0.0.1", port), SECONDS) for port in ports for _ in range(count)]
    for number, sock in enumerate(socks):
        sock.sendall((b"", b"\x16\x03\x01\x02\x00\x01")[number % 2])
    yield socks
    for sock in socks:
        sock.close()


def test_handshakes_that_never_end_hold_nobody_up_and_are_closed(
    secured: StandingCluster, start_python: StartPython
) -> None:
    join = join_of(secured)
    ports = [join.address.port, *(address.port for address in data_addresses(secured))]
    threads = sum(each.num_threads() for each in secured.processes().values())
    with half_open(ports, 100) as socks:
        python = start_python(ATOLL_JOIN=str(join))
        assert python.call(from_island_to_island) == (2, 55.0)
        python.close()
        for sock in socks:
            sock.settimeout(SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    deadline = time.monotonic() + SECONDS
    # A worker has more threads after its first computation, but threads for the handshakes would be 128 more.
    while sum(each.num_threads() for each in secured.processes().values()) > threads + 40:
        assert time.monotonic() < deadline, "threads stay"
        time.sleep(0.1)


def test_bytes_that_are_no_tls_end_their_connection_alone(secured: StandingCluster) -> None:
    join = join_of(secured)
    garbage = [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x20\0\0\0" + bytes(32), b"\x16\x03\x01\x00\x05" + bytes(5)]
    for port in (join.address.port, *(address.port for address in data_addresses(secured))):
        for content in garbage:
            with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
                sock.sendall(content)
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(4096):
                        pass
    assert secured.report(join)["islands"][0]["state"] == "ready"


def test_many_join_at_once(secured: StandingCluster) -> None:
    join, found = join_of(secured), []
    threads = [
        threading.Thread(target=lambda: found.append(joined(join, Role.CLIENT, "one of many").role)) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == ["client"] * 20


def test_the_command_that_ends_a_cluster_needs_the_join_string_too(start_cluster: StartCluster) -> None:
    cluster = start_cluster(islands="1x1x1", listen=f"tls://127.0.0.1:{free_port()}", platform="null")
    join = join_of(cluster)
    with pytest.raises(AccessError, match="ATOLL_JOIN"):
        request_stop(join.address, join.token)
    request_stop(join.address, "", join)
    with pytest.raises(ConnectError, match=r"cannot reach|closed the connection"):
        ask_until_it_fails(join)


def ask_until_it_fails(join: JoinToken) -> None:
    for _ in range(200):
        request_report(join.address, "", join)
        time.sleep(0.05)
