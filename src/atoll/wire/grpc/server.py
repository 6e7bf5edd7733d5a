"""A gRPC server on asyncio, for one local client that sends tens of thousands of small messages a second.

It stands in for the gRPC library's Python server, which costs some 100 us a message. It does what the
runtime's client needs: unary and streaming calls, metadata, status, flow control, cancellation; no
compression, no deadlines (the client cancels when its own is over), no reflection.

Invariant: a handler's error ends its call, a client's error its call or its connection, and neither the
server. From the gRPC over HTTP/2 page (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import ssl as tls
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.errors import Code
from atoll.wire.grpc.call import Call, Traffic
from atoll.wire.grpc.metadata import parse_metadata
from atoll.wire.http2.connection import Http2Connection
from atoll.wire.http2.frames import ErrorCode, HeaderList
from atoll.wire.http2.limits import Limits
from atoll.wire.http2.stream import Stream

__all__ = ["Call", "Code", "GrpcServer", "GrpcStatistics", "Handler", "Limits"]

log = logging.getLogger(__name__)

Handler = Callable[[Call], None]


@dataclass(frozen=True, slots=True)
class GrpcStatistics:
    """Counts since the server was made; `connections`, `calls_open` and `queued_bytes` are of now."""

    connections: int
    calls: int
    calls_open: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    queued_bytes: int


class GrpcServer:
    """Serves `methods`, by path ("/package.Service/Method"), on any number of sockets.

    A handler is called with each call as soon as its headers have come; it sets the call's callbacks and
    returns. `on_connection_lost(number)` is called when the connection that calls know as `Call.connection`
    is gone, after the calls' own on_closed. A message of more than `max_message_bytes` ends its call with
    RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        methods: Mapping[str, Handler],
        *,
        max_message_bytes: int = 2**31 - 1,
        on_connection_lost: Callable[[int], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._methods = dict(methods)
        self._max_message_bytes = max_message_bytes
        self._on_connection_lost = on_connection_lost
        self._limits = limits or Limits()
        self._traffic = Traffic()
        self._connections: dict[Http2Connection, int] = {}
        self._connections_made = 0
        self._closed = False
        self._past_bytes_in = 0
        self._past_bytes_out = 0
        self._servers: list[asyncio.Server] = []
        self._socket_files: list[tuple[str, int]] = []

    async def listen_unix(self, path: str, mode: int = 0o600) -> None:
        """Listen on a unix socket, which has `mode` from the moment it exists.

        A socket file that nobody listens on is replaced. Raises OSError (EADDRINUSE) if somebody does, and
        FileExistsError if the path is no socket.
        """
        _remove_stale_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            umask = os.umask(0o777 & ~mode)
            try:
                listener.bind(path)
            finally:
                os.umask(umask)
            self._socket_files.append((path, os.stat(path).st_ino))
            server = await asyncio.get_running_loop().create_unix_server(self._connection, sock=listener)
        except BaseException:
            listener.close()
            raise
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Listen on a TCP port (0: any), and return its number. `ssl` is set to offer HTTP/2 by ALPN."""
        if ssl is not None:
            ssl.set_alpn_protocols(["h2"])
        server = await asyncio.get_running_loop().create_server(self._connection, host, port, ssl=ssl)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def statistics(self) -> GrpcStatistics:
        return GrpcStatistics(
            connections=len(self._connections),
            calls=self._traffic.calls,
            calls_open=sum(len(each.streams) for each in self._connections),
            messages_in=self._traffic.messages_in,
            messages_out=self._traffic.messages_out,
            bytes_in=self._past_bytes_in + sum(each.bytes_in for each in self._connections),
            bytes_out=self._past_bytes_out + sum(each.bytes_out for each in self._connections),
            queued_bytes=sum(each.queued_bytes() for each in self._connections),
        )

    async def close(self) -> None:
        """Stop listening, end all calls (with on_closed) and all connections, remove socket files."""
        self._closed = True
        for server in self._servers:
            server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.fail(ErrorCode.NO_ERROR, "server closes")
        for connection in connections:
            await connection.lost
        for path, inode in self._socket_files:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._socket_files.clear()
        self._servers.clear()

    def _connection(self) -> Http2Connection:
        self._connections_made += 1
        number = self._connections_made
        return Http2Connection(
            functools.partial(self._request, number),
            functools.partial(self._made, number),
            self._lost,
            self._limits,
        )

    def _made(self, number: int, connection: Http2Connection) -> None:
        self._connections[connection] = number
        if self._closed:  # it was accepted while the server closed
            connection.fail(ErrorCode.NO_ERROR, "server closes")

    def _lost(self, connection: Http2Connection) -> None:
        number = self._connections.pop(connection)
        self._past_bytes_in += connection.bytes_in
        self._past_bytes_out += connection.bytes_out
        if self._on_connection_lost is None:
            return
        try:
            self._on_connection_lost(number)
        except Exception:
            log.exception("on_connection_lost raised")

    def _request(self, connection: int, stream: Stream, headers: HeaderList) -> None:
        pseudo = {name: value for name, value in headers if name[:1] == b":"}
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        if pseudo[b":method"] != b"POST":
            stream.end([(b":status", b"405")])
            return
        if not content_type.startswith(b"application/grpc"):
            stream.end([(b":status", b"415")])
            return
        path = pseudo[b":path"].decode("utf-8", "replace")
        self._traffic.calls += 1
        fault = ""
        try:
            metadata = parse_metadata(headers)
        except ValueError as error:
            metadata, fault = {}, str(error)
        call = Call(
            stream,
            path,
            metadata,
            connection=connection,
            max_message_bytes=self._max_message_bytes,
            traffic=self._traffic,
        )
        stream.consumer = call
        handler = self._methods.get(path)
        if fault:
            call.finish(Code.INVALID_ARGUMENT, fault)
        elif handler is None:
            call.finish(Code.UNIMPLEMENTED, f"no method {path}")
        else:
            call.start(handler)


def _remove_stale_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "in the way of a unix socket", path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another process listens on the unix socket", path)
