"""Large transfers between hosts of one machine, in chunks through a few blocks of shared memory.

A transfer is announced, credited and confirmed as between machines (`transfers.streams`). The sender writes each chunk
into a block, and the receiver copies it to its final memory and returns the block. So an array of any size needs only
`CHUNKS_BYTES` of additional memory. A receiver that needs a whole piece before it can read any of it never holds the
blocks that the rest of the piece needs.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.errors import FrameError
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import copy
from atoll.transfers.piece_contents import BufferContents
from atoll.transfers.shared_memory_engine import map_block
from atoll.transfers.shared_memory_pool import PoolLimits, SharedMemoryPool
from atoll.transfers.stream_transfers import Outgoing
from atoll.transfers.streams import STREAM_THRESHOLD, StreamEngine, StreamStatistics
from atoll.transfers.transfer_engine import Contents, Received

# Smaller pieces are sent whole, and the receiver reads them in place.
CHUNKED_THRESHOLD = 16 << 20
# If the receiver reads at least this many bytes together, smaller pieces are sent in chunks as well, because they would
# otherwise occupy blocks until all of them have arrived.
CHUNKED_TOGETHER = 64 << 20
CHUNKS_BYTES = 16 << 20
# The two messages per chunk take as long as copying half a MiB.
SHARED_CHUNK_BYTES = 4 << 20


class SharedChunk(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """Announces a chunk in a block of the sender. The first use of a block passes its descriptor."""

    transfer: int
    index: int
    block: int


class ChunkRead(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The receiver has copied the chunk out of a block of the sender."""

    block: int


class SharedChunksEngine(StreamEngine):
    """Sends chunks through shared memory, and all frames on the channel's own connection."""

    frames = (*StreamEngine.frames, SharedChunk, ChunkRead)
    chunk_bytes = SHARED_CHUNK_BYTES

    def __init__(self, socket: FrameSocket) -> None:
        super().__init__(socket)
        self._pool = SharedMemoryPool(lambda block: None, PoolLimits(CHUNKS_BYTES))
        self._peer_blocks: dict[int, mmap.mmap] = {}

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return socket.is_unix

    def takes(self, contents: Contents) -> bool:
        threshold = STREAM_THRESHOLD if contents.together >= CHUNKED_TOGETHER else CHUNKED_THRESHOLD
        return contents.nbytes >= threshold

    def _want_streams(self) -> None:
        with self._lock:
            self._start_writers()

    def _send_chunk(self, stream: FrameSocket, transfer: Outgoing, index: int, views: Any) -> None:
        block = self._pool.take(SHARED_CHUNK_BYTES)
        was_announced, descriptor = block.is_announced, None
        try:
            with block.view() as memory:
                BufferContents(views).write_into(memory)
            if not was_announced:
                descriptor = block.announce()
            stream.send(SharedChunk(transfer.number, index, block.number), (), descriptor)
        except BaseException:
            block.is_announced = was_announced
            self._pool.give_back(block.number)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def handle(self, frame: Any, descriptor: int | None) -> Received | None:
        match frame:
            case SharedChunk():
                self._take_chunk(frame, descriptor)
            case ChunkRead(block):
                self._pool.returned(block)
            case _:
                return super().handle(frame, descriptor)
        return None

    def _take_chunk(self, chunk: SharedChunk, descriptor: int | None) -> None:
        if descriptor is not None:
            self._peer_blocks[chunk.block] = map_block(descriptor, SHARED_CHUNK_BYTES)
            if len(self._peer_blocks) > CHUNKS_BYTES // SHARED_CHUNK_BYTES:
                raise FrameError("the peer uses more blocks of shared memory than chunks may be under way")
        memory = self._peer_blocks.get(chunk.block)
        if memory is None:
            raise FrameError(f"block {chunk.block} is not known")
        buffer, target = self._receive_buffers.target(chunk.transfer, chunk.index)
        with memoryview(memory) as view:
            copy(view[: target.nbytes], target)
        self._send_nowait(ChunkRead(chunk.block))
        self._chunk_landed(buffer, chunk.index)

    def statistics(self) -> StreamStatistics:
        return replace(super().statistics(), pool_bytes=self._pool.statistics().nbytes)

    def close(self) -> None:
        super().close()
        self._pool.close()
        self._peer_blocks.clear()
