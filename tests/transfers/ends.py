"""Both ends of data channels, and what a test sends through them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.transfers.channel import DataChannel
from atoll.transfers.shared_memory_engine import SharedMemoryEngine
from atoll.transfers.transfer_engine import Piece, TransferEngine
from atoll.transfers.transfer_kinds import KINDS

SECONDS = 60.0
Ends = tuple[DataChannel, DataChannel]


Kinds = tuple[type[TransferEngine], ...]


def kinds_with(**attributes: Any) -> Kinds:
    """Return the kinds of transfer, with other limits for shared memory."""
    changed = type("SharedMemoryEngine", (SharedMemoryEngine,), attributes)
    return tuple(changed if kind is SharedMemoryEngine else kind for kind in KINDS)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


class Receiver:
    """Reads a channel on a thread to its end."""

    def __init__(self, channel: DataChannel, recycle: bool = True) -> None:
        self.channel = channel
        self.recycle = recycle
        self.pieces: list[tuple[int, int, bytes]] = []
        self.more: list[bool] = []
        self.held: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.channel.receive(self._take)
        except Exception as error:
            self.error = error.with_traceback(None)  # or its frames keep what they held

    def _take(self, piece: Piece, content: Any, done: Callable[[], None]) -> None:
        with self._changed:
            self.pieces.append((piece.session, piece.feed, bytes(content)))
            self.more.append(piece.more)
            if self.recycle:
                done()
            else:
                self.held.append(done)
            self._changed.notify()

    def wait(self, count: int) -> list[tuple[int, int, bytes]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pieces) >= count, SECONDS)
            return self.pieces

    def join(self) -> BaseException | None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.error


def sealed(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """A descriptor of shared memory with these seals."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def received(raw: tuple[socket.socket, DataChannel], *frames: bytes) -> Receiver:
    """A receiver of what a peer sends that then closes the connection."""
    mine, channel = raw
    for each in frames:
        mine.sendall(each)
    mine.shutdown(socket.SHUT_WR)
    receiver = Receiver(channel)
    receiver.join()
    return receiver


def frame(message: Any, payload: bytes = b"") -> bytes:
    header = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(header)) + header + payload


def is_closed(sock: socket.socket) -> bool:
    """True once the other side has closed."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def streams_of(channel: DataChannel) -> int:
    """Return the number of streams on which a channel sends now."""
    return int(channel.statistics().engines["StreamEngine"].streams)
