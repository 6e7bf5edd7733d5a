"""The RPCs of the IFRT proxy service: the version handshake, the stream of a session, and host buffers beside it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import AccessError, AtollError, Code, Status, StatusError, invalid, not_found, status_of
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.host_buffers import Stored
from atoll.frontends.ifrt.requests import HANDLERS
from atoll.frontends.ifrt.session import Session
from atoll.frontends.session.link import Link
from atoll.protocol.ifrt import session_pb2, transport_pb2
from atoll.transfers.host_memory import aligned
from atoll.wire.grpc import Call

_log = logging.getLogger(__name__)

SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_HEADER = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_HEADER = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
# What this server speaks: requests as of these protocol versions, serialized values up to this version.
MIN_PROTOCOL, MAX_PROTOCOL = 16, 25
MAX_SERDES = 6
# Host buffers go back to the client in messages of this size.
_CHUNK = 1 << 20
MAX_HOST_BUFFER = 1 << 38
# How long a client that may not open a session has for the request that is answered so.
_REFUSAL_SECONDS = 5.0


class Service:
    """Serves clients; `open_link()` opens a session with the cluster for each."""

    def __init__(
        self,
        open_link: Callable[[], Awaitable[Link]],
        *,
        token: str = "",
        transfer_directory: str = "",
        on_session_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_link = open_link
        self._token = token
        self._directory = Path(transfer_directory) if transfer_directory else None
        self._on_session_end = on_session_end
        self._sessions: dict[int, Session] = {}
        self._tasks: set[Any] = set()

    def methods(self) -> dict[str, Callable[[Call], None]]:
        return {
            SERVICE + "GetVersion": self._unary(transport_pb2.GetVersion, self._get_version),
            SERVICE + "IfrtSession": self._session,
            SERVICE + "HostBufferStore": self._store,
            SERVICE + "HostBufferLookup": self._lookup,
            SERVICE + "HostBufferDelete": self._unary(transport_pb2.HostBufferDelete, self._delete),
            SERVICE + "HostBufferReadFromDisk": self._unary(transport_pb2.HostBufferReadFromDisk, self._read_from_disk),
        }

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()

    # ---- the handshake

    def _get_version(self, request: Any) -> Any:
        low, high = request.min_version, request.max_version
        protocol = min(high.protocol_version, MAX_PROTOCOL)
        serdes = min(high.ifrt_serdes_version_number, MAX_SERDES)
        if protocol < max(low.protocol_version, MIN_PROTOCOL) or serdes < low.ifrt_serdes_version_number:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"this client's jaxlib speaks IFRT proxy protocol {low.protocol_version} to {high.protocol_version} "
                f"with values of version {low.ifrt_serdes_version_number} to {high.ifrt_serdes_version_number}; Atoll "
                f"speaks {MIN_PROTOCOL} to {MAX_PROTOCOL} with values up to {MAX_SERDES}: "
                + (
                    "install a newer jax"
                    if high.protocol_version < MIN_PROTOCOL
                    else "install a newer atoll, or an older jax"
                ),
            )
        reply = transport_pb2.GetVersionReply()
        reply.version.protocol_version = protocol
        reply.version.ifrt_serdes_version_number = serdes
        return reply

    # ---- sessions

    def _session(self, call: Call) -> None:
        try:
            metadata = codec.parse(transport_pb2.SessionMetadata, call.metadata.get(SESSION_HEADER, b""))
            if not MIN_PROTOCOL <= metadata.version.protocol_version <= MAX_PROTOCOL:
                raise StatusError(
                    Code.FAILED_PRECONDITION, f"protocol {metadata.version.protocol_version} is not spoken here"
                )
            self._check_token(metadata.initialization_data)
        except StatusError as error:
            _refuse(call, error.status)
            return
        call.pause()
        state: dict[str, Session] = {}

        def ended() -> None:
            session = state.pop("session", None)
            if session is not None:
                self._end(session)

        def finished() -> None:
            call.finish()
            ended()

        def on_message(data: bytes | memoryview) -> None:
            try:
                state["session"].on_request(data)
            except StatusError as error:
                _log.warning("a session ends: %s", error)
                call.finish(error.status.code, error.status.message)
                ended()

        call.on_message = on_message
        call.on_closed = ended
        call.on_half_close = finished

        async def open_session() -> None:
            try:
                link = await self._open_link()
            except AtollError as error:
                code = Code.UNAUTHENTICATED if isinstance(error, AccessError) else Code.UNAVAILABLE
                _refuse(call, Status(int(code), str(error)))
                call.resume()
                return
            if call.ended:
                link.close()
                return
            session = Session(link, HANDLERS, secrets.randbits(62), call.send, call.pause, call.resume)

            def lost(status: Status) -> None:
                call.finish(status.code, status.message)
                ended()

            link.on_lost = lost
            state["session"] = self._sessions[session.number] = session
            if not session.is_held:
                call.resume()

        self._spawn(open_session())

    def _check_token(self, data: Any) -> None:
        if not self._token:
            return
        given = data.attributes["token"].string_value if "token" in data.attributes else b""
        if not hmac.compare_digest(given, self._token.encode()):
            raise StatusError(Code.UNAUTHENTICATED, "this proxy asks for a token: set ATOLL_TOKEN to the cluster's")

    def _end(self, session: Session) -> None:
        if self._sessions.pop(session.number, None) is not None:
            session.close()
            self._on_session_end()

    def _get_session(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise not_found("no such session")
        return session

    # ---- host buffers

    def _store(self, call: Call) -> None:
        try:
            metadata = codec.parse(transport_pb2.HostBufferStoreMetadata, call.metadata.get(STORE_HEADER, b""))
            session = self._get_session(metadata.session_id)
            size = metadata.buffer_size
            if not 0 <= size <= MAX_HOST_BUFFER:
                raise invalid(f"a host buffer of {size} bytes")
        except StatusError as error:
            call.finish(error.status.code, error.status.message)
            return
        # Memory is taken as bytes come: a client that announces more than it sends costs nothing.
        parts: list[Any] = []
        received = 0

        def on_message(data: bytes | memoryview) -> None:
            nonlocal received
            try:
                part = _field_one(data)
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            received += len(part)
            if received > size:
                call.finish(int(Code.INVALID_ARGUMENT), f"over {size} bytes came for a buffer of that size")
                return
            copy = aligned(len(part))
            copy[:] = np.frombuffer(part, np.uint8)
            parts.append(copy)

        def on_half_close() -> None:
            if received != size:
                call.finish(int(Code.INVALID_ARGUMENT), f"{received} of {size} bytes came")
                return
            try:
                session.buffers.put(metadata.handle, Stored(parts, size))
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            call.send(transport_pb2.HostBufferStoreReply().SerializeToString())
            call.finish()

        call.on_message = on_message
        call.on_half_close = on_half_close

    def _lookup(self, call: Call) -> None:
        def on_message(data: bytes | memoryview) -> None:
            try:
                request = codec.parse(transport_pb2.HostBufferLookup, bytes(data))
                session = self._get_session(request.session_id)
                stored = session.buffers.read(request.handle)
                if stored.descriptor >= 0:
                    stored = Stored([os.pread(stored.descriptor, stored.nbytes, 0)], stored.nbytes)
            except StatusError as error:
                call.finish(error.status.code, error.status.message)
                return
            self._spawn(_send_chunks(call, stored))

        call.on_message = on_message

    def _delete(self, request: Any) -> Any:
        self._get_session(request.session_id).buffers.delete(request.handle)
        return transport_pb2.HostBufferDeleteReply()

    def _read_from_disk(self, request: Any) -> Any:
        metadata = request.metadata
        session = self._get_session(metadata.session_id)
        if self._directory is None:
            raise StatusError(Code.FAILED_PRECONDITION, "this proxy shares no folder with its client")
        # The client names its files by the handle, as a C++ int.
        handle = (metadata.handle + 2**31) % 2**32 - 2**31
        path = self._directory / f"lt_{handle}"
        try:  # without blocking, should somebody have put a pipe there
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StatusError(Code.NOT_FOUND, f"no host buffer in the shared folder: {error.strerror}") from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != metadata.buffer_size:
            os.close(descriptor)
            raise invalid("a file in the shared folder is none, or has not the size that was announced")
        path.unlink(missing_ok=True)
        session.buffers.put(metadata.handle, Stored((), metadata.buffer_size, descriptor))
        return transport_pb2.HostBufferReadFromDiskReply()

    # ---- small things

    def _unary(self, kind: Any, handle: Callable[[Any], Any]) -> Callable[[Call], None]:
        def method(call: Call) -> None:
            def on_message(data: bytes | memoryview) -> None:
                try:
                    reply = handle(codec.parse(kind, bytes(data)))
                except Exception as error:
                    status = status_of(error)
                    call.finish(status.code, status.message)
                    return
                call.send(reply.SerializeToString())
                call.finish()

            call.on_message = on_message

        return method

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refuse(call: Call, status: Status) -> None:
    """Ends a session that may not open, with an answer to its first request.

    jaxlib's client loses the status of a stream that ends unasked: it cancels the stream before it looks.
    """

    def finish() -> None:
        call.finish(status.code, status.message)

    def on_message(data: bytes | memoryview) -> None:
        with contextlib.suppress(StatusError):
            request = codec.parse(session_pb2.Request, bytes(data))
            response = session_pb2.Response()
            response.meta.op_id = request.meta.op_id
            response.meta.status.CopyFrom(codec.status_to(status))
            call.send(response.SerializeToString())
        finish()

    call.on_message = on_message
    call.on_half_close = finish
    asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, finish)


async def _send_chunks(call: Call, stored: Stored) -> None:
    """Sends a buffer's parts as they come."""
    index = 0
    try:
        while (part := await stored.part(index)) is not None:
            index += 1
            view = memoryview(part).cast("B")
            for start in range(0, view.nbytes, _CHUNK):
                chunk = view[start : start + _CHUNK]
                call.send((b"\x0a" + _varint(chunk.nbytes), chunk))
                await call.drained()
                if call.ended:
                    return
    except StatusError as error:
        call.finish(error.status.code, error.status.message)
        return
    call.finish()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field_one(data: bytes | memoryview) -> memoryview:
    """The bytes of field 1 in a message that has no other, without copying them."""
    view = memoryview(data)
    if not view.nbytes:
        return view
    if view[0] != 0x0A:
        raise invalid("no host buffer contents")
    size = shift = 0
    position = 1
    while True:
        if position >= view.nbytes or shift > 63:
            raise invalid("no host buffer contents")
        byte = view[position]
        position += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if position + size != view.nbytes:
        raise invalid("no host buffer contents")
    return view[position:]
