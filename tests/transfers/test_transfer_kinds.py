"""The kinds of transfer: which one a channel chooses, and that a new one is a class and a line."""

from __future__ import annotations

import os
import socket
import zlib

import numpy as np
import pytest

from atoll.errors import FrameError
from atoll.transfers.channel import DataChannel
from atoll.transfers.file_engine import FilePiece
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned
from atoll.transfers.piece_contents import FileContents
from atoll.transfers.shared_memory_engine import SHARED_THRESHOLD, SharedMemoryPiece
from atoll.transfers.socket_engine import SocketEngine
from atoll.transfers.transfer_engine import Contents, Piece, Received, TransferEngine, nothing_to_release
from atoll.transfers.transfer_kinds import KINDS
from tests.transfers.ends import Receiver, content, frame, tcp_pair


def test_frames_of_all_kinds_have_tags_of_their_own() -> None:
    frames = {each for kind in KINDS for each in kind.frames}
    assert len({each.__struct_config__.tag for each in frames}) == len(frames)


def test_the_last_kind_takes_everything() -> None:
    assert KINDS[-1] is SocketEngine


@pytest.mark.parametrize("family", ["unix", "tcp"])
@pytest.mark.parametrize(("nbytes", "is_large"), [(SHARED_THRESHOLD - 1, False), (SHARED_THRESHOLD, True)])
def test_a_channel_chooses_by_where_the_peer_is_and_by_size(family: str, nbytes: int, is_large: bool) -> None:
    a, b = map(DataChannel, socket.socketpair() if family == "unix" else tcp_pair())
    receiver = Receiver(b)
    back = Receiver(a)
    a.send(1, 2, [content(nbytes)])
    assert receiver.wait(1)[0][2] == content(nbytes).tobytes()
    shares_memory = family == "unix" and is_large
    assert (a.statistics().socket_bytes_out < 1000) == shares_memory
    in_chunks = family == "tcp" and is_large
    assert (a.statistics().frames_out > 1) == in_chunks
    a.close()
    assert receiver.join() is None
    back.join()
    b.close()


@pytest.mark.parametrize("piece", [FilePiece(1, 2, 3), SharedMemoryPiece(1, 2, 3)])
def test_a_kind_that_does_not_reach_the_peer_is_refused(piece: Piece) -> None:
    mine, theirs = tcp_pair()
    channel = DataChannel(theirs)
    mine.sendall(frame(piece))
    error = Receiver(channel).join()
    assert isinstance(error, FrameError)
    assert f"takes no frames of type {type(piece).__name__}" in str(error)
    mine.close()
    channel.close()


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_file_reaches_every_peer(family: str) -> None:
    a, b = map(DataChannel, socket.socketpair() if family == "unix" else tcp_pair())
    receiver = Receiver(b)
    descriptor = os.memfd_create("test")
    os.write(descriptor, content(100_000).tobytes() + b"more")
    a.send_contents(1, 2, FileContents(100_000, descriptor))
    os.close(descriptor)
    assert receiver.wait(1)[0][2] == content(100_000).tobytes()
    assert (a.statistics().socket_bytes_out < 1000) == (family == "unix")
    a.close()
    receiver.join()
    b.close()


class CompressedPiece(Piece, frozen=True, array_like=True, tag="of this test"):
    compressed: int = 0


class CompressingEngine(TransferEngine):
    frames = (CompressedPiece,)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket

    def takes(self, contents: Contents) -> bool:
        return contents.nbytes > 10_000

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        data = zlib.compress(b"".join(contents.views()))
        self._socket.send(CompressedPiece(session, feed, contents.nbytes, more, len(data)), (memoryview(data),))

    def handle(self, frame: CompressedPiece, descriptor: int | None) -> Received:
        data = aligned(frame.compressed)
        self._socket.read_into(data.data)
        return np.frombuffer(zlib.decompress(data), np.uint8), nothing_to_release


def test_a_new_kind_is_a_class_and_its_place_among_the_others() -> None:
    kinds = (CompressingEngine, *KINDS)
    a, b = (DataChannel(sock, kinds) for sock in tcp_pair())
    receiver = Receiver(b)
    a.send(1, 2, [np.zeros(1_000_000, np.uint8)])
    a.send(1, 3, [b"small"])
    assert [(feed, len(body)) for _, feed, body in receiver.wait(2)] == [(2, 1_000_000), (3, 5)]
    assert receiver.pieces[0][2] == bytes(1_000_000)
    assert a.statistics().socket_bytes_out < 10_000
    a.close()
    receiver.join()
    b.close()
