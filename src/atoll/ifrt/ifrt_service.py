"""The RPCs of the IFRT proxy service: the version handshake and the stream of a session's requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.errors import OK, AccessError, AtollError, Code, Status, StatusError, not_found
from atoll.grpc import Call
from atoll.ifrt.buffer_service import BufferService, unary
from atoll.ifrt.host_buffer_store import HostBuffers
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.requests import handle_request, refuse_request
from atoll.ir.types import nbytes
from atoll.protocol.ifrt import session_pb2, transport_pb2
from atoll.protocol.translation import codec
from atoll.security.tokens import TOO_MANY, Guesses
from atoll.session.client_relay import ClientPort
from atoll.session.cluster_session import ClusterSession
from atoll.wire.address import Address

_log = logging.getLogger(__name__)
SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_HEADER = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
# The supported versions of the proxy protocol, and the latest version of serialized values.
MIN_PROTOCOL, MAX_PROTOCOL = 16, 25
MAX_SERDES = 6
# A refused client has this long to send its first request, which is answered with the reason.
_REFUSAL_SECONDS = 5.0
# Pending requests have this long to fail after their cluster was lost.
_LOST_SECONDS = 2.0
OnMessage = Callable[[bytes | memoryview], Any]


class Service:
    """The service for IFRT clients. `open_session()` opens a session with the cluster for each client."""

    def __init__(
        self,
        open_session: Callable[[], Awaitable[ClusterSession]],
        *,
        token: str = "",
        transfer_directory: str = "",
        callback_address: Callable[[], Address] = lambda: Address(host="127.0.0.1"),
        on_session_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_session = open_session
        self._token = token
        self._guesses = Guesses()
        self._buffers = BufferService(self._buffers_of, transfer_directory)
        self._clients = ClientPort(callback_address)
        self._on_session_end = on_session_end
        self._sessions: dict[int, IfrtSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def methods(self) -> dict[str, Callable[[Call], None]]:
        return {
            SERVICE + "GetVersion": unary(transport_pb2.GetVersion, self._get_version),
            SERVICE + "IfrtSession": self._session,
            **{SERVICE + name: method for name, method in self._buffers.methods().items()},
        }

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._clients.close()

    def end_compilations(self) -> None:
        """Answer all compile requests under way with an error, because the client's process is ending."""
        for session in self._sessions.values():
            session.end_compilations()

    # ---- the handshake

    def _get_version(self, request: Any) -> Any:
        low, high = request.min_version, request.max_version
        protocol = min(high.protocol_version, MAX_PROTOCOL)
        serdes = min(high.ifrt_serdes_version_number, MAX_SERDES)
        if protocol < max(low.protocol_version, MIN_PROTOCOL) or serdes < low.ifrt_serdes_version_number:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"this client's jaxlib speaks IFRT proxy protocol {low.protocol_version} to {high.protocol_version} "
                f"with values of version {low.ifrt_serdes_version_number} to {high.ifrt_serdes_version_number}, and "
                f"Atoll speaks {MIN_PROTOCOL} to {MAX_PROTOCOL} with values up to {MAX_SERDES}: "
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
                text = f"IFRT proxy protocol {metadata.version.protocol_version} is not supported"
                raise StatusError(Code.FAILED_PRECONDITION, text)
            self._check_token(metadata.initialization_data, call.peer)
        except StatusError as error:
            _refuse(call, error.status)
            return
        call.admit()
        call.set_handlers(on_half_close=call.finish)
        call.pause()
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, call: Call) -> None:
        """Open a session for a stream whose requests are held back, and start to handle them."""
        cluster = await self._open(call)
        if cluster is not None:
            self._begin(call, cluster)

    async def _open(self, call: Call) -> ClusterSession | None:
        """Open a session with the cluster for a stream. Refuse the stream, or return None, if that is not possible."""
        try:
            cluster = await self._open_session()
        except AtollError as error:
            code = Code.UNAUTHENTICATED if isinstance(error, AccessError) else Code.UNAVAILABLE
            _refuse(call, Status(int(code), str(error)))
            call.resume()
            return None
        if call.ended:
            cluster.close()
            return None
        if cluster.lost is not None:  # the session was opened before its client connected
            _refuse(call, cluster.lost)
            call.resume()
            return None
        return cluster

    def _begin(self, call: Call, cluster: ClusterSession) -> None:
        """Handle the requests of a stream from now on, in a session with the cluster."""
        loop = asyncio.get_running_loop()
        number = secrets.randbits(62)

        def end(status: Status) -> None:
            call.finish(status.code, status.message)
            self._end(session)

        def receive_with(on_message: OnMessage) -> None:
            call.set_handlers(on_message, lambda: end(OK), lambda: self._end(session))

        def on_recording(is_recording: bool) -> None:
            receive_with(recorded(session, on_message) if is_recording else on_message)
            session.responses.record(is_recording)

        def on_lost(status: Status) -> None:
            receive_with(_refusals(session, status, lambda: end(status)))
            self._clients.close_relay(number)  # the client then waits for no contents: see `ReadTable`
            call.resume()
            loop.call_later(_LOST_SECONDS, lambda: end(status) if session.is_working else None)

        def on_loop(call: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(call, *arguments)

        session = IfrtSession(
            cluster,
            number,
            call.send,
            call.pause,
            call.resume,
            on_lost,
            on_recording,
            open_relay=lambda: self._clients.relay(number, cluster, on_loop),
            later=loop.call_later,
        )
        on_message = _requests(session, end)
        receive_with(on_message)
        self._sessions[session.number] = session
        session.start()

    def _check_token(self, data: Any, peer: str) -> None:
        if not self._token:
            return
        given = data.attributes["token"].string_value if "token" in data.attributes else b""
        now = asyncio.get_running_loop().time()
        if not self._guesses.may_try(peer, now):
            raise StatusError(Code.UNAUTHENTICATED, TOO_MANY)
        if not hmac.compare_digest(given, self._token.encode()):
            self._guesses.wrong(peer, now)
            raise StatusError(Code.UNAUTHENTICATED, "this proxy asks for a token: set ATOLL_TOKEN to the cluster's")

    def _end(self, session: IfrtSession) -> None:
        if self._sessions.pop(session.number, None) is not None:
            session.close()
            self._clients.close_relay(session.number)
            self._on_session_end()

    def _buffers_of(self, number: int) -> HostBuffers:
        session = self._sessions.get(number)
        if session is None:
            raise not_found("no such session")
        return session.buffers


def _requests(session: IfrtSession, end: Callable[[Status], None]) -> OnMessage:
    """Return a handler of the client's requests. If a message is not a request, it calls `end` with the error."""

    def on_message(data: bytes | memoryview) -> Any:
        try:
            return handle_request(session, data)
        except StatusError as error:
            _log.warning("a session ends: %s", error)
            end(error.status)

    return on_message


def _refusals(session: IfrtSession, status: Status, end: Callable[[], None]) -> OnMessage:
    """Return a handler that answers all further requests with the reason why the session's cluster was lost.

    The stream stays open, because jaxlib's client would only report that the stream has ended. Pending requests fail
    because of the loss. If they take longer than `_LOST_SECONDS`, the stream ends after all.
    """

    def on_message(data: bytes | memoryview) -> None:
        try:
            refuse_request(session, data, status)
        except StatusError:
            end()

    return on_message


def _refuse(call: Call, status: Status) -> None:
    """Refuse a session with an answer to its first request.

    If the stream ended first, jaxlib's client would cancel the stream and lose its status.
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

    call.set_handlers(on_message, finish)
    asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, finish)


def recorded(session: IfrtSession, on_message: OnMessage) -> OnMessage:
    """Return a handler that passes the client's messages to `on_message` and to the session's recorder.

    `on_message` returns the request, or None if it could not be parsed.
    """
    recorder = session.cluster.recorder

    def record(data: bytes | memoryview) -> None:
        if recorder.is_over():
            on_message(data)
            return
        received = recorder.taken()
        request = on_message(data)
        if request is not None:
            kind = request.WhichOneof("kind") or "unknown"
            name, moved = _about(session, kind, getattr(request, kind, None))
            recorder.handled(request.meta.op_id, kind, name, received, moved)

    return record


def _about(session: IfrtSession, kind: str, request: Any) -> tuple[str, int]:
    """Return the name of the program that a request runs, and the bytes that it moves."""
    if kind == "execute":
        executable = session.executables.get(request.executable)
        return ("" if executable is None else executable.name), 0
    if kind in ("make_array_from_host_buffer", "copy_to_host_buffer"):
        return "", _nbytes(session, [request.array])
    if kind == "make_arrays_from_host_buffer_shards":
        return "", _nbytes(session, request.arrays)
    return "", 0


def _nbytes(session: IfrtSession, handles: Any) -> int:
    records = (session.arrays.records.get(handle) for handle in handles)
    return sum(nbytes(record.spec) for record in records if record is not None)
