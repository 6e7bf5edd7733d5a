"""Tests of flow-control windows in both directions, of streams and of connections."""

from __future__ import annotations

from pathlib import Path

from atoll.grpc import Call, Limits
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode, Setting
from tests.grpc.http2.http2_peer import KEEP, WINDOW, Peer, frame, message, request
from tests.grpc.serving import Serving, echo

DATA, HEADERS, SETTINGS, PING = frames.DATA, frames.HEADERS, frames.SETTINGS, frames.PING


def test_a_window_update_of_zero_resets_the_stream(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR


def test_a_stream_window_above_its_maximum_resets_the_stream(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frames.window_update(1, 2**31 - 1))
    assert peer.reset_code(1) == ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_the_stream_window_resets_the_stream(server: Serving, peer: Peer, calls: list[Call]) -> None:
    peer.send(peer.headers(1, KEEP))
    peer.sync()
    server.call(calls[-1].pause)
    peer.send(frame(DATA, 0, 1, bytes(WINDOW - 5)))
    assert not [got for got in peer.sync() if got[0] in (frames.RST_STREAM, frames.WINDOW_UPDATE) and got[2]]
    peer.send(frame(DATA, 0, 1, bytes(6)))
    assert peer.reset_code(1) == ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_the_connection_window_ends_the_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    limits = Limits(connection_window_bytes=70_000, stream_window_bytes=1 << 20)
    with Serving({"/test.Test/Echo": echo}, path, limits=limits), Peer(path) as peer:
        peer.send(peer.headers(1), frame(DATA, 0, 1, bytes(70_001)))
        assert peer.goaway_code() == ErrorCode.FLOW_CONTROL_ERROR


def test_windows_are_granted_anew_as_messages_are_taken(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP))
    for _ in range(20):
        peer.send(frame(DATA, 0, 1, message(bytes(WINDOW // 2 - 5))))
        assert peer.read_until(frames.WINDOW_UPDATE, 1)


def test_within_a_message_a_client_is_given_more_than_the_window(tmp_path: Path) -> None:
    path, size, ahead, within = str(tmp_path / "s"), 900_000, 10_000, 300_000
    limits = Limits(stream_window_bytes=ahead, message_window_bytes=within)
    seen: list[int] = []

    def keep(call: Call) -> None:
        call.set_handlers(lambda content: seen.append(len(content)))

    with Serving({"/test.Test/Keep": keep}, path, limits=limits), Peer(path) as peer:
        peer.send(peer.headers(1, request("/test.Test/Keep")))
        left, window, most = message(bytes(size)), ahead, 0
        while left:
            part, left = left[:window], left[window:]
            window -= len(part)
            peer.send(frame(DATA, 0, 1, part))
            if left:
                window += int.from_bytes(peer.read_until(frames.WINDOW_UPDATE, 1)[3], "big")
                most = max(most, window)
        assert within < most <= ahead + within
        granted = [got for got in peer.sync() if got[0] == frames.WINDOW_UPDATE and got[2] == 1]
        window += sum(int.from_bytes(got[3], "big") for got in granted)
        assert window <= ahead, "what comes after it is as little ahead as before"
        assert seen == [size]


def test_data_on_a_reset_stream_still_counts_for_the_connection_window(peer: Peer) -> None:
    peer.send(peer.headers(1), frames.rst_stream(1, ErrorCode.CANCEL))
    peer.sync()
    for _ in range(4):
        peer.send(frame(DATA, 0, 1, bytes(WINDOW)))
        assert peer.read_until(frames.WINDOW_UPDATE, 0)


def test_nothing_is_sent_beyond_the_stream_window(peer: Peer) -> None:
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 10)]))
    peer.send(peer.headers(1), frame(DATA, frames.END_STREAM, 1, message(b"x" * 20)))
    assert sum(len(got[3]) for got in peer.sync() if got[0] == DATA) == 10
    peer.send(frames.window_update(1, 5))
    assert len(peer.read_until(DATA)[3]) == 5
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 100)]))
    assert len(peer.read_until(DATA)[3]) == 10
    assert peer.trailers(1)["grpc-status"] == "0"


def test_a_stream_window_may_become_negative(peer: Peer) -> None:
    peer.send(peer.headers(1), frame(DATA, 0, 1, message(b"x" * 95)))
    peer.body(1, 100)
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 50)]))
    peer.send(frames.window_update(1, 40), frame(DATA, 0, 1, message(b"y")))
    assert not [got for got in peer.sync() if got[0] == DATA]
    peer.send(frames.window_update(1, 20))
    assert peer.body(1, 6) == message(b"y")


def test_nothing_is_sent_beyond_the_connection_window(peer: Peer) -> None:
    content = message(bytes(40_000))
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 2**31 - 1)]))
    for number in (1, 3):
        peer.send(peer.headers(number), frame(DATA, frames.END_STREAM, number, content))
    sent = 0
    while sent < frames.DEFAULT_WINDOW:
        sent += len(peer.read_until(DATA)[3])
    assert not [got for got in peer.sync() if got[0] == DATA]
    peer.send(frames.window_update(0, 100_000))
    while sent < 2 * len(content):
        sent += len(peer.read_until(DATA)[3])
    assert sent == 2 * len(content)


def test_frames_obey_the_peers_maximum_size(peer: Peer) -> None:
    peer.send(frames.settings_frame([(Setting.MAX_FRAME_SIZE, 20_000)]))
    peer.send(peer.headers(1), frame(DATA, frames.END_STREAM, 1, message(bytes(50_000))))
    sizes = []
    while sum(sizes) < 50_005:
        sizes.append(len(peer.read_until(DATA)[3]))
    assert max(sizes) <= 20_000


def test_settings_that_raise_a_stream_window_above_its_maximum_end_the_connection(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frames.window_update(1, 2**31 - 1 - frames.DEFAULT_WINDOW))
    peer.sync()
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, frames.DEFAULT_WINDOW + 1)]))
    assert peer.goaway_code() == ErrorCode.FLOW_CONTROL_ERROR


def test_a_window_is_granted_while_the_reply_waits_for_the_other(peer: Peer) -> None:
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 0)]), peer.headers(1))
    peer.send(frame(DATA, frames.END_STREAM, 1, message(b"waits")))
    assert not [got for got in peer.sync() if got[0] == DATA]
    for byte in message(b"waits"):
        peer.send(frames.window_update(1, 1))
        assert peer.read_until(DATA, 1)[3] == bytes([byte])
    assert peer.trailers(1)["grpc-status"] == "0"
