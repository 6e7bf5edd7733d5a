"""Blocking connections over socket pairs."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec
import pytest

from atoll.errors import FrameError
from atoll.wire.blocking import BlockingConnection
from atoll.wire.framing import encode, piece_header


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    text: str


def test_messages_of_several_threads_arrive_whole_and_each_threads_in_order() -> None:
    ends = [BlockingConnection(sock, Note) for sock in socket.socketpair()]

    def send(name: str) -> None:
        for i in range(50):
            ends[0].send(Note(f"{name} {i}"), Note(name * 3000))

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    received = ends[1].receive()
    texts = [next(received).text for _ in range(200)]
    for thread in threads:
        thread.join(5)
    for name in "ab":
        own = [text for text in texts if text.startswith(name)]
        assert own == [text for i in range(50) for text in (f"{name} {i}", name * 3000)]
    ends[0].close()
    assert list(received) == []
    ends[0].send(Note("to nobody"))  # no error: the receiver learns of it
    ends[1].close()


def test_a_message_in_pieces_is_received_behind_those_that_overtake_it() -> None:
    mine, theirs = socket.socketpair()
    connection = BlockingConnection(theirs, Note, name="the worker")
    body = msgspec.msgpack.encode(Note("large"))
    mine.sendall(
        piece_header(3, False) + body[:3] + encode(Note("small")) + piece_header(len(body) - 3, True) + body[3:]
    )
    received = connection.receive()
    assert [next(received), next(received)] == [Note("small"), Note("large")]
    connection.close()
    mine.close()


def test_a_peer_that_sends_no_message_is_named() -> None:
    mine, theirs = socket.socketpair()
    connection = BlockingConnection(theirs, Note, name="the worker")
    body = msgspec.msgpack.encode(Note("first"))
    mine.sendall(struct.pack("<I", len(body)) + body + b"\xff\xff\xff\xff")
    received = connection.receive()
    assert next(received) == Note("first")
    with pytest.raises(FrameError, match="the worker sent invalid data: a piece of 1073741823 bytes"):
        next(received)
    connection.close()
    mine.close()
