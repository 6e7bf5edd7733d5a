"""Tests of clients that waste the server's time or memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from atoll.grpc import Limits
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS, KEEP, REQUEST, Peer, frame, served
from tests.grpc.serving import Serving

DATA, HEADERS, SETTINGS, PING = frames.DATA, frames.HEADERS, frames.SETTINGS, frames.PING


def test_a_client_that_sends_nothing_is_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Serving({}, path, limits=Limits(handshake_seconds=0.01)), Peer(path, greet=False) as peer:
        assert peer.goaway_code() == ErrorCode.SETTINGS_TIMEOUT


def test_a_header_bomb_ends_the_connection(peer: Peer) -> None:
    # A 4000-byte entry in the compression table, and 1000 references of one byte.
    block = peer.encoder.encode(REQUEST) + b"\x40\x01x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 1000
    peer.send(frame(HEADERS, frames.END_HEADERS, 1, block))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("piece", [b"", bytes(10_000)])
def test_a_flood_of_continuations_ends_the_connection(peer: Peer, piece: bytes) -> None:
    peer.send(frame(HEADERS, 0, 1), *(frame(frames.CONTINUATION, 0, 1, piece) for _ in range(100)))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_flood_of_resets_ends_the_connection(peer: Peer) -> None:
    for number in range(1, 401, 2):
        peer.send(peer.headers(number, KEEP), frames.rst_stream(number, ErrorCode.CANCEL))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("nuisance", [frame(DATA, 0, 1), frame(SETTINGS, 0, 0), frame(99, 0, 1)])
def test_a_flood_of_empty_frames_ends_the_connection(peer: Peer, nuisance: bytes) -> None:
    peer.send(peer.headers(1, KEEP), nuisance * 200)
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_client_that_pings_and_never_reads_is_not_read_from(server: Serving) -> None:
    with Peer(server.path) as peer:
        peer.sync()
        peer.socket.setblocking(False)
        pings = frame(PING, 0, 0, b"12345678") * 10_000
        sent = 0
        try:
            while sent < 256 << 20:
                sent += peer.socket.send(pings)
                server.call(lambda: None)
        except BlockingIOError:
            pass
        assert sent < 64 << 20
        assert server.server.statistics().queued_bytes < 8 << 20
        assert served(server.path)


def test_an_idle_connection_costs_no_descriptor_after_it_is_gone(server: Serving) -> None:
    served(server.path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert served(server.path)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_client_that_reads_again_is_read_from_again(server: Serving) -> None:
    with Peer(server.path) as peer:
        peer.sync()
        peer.socket.setblocking(False)
        pings, sent = frame(PING, 0, 0, b"12345678") * 10_000, 0
        with contextlib.suppress(BlockingIOError):
            while sent < 256 << 20:
                sent += peer.socket.send(pings[sent % 17 :])
                server.call(lambda: None)
        peer.socket.settimeout(DEADLINE_SECONDS)
        missing = sent // 17 * 17  # the reply to a PING has the same length
        while missing:
            missing -= len(peer.socket.recv(min(missing, 1 << 20)))
        peer.send(pings[sent % 17 : 17])
        peer.sync()
