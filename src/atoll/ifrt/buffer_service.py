"""The unary methods of the proxy's service, and the RPCs that carry host buffers beside a session's stream.

Memory is allocated as bytes arrive, so a client that announces more than it sends costs nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import Code, StatusError, invalid, status_of
from atoll.grpc import Call
from atoll.ifrt.host_buffer_store import HostBuffers, Stored, StoredUpload
from atoll.missing import MISSING
from atoll.protocol.ifrt import transport_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.codec import contents_header, contents_of
from atoll.transfers.host_memory import aligned

STORE_HEADER = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_CHUNK = 1 << 20  # bytes of a buffer per message to the client
# Once this many bytes have been queued after a part, the part has left the connection's queues (`grpc.http2.send`).
_UNSENT = 4 << 20
MAX_HOST_BUFFER = 1 << 38


def unary(kind: Any, handle: Callable[[Any], Any], admits: bool = False) -> Callable[[Call], None]:
    """Return a method that takes one message of `kind`. `handle` returns the reply, or raises.

    If the method `admits`, a successful call proves that the connection belongs to a session's client.
    """

    def method(call: Call) -> None:
        def on_message(data: bytes | memoryview) -> None:
            try:
                reply = handle(codec.parse(kind, bytes(data)))
            except Exception as error:
                status = status_of(error)
                call.finish(status.code, status.message)
                return
            if admits:
                call.admit()
            call.send(reply.SerializeToString())
            call.finish()

        call.set_handlers(on_message)

    return method


class BufferService:
    """The methods for host buffers.

    `buffers_of(number)` returns the host buffers of a session, or raises NOT_FOUND. If there is a `transfer_directory`,
    clients on this machine may put buffers there as files.
    """

    def __init__(self, buffers_of: Callable[[int], HostBuffers], transfer_directory: str = "") -> None:
        self._buffers_of = buffers_of
        self._directory = Path(transfer_directory) if transfer_directory else None
        self._tasks: set[asyncio.Task[None]] = set()

    def methods(self) -> dict[str, Callable[[Call], None]]:
        return {
            "HostBufferStore": self._store,
            "HostBufferLookup": self._lookup,
            "HostBufferDelete": unary(transport_pb2.HostBufferDelete, self._delete, admits=True),
            "HostBufferReadFromDisk": unary(transport_pb2.HostBufferReadFromDisk, self._read_from_disk, admits=True),
        }

    def _store(self, call: Call) -> None:
        try:
            metadata = codec.parse(transport_pb2.HostBufferStoreMetadata, call.metadata.get(STORE_HEADER, b""))
            buffers = self._buffers_of(metadata.session_id)
            call.admit()  # only the session's client knows its number
            size = metadata.buffer_size
            if not 0 <= size <= MAX_HOST_BUFFER:
                raise invalid(f"a host buffer of {size} bytes is invalid: the limit is {MAX_HOST_BUFFER} bytes")
        except StatusError as error:
            call.finish(error.status.code, error.status.message)
            return
        parts: list[Any] = []
        received = 0

        def on_message(data: bytes | memoryview) -> None:
            nonlocal received
            try:
                part = contents_of(data)
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            received += len(part)
            if received > size:
                call.finish(int(Code.INVALID_ARGUMENT), f"a host buffer of {size} bytes received more bytes than that")
                return
            copy = aligned(len(part))
            copy[:] = np.frombuffer(part, np.uint8)
            parts.append(copy)

        def on_half_close() -> None:
            if received != size:
                call.finish(int(Code.INVALID_ARGUMENT), f"a host buffer of {size} bytes received only {received}")
                return
            try:
                buffers.put(metadata.handle, StoredUpload(parts, size))
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            call.send(transport_pb2.HostBufferStoreReply().SerializeToString())
            call.finish()

        call.set_handlers(on_message, on_half_close)

    def _lookup(self, call: Call) -> None:
        def on_message(data: bytes | memoryview) -> None:
            try:
                request = codec.parse(transport_pb2.HostBufferLookup, bytes(data))
                stored = self._buffers_of(request.session_id).read(request.handle)
                call.admit()
                if stored.descriptor >= 0:
                    stored = StoredUpload([os.pread(stored.descriptor, stored.nbytes, 0)], stored.nbytes)
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            task = asyncio.get_running_loop().create_task(_send_chunks(call, stored))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        call.set_handlers(on_message)

    def _delete(self, request: Any) -> Any:
        self._buffers_of(request.session_id).delete(request.handle)
        return transport_pb2.HostBufferDeleteReply()

    def _read_from_disk(self, request: Any) -> Any:
        metadata = request.metadata
        buffers = self._buffers_of(metadata.session_id)
        if self._directory is None:
            raise StatusError(Code.FAILED_PRECONDITION, "this proxy shares no directory with its client")
        # The client names its files by the handle, printed as a C++ int.
        handle = (metadata.handle + 2**31) % 2**32 - 2**31
        path = self._directory / f"lt_{handle}"
        try:  # O_NONBLOCK, in case the file is a pipe
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except MISSING as error:
            text = f"the shared directory has no file {path.name} for a host buffer: {error.strerror}"
            raise StatusError(Code.NOT_FOUND, text) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StatusError(Code.NOT_FOUND, f"{path.name} in the shared directory is a symbolic link") from None
            text = f"the proxy cannot open {path} for a host buffer: {error.strerror}"
            raise StatusError(Code.UNAVAILABLE, text) from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != metadata.buffer_size:
            os.close(descriptor)
            raise invalid(f"{path.name} in the shared directory must be a regular file of {metadata.buffer_size} bytes")
        path.unlink(missing_ok=True)
        buffers.put(metadata.handle, StoredUpload((), metadata.buffer_size, descriptor))
        return transport_pb2.HostBufferReadFromDiskReply()


async def _send_chunks(call: Call, stored: Stored) -> None:
    """Send a buffer's parts as they arrive, and release their memory once they have been sent."""
    index = 0
    sent: deque[int] = deque()  # bytes of the parts whose memory is still held
    try:
        while (part := await stored.part(index)) is not None:
            index += 1
            view = memoryview(part).cast("B")
            for start in range(0, view.nbytes, _CHUNK):
                chunk = view[start : start + _CHUNK]
                call.send((contents_header(chunk.nbytes), chunk))
                await call.drained()
                if call.ended:
                    return
            sent.append(view.nbytes)
            while sum(sent) - sent[0] >= _UNSENT:
                sent.popleft()
                stored.release(index - len(sent))
    except StatusError as error:
        call.finish(error.status.code, error.status.message)
        return
    call.finish()
