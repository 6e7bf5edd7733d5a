"""Peers that misbehave in transfers in chunks: nothing that they say is trusted."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConnectError, FrameError
from atoll.transfers import stream_transfers
from atoll.transfers.channel import MAX_PIECE, DataChannel, Open
from atoll.transfers.liveness import Alive, Probe
from atoll.transfers.socket_engine import SocketEngine, SocketPiece
from atoll.transfers.stream_transfers import (
    CHUNK_BYTES,
    Chunk,
    Credit,
    GivenUp,
    Landed,
    MoreStreams,
    NoRoom,
    ReceiveBuffers,
    StreamPiece,
)
from atoll.transfers.streams import StreamEngine
from tests.transfers.ends import SECONDS, Receiver, content, frame, received, tcp_pair

Raw = tuple[socket.socket, DataChannel]


@pytest.fixture
def tcp_raw() -> Iterator[Raw]:
    """A bare socket, and the channel at its other end."""
    mine, theirs = tcp_pair()
    mine.settimeout(SECONDS)
    channel = DataChannel(theirs)
    yield mine, channel
    mine.close()
    channel.close()


SMALL = 300_000  # one chunk
TWO = CHUNK_BYTES + 5
WHOLE = frame(StreamPiece(1, 2, SMALL, transfer=1))
PARTS = frame(StreamPiece(1, 2, 64 * CHUNK_BYTES, transfer=1, part=1))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(StreamPiece(1, 2, -1, transfer=1)), "a piece of -1 bytes"),
        (frame(StreamPiece(1, 2, MAX_PIECE + 1, transfer=1)), "a piece of"),
        (frame(StreamPiece(1, 2, 0, transfer=1)), "a transfer of 0 bytes"),
        (frame(StreamPiece(1, 2, SMALL, transfer=0)), "announced after"),
        (WHOLE + WHOLE, "announced after"),
        (frame(StreamPiece(1, 2, SMALL, transfer=1, part=-1)), "in parts of -1"),
        (frame(StreamPiece(1, 2, SMALL, transfer=1, part=1 << 40)), "in parts of"),
        (frame(Chunk(1, 0), b"x"), "not known"),
        (WHOLE + frame(Chunk(1, 1), b"x"), "credit for 1 of 1"),
        (WHOLE + frame(Chunk(1, -1), b"x"), "credit for 1 of 1"),
        (
            PARTS + frame(Chunk(1, stream_transfers.WINDOW_PARTS), b"x"),
            f"credit for {stream_transfers.WINDOW_PARTS} of 64",
        ),
        (
            frame(StreamPiece(1, 2, TWO, transfer=1)) + 2 * frame(Chunk(1, 1), b"12345"),
            "arrived twice",
        ),
        (WHOLE + frame(Chunk(1, 0), bytes(SMALL)) + frame(Chunk(1, 0), b""), "not known"),
        (WHOLE + frame(Chunk(1, 0), b"short"), "inside a piece"),
        (frame(Credit(1, 1)), "there is no transfer 1"),
        (frame(Landed(7)), "there is no transfer 7"),
        (frame(NoRoom(1, 8, "")), "there is no transfer 1"),
        (WHOLE + frame(GivenUp(1, 99, "")), "99 is not the code of an error"),
        (WHOLE + frame(GivenUp(1, 0, "")), "0 is not the code of an error"),
    ],
)
def test_a_peer_that_says_what_no_peer_says_ends_the_channel_with_a_named_error(
    tcp_raw: Raw, sent: bytes, reason: str
) -> None:
    error = received(tcp_raw, frame(SocketPiece(1, 1, 2), b"ok"), sent).error
    assert isinstance(error, FrameError)
    assert reason in str(error)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Credit(1, 3), "credit for 3 chunks of a transfer that has 2"),
        (Landed(1), "landed before all of it was sent"),
    ],
)
def test_a_receiver_that_lies_ends_the_channel_and_the_transfer(tcp_raw: Raw, answer: Any, reason: str) -> None:
    mine, channel = tcp_raw
    receiver = Receiver(channel)
    errors: list[BaseException | None] = []
    from atoll.transfers.piece_contents import BufferContents, as_views

    channel.start(1, 2, BufferContents(as_views([content(TWO)])), errors.append)
    mine.sendall(frame(answer))
    error = receiver.join()
    assert isinstance(error, FrameError)
    assert reason in str(error)
    channel.close()
    assert len(errors) == 1
    assert isinstance(errors[0], OSError)


def test_chunks_may_come_in_any_order(tcp_raw: Raw) -> None:
    sent = content(2 * CHUNK_BYTES + 5).tobytes()
    chunks = [frame(Chunk(1, i), sent[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) for i in (2, 0, 1)]
    receiver = received(tcp_raw, frame(StreamPiece(1, 2, len(sent), transfer=1)), *chunks)
    assert receiver.pieces == [(1, 2, sent)]
    assert receiver.error is None


def test_chunks_that_were_on_their_way_when_their_sender_gave_up_go_nowhere(tcp_raw: Raw) -> None:
    mine, channel = tcp_raw
    failed: list[Any] = []
    for each in (
        frame(StreamPiece(1, 2, TWO, transfer=1)),
        frame(GivenUp(1, 15, "gone")),
        frame(Chunk(1, 1), b"12345"),
        frame(SocketPiece(1, 3, 2), b"ok"),
    ):
        mine.sendall(each)
    mine.shutdown(socket.SHUT_WR)
    pieces: list[int] = []
    channel.receive(lambda piece, *_: pieces.append(piece.feed), lambda piece, status: failed.append(status.message))
    assert (pieces, failed) == ([3], ["gone"])


def test_a_peer_that_does_not_read_what_its_transfers_cause_ends_the_channel() -> None:
    class Few(StreamEngine):
        max_delayed = 100

    mine, theirs = tcp_pair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    mine.settimeout(SECONDS)
    channel = DataChannel(theirs, (Few, SocketEngine))
    receiver = Receiver(channel)

    def flood() -> None:
        with contextlib.suppress(OSError):
            for transfer in range(1, 20_000):
                mine.sendall(frame(StreamPiece(1, transfer, 1, transfer=transfer)) + frame(Chunk(transfer, 0), b"x"))
            mine.shutdown(socket.SHUT_WR)

    flooding = threading.Thread(target=flood)
    flooding.start()
    assert receiver.join() is None
    channel.close()
    flooding.join(SECONDS)
    assert len(receiver.pieces) < 10_000
    mine.close()


def test_announcements_cost_no_memory_before_bytes_come(tcp_raw: Raw) -> None:
    mine, channel = tcp_raw
    receiver = Receiver(channel)
    for transfer in range(1, 20):
        mine.sendall(frame(StreamPiece(1, transfer, 1 << 38, transfer=transfer, part=8)))
    mine.sendall(frame(Probe()))
    mine.shutdown(socket.SHUT_WR)
    assert receiver.join() is None


def test_a_transfer_in_parts_costs_no_memory_for_chunks_without_credit() -> None:
    """All transfers of the oldest launch are admitted, and a client can announce many of them with few bytes."""
    buffers = ReceiveBuffers(lambda transfer, chunks: None, CHUNK_BYTES)
    tracemalloc.start()
    try:
        for transfer in range(1, 101):
            buffers.admit(buffers.announce(StreamPiece(1, transfer, MAX_PIECE, transfer=transfer, part=1)))
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("sent", "sends"), [(Alive(3), False), (Chunk(1, 0), True)])
def test_a_stream_that_carries_what_does_not_belong_there_ends_with_its_channel(
    tcp_raw: Raw, sent: Any, sends: bool
) -> None:
    mine, channel = tcp_raw
    theirs, stream_socket = tcp_pair()
    stream = DataChannel(stream_socket)
    theirs.sendall(frame(sent))
    with pytest.raises(FrameError):
        channel.run_stream(stream, sends)
    assert mine.recv(1) == b""
    stream.close()
    theirs.close()


FRAMES = st.one_of(
    st.builds(
        StreamPiece,
        st.just(1),
        st.integers(0, 3),
        st.integers(-1, 3 * CHUNK_BYTES),
        st.booleans(),
        st.integers(0, 3),
        st.integers(-1, 3),
        st.integers(0, 3),
    ),
    st.builds(Chunk, st.integers(-1, 4), st.integers(-1, 4)),
    st.builds(Credit, st.integers(-1, 4), st.integers(-1, 4)),
    st.builds(Landed, st.integers(-1, 4)),
    st.builds(GivenUp, st.integers(-1, 4), st.integers(-1, 20), st.text(max_size=3)),
    st.builds(NoRoom, st.integers(-1, 4), st.integers(-1, 20), st.text(max_size=3)),
    st.builds(MoreStreams),
    st.builds(Probe),
    st.builds(Alive, st.integers(-5, 1 << 60)),
    st.builds(Open, st.just(1), st.text(max_size=3)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FRAMES, st.integers(0, 3)), max_size=8))
def test_any_frames_end_in_pieces_or_a_connect_error(sent: list[tuple[Any, int]]) -> None:
    mine, theirs = tcp_pair()
    channel = DataChannel(theirs)
    try:
        receiver = received((mine, channel), b"".join(frame(each) + bytes(n * 100_000) for each, n in sent))
        assert receiver.error is None or isinstance(receiver.error, ConnectError)
    except OSError:
        pass  # it has closed while we wrote
    finally:
        mine.close()
        channel.close()
