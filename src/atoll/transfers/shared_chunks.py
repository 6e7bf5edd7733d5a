"""Large transfers between hosts of one machine: in chunks, through a few blocks of shared memory.

As between machines, a transfer is announced, credited and landed (`transfers.streams`); what differs is how a chunk
gets there. The sender writes it into a block, and the receiver copies it to where it belongs and gives the block back.
So an array of any size needs `CHUNKS_BYTES` of memory beside itself, and those who send others' bytes never wait for a
receiver that cannot read what it has before the rest has come.
"""

from __future__ import annotations

import mmap
from typing import Any

import msgspec

from atoll.errors import FrameError
from atoll.transfers.copies import copy
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.piece_contents import Buffers
from atoll.transfers.send_queue import Outgoing
from atoll.transfers.shared_memory_engine import map_block
from atoll.transfers.shared_memory_pool import SharedMemoryPool
from atoll.transfers.streams import STREAM_THRESHOLD, StreamEngine
from atoll.transfers.transfer_engine import Contents, Received

# What is smaller goes whole: who receives it reads it where it lies.
CHUNKED_THRESHOLD = 16 << 20
# Unless so much is read together: smaller pieces, too, would stay in blocks until all are there.
CHUNKED_TOGETHER = 64 << 20
CHUNKS_BYTES = 16 << 20
# A chunk there and its block back are two messages, which take as long as to copy half a MiB.
SHARED_CHUNK_BYTES = 4 << 20


class SharedChunk(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A chunk is in the sender's block of this number, whose descriptor comes with its first use."""

    transfer: int
    index: int
    block: int


class ChunkRead(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The receiver has copied what was in a block of the sender's."""

    block: int


class SharedChunksEngine(StreamEngine):
    """Sends on the channel's own connection alone."""

    frames = (*StreamEngine.frames, SharedChunk, ChunkRead)
    chunk_bytes = SHARED_CHUNK_BYTES

    def __init__(self, socket: FrameSocket) -> None:
        super().__init__(socket)
        self._pool = SharedMemoryPool(lambda block: None, CHUNKS_BYTES)
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
        descriptor = None if block.is_announced else block.descriptor
        try:
            with memoryview(block.memory) as memory:
                Buffers(views).write_into(memory)
            block.is_announced = True
            stream.send(SharedChunk(transfer.number, index, block.number), (), descriptor)
        except BaseException:
            block.is_announced = descriptor is None
            self._pool.give_back(block.number)
            raise

    def handle(self, frame: Any, descriptor: int | None) -> Received | None:
        match frame:
            case SharedChunk():
                self._take_chunk(frame, descriptor)
            case ChunkRead(block):
                self._pool.give_back(block)
            case _:
                return super().handle(frame, descriptor)
        return None

    def _take_chunk(self, chunk: SharedChunk, descriptor: int | None) -> None:
        if descriptor is not None:
            self._peer_blocks[chunk.block] = map_block(descriptor, SHARED_CHUNK_BYTES)
            if len(self._peer_blocks) > CHUNKS_BYTES // SHARED_CHUNK_BYTES:
                raise FrameError("more blocks of shared memory than chunks may be on their way")
        memory = self._peer_blocks.get(chunk.block)
        if memory is None:
            raise FrameError(f"block {chunk.block} is not known")
        buffer, target = self._receive_buffers.target(chunk.transfer, chunk.index)
        with memoryview(memory) as view:
            copy(view[: target.nbytes], target)
        self._say(ChunkRead(chunk.block))
        self._chunk_landed(buffer, chunk.index)

    def close(self) -> None:
        super().close()
        self._pool.close()
        self._peer_blocks.clear()
