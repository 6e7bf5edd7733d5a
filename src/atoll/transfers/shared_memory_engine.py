"""Transfers through shared memory, for large pieces on one machine.

The sender writes a piece into a block of its pool. The first use of a block passes its descriptor along the unix
socket, later ones its number alone; the receiver returns the block when it has read it. A pool that has not been needed
for a few seconds is freed, and the receiver unmaps its blocks.

The receiver maps what a peer can still write, but never what a peer can shorten: who touches a mapping whose file was
shortened is ended by SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from functools import partial

import msgspec

from atoll.errors import FrameError
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.shared_memory_pool import (
    LEAST_BLOCK_BYTES,
    POOL_BYTES,
    PoolStatistics,
    SharedMemoryBlock,
    SharedMemoryPool,
)
from atoll.transfers.transfer_engine import Contents, Piece, Received, TransferEngine

# Smaller pieces are cheaper to copy through the socket.
SHARED_THRESHOLD = 256 * 1024
_IDLE_SECONDS = 5
_MAX_PEER_BLOCKS = POOL_BYTES // LEAST_BLOCK_BYTES


class SharedMemoryPiece(Piece, frozen=True, array_like=True, tag="s"):
    """The bytes are at the start of the sender's block of this number, whose descriptor comes with its first use."""

    block: int = 0
    block_bytes: int = 0


class BlockReturned(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The receiver has read a block of the sender's pool."""

    block: int


class BlockDropped(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A block of the sender's pool exists no more; its number is not used again."""

    block: int


class SharedMemoryEngine(TransferEngine):
    """Sends through a pool of its own, and maps the blocks of the peer's."""

    frames = (SharedMemoryPiece, BlockReturned, BlockDropped)

    pool_bytes: int | None = None  # `POOL_BYTES`
    held_session = -1  # the receiver has asked for this session's pieces, and keeps them in their blocks

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._pool = SharedMemoryPool(self._announce_drop, self.pool_bytes)
        self._peer_blocks: dict[int, mmap.mmap] = {}
        self._wakes = False  # the receiving thread, to trim the pool

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return socket.is_unix

    # ---- sending

    def takes(self, contents: Contents) -> bool:
        return contents.nbytes >= SHARED_THRESHOLD

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        nbytes = contents.nbytes
        block = self._pool.take(nbytes, session == self.held_session)
        was_announced = block.is_announced
        try:
            with memoryview(block.memory)[:nbytes] as target:
                contents.write_into(target)
            block.is_announced = True  # before it is sent: from then on the peer may return it, and others take it
            piece = SharedMemoryPiece(session, feed, nbytes, more, block.number, block.size)
            self._socket.send(piece, (), None if was_announced else block.descriptor)
        except BaseException:  # the peer has not got it
            block.is_announced = was_announced
            self._pool.give_back(block.number)
            raise

    def _announce_drop(self, block: SharedMemoryBlock) -> None:
        if block.is_announced:
            with contextlib.suppress(OSError):  # the channel has ended, and its receiver with it
                self._socket.send(BlockDropped(block.number))

    # ---- receiving

    def handle(
        self, frame: SharedMemoryPiece | BlockReturned | BlockDropped, descriptor: int | None
    ) -> Received | None:
        if isinstance(frame, BlockReturned):
            self._pool.give_back(frame.block)
            if not self._wakes:
                self._wakes = True
                self._socket.wake_after(_IDLE_SECONDS)
            return None
        if isinstance(frame, BlockDropped):
            self._peer_blocks.pop(frame.block, None)
            return None
        if descriptor is not None:
            self._peer_blocks[frame.block] = map_block(descriptor, frame.block_bytes)
            if len(self._peer_blocks) > _MAX_PEER_BLOCKS:
                raise FrameError(f"more than {_MAX_PEER_BLOCKS} blocks of shared memory")
        memory = self._peer_blocks.get(frame.block)
        if memory is None or frame.nbytes > len(memory):
            raise FrameError(f"block {frame.block} is not known, or too small")
        number = frame.block

        return memoryview(memory)[: frame.nbytes], partial(self._return, number)

    def _return(self, number: int) -> None:
        """Gives a block back. It does not block: its caller may be the thread that serves all sessions."""
        with contextlib.suppress(OSError):
            if not self._socket.send_nowait(BlockReturned(number)):
                # The peer does not read, or a large piece is on its way. There are no more such threads than blocks.
                threading.Thread(target=self._return_later, args=(number,), name="atoll-return", daemon=True).start()

    def _return_later(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(BlockReturned(number))

    # ---- the end of memory

    def trim(self) -> None:
        self._pool.trim()
        self._wakes = False
        self._socket.wake_after(0)

    def statistics(self) -> PoolStatistics:
        return self._pool.statistics()

    def close(self) -> None:
        self._pool.close()
        self._peer_blocks.clear()  # those that are being read are kept by their readers


def map_block(descriptor: int, nbytes: int) -> mmap.mmap:
    """A peer's block, to be read. Raises FrameError where the peer could still shorten it."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # a file of another kind
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise FrameError("a block of shared memory must be a memfd that is sealed against shrinking")
    if not 0 < nbytes <= os.fstat(descriptor).st_size:
        raise FrameError("a block of shared memory is shorter than announced")
    try:
        return mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise FrameError(f"a block of shared memory cannot be mapped: {error}") from None
