"""Tests of hostile bytes and messages at the controller's socket and a worker's data port: only their
connection ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import msgspec
import pytest

from atoll.ir.program import Call, HostBuffer, HostToDevice, Mapping, Program, Rearrange
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.transfers.channel import Open
from atoll.transfers.file_engine import FilePiece
from atoll.transfers.shared_memory_engine import SharedMemoryPiece
from atoll.transfers.socket_engine import SocketPiece
from atoll.transfers.stream_transfers import GivenUp, StreamPiece
from tests.end_to_end.hostile.honest_work import honest_work
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.standing_cluster import StandingCluster

CLOSED_SECONDS = 300.0


def connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CLOSED_SECONDS)
    sock.connect(address.removeprefix("unix:"))
    return sock


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def assert_closed(sock: socket.socket) -> bytes:
    """Return the bytes received before the other side closed the connection. Raise TimeoutError if it stays open."""
    received = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += part
    return received


def hello(role: str, protocol: int = m.PROTOCOL) -> bytes:
    return frame(m.Hello(protocol, role, "", os.getpid(), "0", "hostile"))


GARBAGE = {
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a frame that is too long": b"\xff\xff\xff\x7f",
    "no msgpack": (8).to_bytes(4, "little") + b"\xc1" * 8,
    "no message": frame([999, 1, 2]),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_controllers_socket_closes_it(cluster: StandingCluster, name: str) -> None:
    sock = connected(cluster.address)
    sock.sendall(GARBAGE[name])
    assert_closed(sock)


def test_the_controller_requires_a_valid_greeting(cluster: StandingCluster) -> None:
    for first, words in [
        (frame(m.StopRequest()), b"first message"),
        (hello("proxy", 999), b"speaks protocol"),
        (hello("nobody") + frame(m.StopRequest()), b"unknown role 'nobody'"),
        (hello("worker") + frame(m.StopRequest()), b"StopRequest"),
    ]:
        sock = connected(cluster.address)
        sock.sendall(first)
        assert words in assert_closed(sock)


def test_no_other_process_is_accepted_as_a_worker(cluster: StandingCluster) -> None:
    for host in (0, 7, -1):
        sock = connected(cluster.address)
        devices = tuple(m.DeviceInfo(i, "null", "cpu", ("device",), "device", (i, 0, 0), 0, i, 0) for i in range(4))
        ready = m.WorkerReady(0, host, devices, "cpu", "", "unix:/nowhere", 24)
        sock.sendall(hello("worker") + frame(ready))
        assert f"host {host} of 1x1x4 is not expected".encode() in assert_closed(sock)
    assert cluster.report()["islands"][0]["hosts"][0]["state"] == "ready"


ARRAY = ArraySpec("float32", (4,), Sharding((0,)))
CONTROL: dict[str, list[Any]] = {
    "a launch of nothing": [m.Launch(5, (1,), (2,), ())],
    "a worker's message": [m.Done(((1, 2, 3),))],
    "a second greeting": [m.Hello(m.PROTOCOL, "worker", "", 1, "0")],
    "a question of no device": [m.Query(1, m.QueryKind.LAYOUT, -5, -1, b"")],
    "a question of no kind": [m.Query(1, "nonsense", 0, -1, b"")],
    "memory of no device": [m.Query(1, m.QueryKind.MEMORY, -5, -1, b"")],
    "a layout of garbage": [m.Query(1, m.QueryKind.LAYOUT, 0, -1, b"\xc1")],
    "a function of no devices": [m.RegisterFunction(1, "x", 1, ())],
    "a function of no such device": [m.RegisterFunction(1, "x", 1, ((99,),))],
    "a program that returns an argument": [m.RegisterProgram(1, Program("p", (ARRAY,), (), (0,)))],
    "a program with a cycle": [
        m.RegisterProgram(1, Program("p", (ARRAY,), (Call(1, (1,), (ARRAY,), (0,)),), (1,))),
        m.Launch(1, (1,), (2,), ()),
    ],
    "a program of very many shards": [
        m.RegisterProgram(
            1,
            Program(
                "p",
                (ARRAY,),
                (Rearrange((0,), (ARRAY,), (Mapping(0, 0, (-(1 << 63), (1 << 63) - 1, 1), (0, 1 << 62, 1)),)),),
                (1,),
            ),
        )
    ],
    "a result twice": [m.MakeError((5, 5), m.Status(3, "x")), m.Release((5, 5, 5))],
    "a function released twice": [m.ReleaseFunction(1), m.ReleaseFunction(1), m.ReleaseProgram(3)],
}


@pytest.mark.parametrize("name", CONTROL)
def test_a_hostile_proxy_harms_itself_alone(cluster: StandingCluster, name: str) -> None:
    with connected(cluster.address) as sock:
        sock.sendall(hello("proxy") + b"".join(frame(message) for message in CONTROL[name]))
        sock.shutdown(socket.SHUT_WR)
        assert_closed(sock)
    cluster.until(lambda report: all(s["label"] != "hostile" for s in report["sessions"]), 10)


def data_port(cluster: StandingCluster) -> str:
    return f"unix:{cluster.directory}/data-0.sock"


def welcome(sock: socket.socket) -> m.Welcome:
    sock.sendall(hello("proxy"))
    length = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    message = msgspec.msgpack.decode(sock.recv(length, socket.MSG_WAITALL), type=m.ToProxy)
    assert isinstance(message, m.Welcome)
    return message


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_data_port_closes_it(cluster: StandingCluster, name: str) -> None:
    sock = connected(data_port(cluster))
    sock.sendall(GARBAGE[name])
    sock.shutdown(socket.SHUT_WR)
    assert_closed(sock)


def test_the_data_port_requires_the_sessions_secret(cluster: StandingCluster) -> None:
    with connected(cluster.address) as control:
        session = welcome(control)
        for first in (Open(session.session, "wrong"), Open(session.session, "wröng"), Open(0, ""), Open(0, "x")):
            sock = connected(data_port(cluster))
            sock.sendall(frame(first))
            assert_closed(sock)
        sock = connected(data_port(cluster))
        sock.sendall(frame(SocketPiece(session.session, 1, 4)) + b"1234")
        assert_closed(sock)


PIECES: dict[str, bytes] = {
    "a piece of negative size": frame(SocketPiece(1, 1, -5)),
    "a piece of endless size": frame(SocketPiece(1, 1, 1 << 39)),
    "a block that is not known": frame(SharedMemoryPiece(1, 1, 5, False, 77, 100)),
    "a file that does not come along": frame(FilePiece(1, 1, 5)),
    "a second opening": frame(Open(1, "x")),
    **GARBAGE,
}


@pytest.mark.parametrize("name", PIECES)
def test_a_hostile_data_channel_is_closed(cluster: StandingCluster, name: str) -> None:
    with connected(cluster.address) as control:
        session = welcome(control)
        sock = connected(data_port(cluster))
        sock.sendall(frame(Open(session.session, session.secret)) + PIECES[name])
        sock.shutdown(socket.SHUT_WR)
        assert_closed(sock)


def test_a_sender_that_gives_up_without_an_error_ends_its_own_channel(
    cluster: StandingCluster, neighbour: RemotePython
) -> None:
    """The controller would expel a worker that reports a failed launch with the status OK."""

    def restarts() -> int:
        count: int = cluster.report()["islands"][0]["restarts"]
        return count

    before, nbytes = restarts(), 1 << 20
    array = ArraySpec("uint8", (nbytes,), Sharding((0,)))
    put = HostToDevice((HostBuffer(0, (nbytes,), None, None),), (array,))
    with connected(cluster.address) as control:
        session = welcome(control)
        nameless = Program("", (), (put,), (0,), 1)
        control.sendall(frame(m.RegisterProgram(1, nameless)) + frame(m.Launch(1, (), (1,), (5,))))
        sock = connected(data_port(cluster))
        piece = StreamPiece(session.session, 5, nbytes, transfer=1)
        sock.sendall(frame(Open(session.session, session.secret)) + frame(piece) + frame(GivenUp(1, 0, "")))
        assert_closed(sock)
    assert neighbour.call(honest_work) == [0, 2, 4, 6]
    assert restarts() == before


def test_a_connection_that_sends_half_a_message_and_no_more_is_closed(cluster: StandingCluster) -> None:
    halves = [
        (cluster.address, hello("proxy")[:-3]),
        (cluster.address, b""),
        (data_port(cluster), frame(Open(1, "x"))[:-3]),
        (data_port(cluster), b"\x10"),
        (data_port(cluster), frame(Open(1 << 40, "a session that never opens"))),
    ]
    socks = []
    for address, half in halves:
        socks.append(connected(address))
        socks[-1].sendall(half)
    for sock in socks:
        assert_closed(sock)
