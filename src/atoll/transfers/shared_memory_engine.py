"""Transfers of large pieces through shared memory, on one machine.

The sender writes a piece into a block of its pool. The first use of a block passes its descriptor along the unix
socket, later uses only its number. The receiver returns the block once it has read the piece. A pool that has not been
used for a few seconds is freed, and the receiver unmaps its blocks.

The receiver maps only blocks that the peer cannot shorten, because access to a mapping of a shortened file raises
SIGBUS. The peer can still write to a block.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from atoll.cluster.processes.machine_memory import physical_memory
from atoll.errors import FrameError
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.shared_memory_pool import (
    MIN_BLOCK_BYTES,
    POOL_BYTES,
    USUAL_LIMITS,
    PoolStatistics,
    SharedMemoryBlock,
    SharedMemoryPool,
)
from atoll.transfers.transfer_engine import Contents, Group, Piece, Received, TransferEngine

# Smaller pieces are cheaper to copy through the socket.
SHARED_THRESHOLD = 256 * 1024


class SharedMemoryPiece(Piece, frozen=True, array_like=True, tag="s"):
    """The piece is at the start of a block of the sender. The first use of a block passes its descriptor."""

    block: int = 0
    block_bytes: int = 0
    group: Group = ()


class BlockReturned(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The receiver has read a block of the sender's pool, and returns it."""

    block: int


class BlockDropped(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A block of the sender's pool was freed. Its number is never used again."""

    block: int


class SharedMemoryEngine(TransferEngine):
    """Sends pieces through its pool, and maps the blocks of the peer's pool."""

    frames = (SharedMemoryPiece, BlockReturned, BlockDropped)

    limits = USUAL_LIMITS
    max_peer_blocks = POOL_BYTES // MIN_BLOCK_BYTES
    # A block is less than twice as large as its first piece, which is in this machine's memory. The blocks of untrusted
    # peers need no memory while nobody writes to them, but they use addresses of this process.
    max_peer_bytes = 2 * (physical_memory() + POOL_BYTES)
    idle_seconds = 5  # after which unused blocks are freed
    held_session = -1  # the receiver requests this session's pieces, and keeps them in their blocks

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._pool = SharedMemoryPool(self._announce_drop, self.limits)
        self._peer_blocks: dict[int, mmap.mmap] = {}
        self._being_read: set[int] = set()  # those of them that were not returned yet
        self._wakes = False  # whether the receiving thread wakes to trim the pool

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return socket.is_unix

    # ---- sending

    def takes(self, contents: Contents) -> bool:
        return contents.nbytes >= SHARED_THRESHOLD

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        nbytes = contents.nbytes
        block = self._pool.take(nbytes, session == self.held_session)
        was_announced, descriptor = block.is_announced, None
        try:
            with block.view()[:nbytes] as target:
                contents.write_into(target)
            if not was_announced:
                descriptor = block.announce()
            piece = SharedMemoryPiece(session, feed, nbytes, more, block.number, block.size, contents.group)
            self._socket.send(piece, (), descriptor)
        except BaseException:  # the peer has not received the block
            block.is_announced = was_announced
            self._pool.give_back(block.number)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _announce_drop(self, block: SharedMemoryBlock) -> None:
        if block.is_announced:
            with contextlib.suppress(OSError):  # the channel has ended
                self._socket.send(BlockDropped(block.number))

    # ---- receiving

    def handle(
        self, frame: SharedMemoryPiece | BlockReturned | BlockDropped, descriptor: int | None
    ) -> Received | None:
        if isinstance(frame, BlockReturned):
            self._pool.returned(frame.block)
            if not self._wakes:
                self._wakes = True
                self._socket.wake_after(self.idle_seconds)
            return None
        number = frame.block
        if number in self._being_read:
            raise FrameError(f"block {number} of shared memory is used again before it was returned")
        if isinstance(frame, BlockDropped):
            self._peer_blocks.pop(number, None)
            return None
        if descriptor is not None:
            self._map(number, descriptor, frame.block_bytes)
        memory = self._peer_blocks.get(number)
        if memory is None or frame.nbytes > len(memory):
            raise FrameError(f"block {number} is not known, or too small")
        self._being_read.add(number)
        return memoryview(memory)[: frame.nbytes], partial(self._return, number)

    def _map(self, number: int, descriptor: int, nbytes: int) -> None:
        """Map a block of the peer. Raise FrameError if the peer uses too much."""
        self._peer_blocks[number] = map_block(descriptor, nbytes)
        if len(self._peer_blocks) > self.max_peer_blocks:
            raise FrameError(f"the peer uses more than {self.max_peer_blocks} blocks of shared memory")
        if sum(map(len, self._peer_blocks.values())) > self.max_peer_bytes:
            raise FrameError(f"the peer uses more than {self.max_peer_bytes} bytes of shared memory")

    def _return(self, number: int) -> None:
        """Return a block to the peer without waiting, because the thread may be one that serves all sessions."""
        done = partial(self._being_read.discard, number)
        with contextlib.suppress(OSError):
            if not self._socket.send_nowait(BlockReturned(number), done):
                # The peer does not read, or a large piece is being sent. There is at most one such thread per block.
                later = partial(self._return_later, number, done)
                threading.Thread(target=later, name="atoll-return", daemon=True).start()

    def _return_later(self, number: int, done: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(BlockReturned(number), note=done)

    # ---- the end of memory

    def trim(self) -> None:
        self._pool.trim()
        self._wakes = False
        self._socket.wake_after(0)

    def statistics(self) -> PoolStatistics:
        return self._pool.statistics()

    def close(self) -> None:
        self._pool.close()
        self._peer_blocks.clear()  # readers hold the blocks that are being read


def map_block(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a peer's block for reading. Raise FrameError if the peer can still shorten it."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise FrameError("a block of shared memory must be a memfd that is sealed against shrinking")
    if not 0 < nbytes <= os.fstat(descriptor).st_size:
        raise FrameError("a block of shared memory is shorter than announced")
    try:
        return mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise FrameError(f"a block of shared memory cannot be mapped: {error}") from None
