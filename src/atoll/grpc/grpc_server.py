"""A gRPC server on asyncio for a few clients that each send tens of thousands of small messages per second.

It replaces the gRPC library's Python server, which costs about 100 us per message. It supports neither compression nor
reflection nor deadlines (a client cancels the call when its own deadline has passed).

Invariant: an error of a handler ends only its call, and an error of a client ends only its call or its connection. The
protocol follows grpc/grpc, doc/PROTOCOL-HTTP2.md.
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
from typing import Protocol

import msgspec
from msgspec.structs import replace

from atoll.grpc.call import Call
from atoll.grpc.http2.frames import ErrorCode, HeaderList
from atoll.grpc.http2.http2_connection import Http2Connection
from atoll.grpc.http2.http2_limits import Limits
from atoll.grpc.http2.http2_stream import Http2Stream
from atoll.grpc.message_reader import Traffic
from atoll.grpc.metadata import check_grpc_request, parse_metadata
from atoll.grpc.status import GrpcError, StatusCode

log = logging.getLogger(__name__)

Handler = Callable[[Call], None]

# Limits of a connection whose client is not admitted yet.
FIRST_MESSAGE_BYTES = 16 << 10
FIRST_CALLS = 8


class Strangers(Protocol):
    """Bounds the connections whose clients are not admitted yet, by calling `drop(reason)` of the excess ones."""

    def add(self, connection: Http2Connection, address: str) -> None: ...

    def remove(self, connection: Http2Connection) -> None: ...


class GrpcStatistics(msgspec.Struct, frozen=True):
    """Current values, and totals since the server was created.

    `connections`, `calls_open`, `queued_bytes` and `incomplete_bytes` are current values.
    """

    connections: int
    calls: int
    calls_open: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    queued_bytes: int
    """Bytes received that no handler has taken, and bytes written that no socket has accepted."""
    incomplete_bytes: int
    """Bytes allocated for messages above 64 KiB that are not complete yet."""


class GrpcServer:
    """Serves `methods`, handlers by path ("/package.Service/Method"), on any number of sockets.

    The server calls a handler with a new call as soon as the call's headers have arrived. The handler sets the call's
    callbacks and returns. A path without a handler fails with UNIMPLEMENTED, and a message of more than
    `max_message_bytes` ends its call with RESOURCE_EXHAUSTED.

    `limits` bounds the resources of one connection. The server closes connections beyond `max_connections` at once.
    If `strangers` is given, it bounds each connection until a handler admits the client with `Call.admit`; until then,
    the client can send small messages and few calls. All methods and handlers run on the event loop's thread.
    """

    def __init__(
        self,
        methods: Mapping[str, Handler],
        *,
        max_message_bytes: int = 2**31 - 1,
        max_connections: int = 1024,
        limits: Limits | None = None,
        strangers: Strangers | None = None,
    ) -> None:
        self._methods = dict(methods)
        self._max_message_bytes = max_message_bytes
        self._limits = limits or Limits()
        self._max_connections = max_connections
        self._connections: dict[Http2Connection, Traffic] = {}
        self._strangers = strangers
        self._not_admitted: dict[Traffic, Http2Connection] = {}
        self._closed = False
        self._past = GrpcStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0)
        """The totals of closed connections."""
        self._servers: list[asyncio.Server] = []
        self._socket_files: list[tuple[str, int]] = []

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket. It is created with mode 0600 and replaces a socket file without a listener.

        Raise OSError (EADDRINUSE) if another process listens on the path, and FileExistsError if the path is not a
        socket.
        """
        _remove_stale_socket(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)  # before anybody can connect; a umask would also apply to files of other threads
            self._socket_files.append((path, os.stat(path).st_ino))
            server = await asyncio.get_running_loop().create_unix_server(self._connection, sock=listener)
        except BaseException:
            listener.close()
            raise
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Listen on a TCP port (0: any free port) and return its number. Set `ssl` to offer HTTP/2 with ALPN."""
        if ssl is not None:
            ssl.set_alpn_protocols(["h2"])
        server = await asyncio.get_running_loop().create_server(self._connection, host, port, ssl=ssl)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def statistics(self) -> GrpcStatistics:
        connections, traffic, past = self._connections.keys(), self._connections.values(), self._past
        return GrpcStatistics(
            connections=len(connections),
            calls=past.calls + sum(each.calls for each in traffic),
            calls_open=sum(len(each.streams) for each in connections),
            messages_in=past.messages_in + sum(each.messages_in for each in traffic),
            messages_out=past.messages_out + sum(each.messages_out for each in traffic),
            bytes_in=past.bytes_in + sum(each.bytes_in for each in connections),
            bytes_out=past.bytes_out + sum(each.bytes_out for each in connections),
            queued_bytes=sum(each.queued_bytes() for each in connections),
            incomplete_bytes=sum(each.incomplete_bytes for each in traffic),
        )

    async def close(self) -> None:
        """Stop listening, end all calls (with `on_closed`) and connections (with GOAWAY), and remove socket files.

        Return when the last connection is closed, at most `Limits.linger_seconds` later.
        """
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
        first = self._max_message_bytes if self._strangers is None else FIRST_MESSAGE_BYTES
        traffic = Traffic(self._limits.incomplete_bytes, first)
        return Http2Connection(
            functools.partial(self._request, traffic),
            functools.partial(self._connection_made, traffic),
            self._connection_lost,
            self._limits,
        )

    def _connection_made(self, traffic: Traffic, connection: Http2Connection) -> None:
        self._connections[connection] = traffic
        if self._closed:  # accepted while the server was closing
            connection.abort()
        elif len(self._connections) > self._max_connections:
            log.info("connection refused: %d connections are open", self._max_connections)
            connection.abort()
        elif self._strangers is not None:
            self._not_admitted[traffic] = connection
            self._strangers.add(connection, connection.peer)

    def _admit(self, traffic: Traffic) -> None:
        connection = self._not_admitted.pop(traffic, None)
        if connection is not None and self._strangers is not None:
            self._strangers.remove(connection)
            traffic.max_message_bytes = self._max_message_bytes

    def _connection_lost(self, connection: Http2Connection) -> None:
        traffic, past = self._connections.pop(connection), self._past
        if self._not_admitted.pop(traffic, None) is not None and self._strangers is not None:
            self._strangers.remove(connection)
        self._past = replace(
            past,
            calls=past.calls + traffic.calls,
            messages_in=past.messages_in + traffic.messages_in,
            messages_out=past.messages_out + traffic.messages_out,
            bytes_in=past.bytes_in + connection.bytes_in,
            bytes_out=past.bytes_out + connection.bytes_out,
        )

    def _request(self, traffic: Traffic, stream: Http2Stream, headers: HeaderList) -> None:
        http_status = check_grpc_request(headers)
        if http_status != 200:
            stream.end([(b":status", b"%d" % http_status)])
            return
        path = next(value for name, value in headers if name == b":path").decode("utf-8", "replace")
        traffic.calls += 1
        fault: GrpcError | None = None
        try:
            metadata = parse_metadata(headers)
        except GrpcError as error:
            metadata, fault = {}, error
        stranger = self._not_admitted.get(traffic)
        peer = stranger.peer if stranger is not None else ""
        call = Call(stream, path, metadata, traffic=traffic, admit=functools.partial(self._admit, traffic), peer=peer)
        handler = self._methods.get(path)
        if fault is not None:
            call.finish(fault.code, fault.message)
        elif stranger is not None and len(stranger.streams) > FIRST_CALLS:
            call.finish(StatusCode.RESOURCE_EXHAUSTED, f"more than {FIRST_CALLS} calls without a session")
        elif handler is None:
            call.finish(StatusCode.UNIMPLEMENTED, f"unknown method {path}")
        else:
            call.start(handler)


def _remove_stale_socket(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "cannot create a unix socket: another file has this path", path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another process listens on the unix socket", path)
