"""Requests of operators to a controller, and their replies.

All functions take the cluster's address and a token. With a join token the connection uses TLS, and the token of the
join token. All raise ConnectError or a subclass.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, cycle
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from atoll._version import __version__
from atoll.cluster.usage.usage_records import By
from atoll.decodable import decodable
from atoll.errors import AccessError, Code, ConnectError, NotServingError, UnreachableError, invalid, refusal
from atoll.protocol import messages as m
from atoll.protocol.spans import TraceRecord
from atoll.retries import Retry
from atoll.security.access import KeptIdentities, token_beside
from atoll.security.join_token import JoinToken
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect

Reply = TypeVar("Reply")

_IDENTITIES = KeptIdentities()
REPLY_SECONDS = 10.0
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 1.0
OPERATION_SECONDS = 900.0  # longer than the controller tries to migrate


def request_report(address: Address, token: str, join: JoinToken | None = None) -> bytes:
    """Return the state of the cluster, as JSON."""
    return _ask(address, token, join, m.StatusRequest(), m.StatusReply).content


def request_dump(address: Address, token: str, join: JoinToken | None = None) -> bytes:
    """Return the controller's event log; see `atoll.journal.event_log`."""
    return _ask(address, token, join, m.DumpRequest(), m.DumpReply).content


def request_check(address: Address, token: str, join: JoinToken | None = None) -> m.CheckReply:
    """Return the result of checking the controller's state against itself and its hosts."""
    return _ask(address, token, join, m.CheckRequest(), m.CheckReply)


def request_trace(
    address: Address,
    token: str,
    since: int = 0,
    join: JoinToken | None = None,
    recording: m.RecordReply | None = None,
) -> TraceRecord:
    """Return the spans that ended after `since`, or those of a recording, which this ends."""
    request = m.TraceRequest(since)
    if recording is not None:
        request = m.TraceRequest(since, recording.position, recording=recording.recording)
    return merged(_run(_trace(address, token, join, request)))


async def _trace(address: Address, token: str, join: JoinToken | None, request: m.TraceRequest) -> list[TraceRecord]:
    """Return the parts of the trace, in order, up to the position of the trace at the first reply."""
    connection, reply = await ask_serving(address, token, join, request)
    with closing(connection):
        parts, end = [], 0
        while True:
            if isinstance(reply, m.OperationReply):
                reply.status.raise_if_error()
            assert isinstance(reply, m.TraceReply)
            parts.append(msgspec.msgpack.decode(reply.content, type=decodable(TraceRecord)))
            end = end or reply.end
            if reply.position >= end:
                return parts
            reply = await connection.ask(m.TraceRequest(request.since, reply.position))


def merged(parts: Sequence[TraceRecord]) -> TraceRecord:
    """Return the parts of a trace as one record, with spans ordered by host and end."""
    spans = [span for part in parts for span in part.spans]
    spans.sort(key=lambda span: (span.host, span.ended, span.started, span.sequence))
    clocks = {clock.host: clock for part in parts for clock in part.clocks}
    sessions = {session.number: session for part in parts for session in part.sessions}
    return TraceRecord(
        spans,
        tuple(clocks[host] for host in sorted(clocks)),
        tuple(sessions[number] for number in sorted(sessions)),
        parts[0].calls,
        parts[0].missing,
    )


def request_recording(
    address: Address, token: str, seconds: float = 0.0, join: JoinToken | None = None
) -> m.RecordReply:
    """Make proxies record their clients' calls, until `request_trace` or for `seconds`."""
    return _ask(address, token, join, m.RecordRequest(seconds), m.RecordReply)


def request_usage(address: Address, token: str, by: By, seconds: float, join: JoinToken | None = None) -> bytes:
    """Return the usage of the last `seconds`, or of all time if 0, as JSON."""
    return _ask(address, token, join, m.UsageRequest(by, seconds), m.UsageReply).content


def request_stop(
    address: Address, token: str, join: JoinToken | None = None, all_sessions: bool = False
) -> m.StopReply:
    """End the cluster. Returns when the controller begins to end it, with the sessions that persist."""
    return _ask(address, token, join, m.StopRequest(all_sessions), m.StopReply)


def request_operation(
    address: Address,
    token: str,
    operation: m.Operation,
    join: JoinToken | None = None,
    seconds: float = OPERATION_SECONDS,
) -> str:
    """Perform an operation, and return a sentence that describes the result.

    While the controller performs no operations, because it does not hold its lease, try it and its other addresses
    again for `REPLY_SECONDS`. Raises StatusError if the operation fails.
    """
    retry = Retry(_RETRY_SECONDS, _MAX_RETRY_SECONDS, patience=REPLY_SECONDS)
    nobody: NotServingError | None = None
    for each in chain((address,), cycle(address.each)):
        try:
            reply = _ask(each, token, join, operation, m.OperationReply, seconds)
        except NotServingError as error:
            nobody = error
        except UnreachableError:
            if nobody is None:
                raise
        else:
            reply.status.raise_if_error()
            return reply.text
        if retry.is_over:
            break
        time.sleep(retry.next_pause())
    assert nobody is not None
    raise nobody


def _ask(
    address: Address,
    token: str,
    join: JoinToken | None,
    request: m.Message,
    expected: type[Reply],
    seconds: float = REPLY_SECONDS,
) -> Reply:
    """Send one request on a new connection, and return its reply."""

    async def ask() -> Any:
        connection, reply = await ask_serving(address, token, join, request, seconds)
        connection.close()
        return reply

    reply = _run(ask())
    if isinstance(reply, m.OperationReply):
        reply.status.raise_if_error()
    assert isinstance(reply, expected)
    return reply


def _run(request: Coroutine[Any, Any, Any]) -> Any:
    """Run the request to its end. Also works in a thread that already runs an event loop, such as a notebook's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(request)
    with ThreadPoolExecutor(1, "atoll-request") as pool:
        return pool.submit(asyncio.run, request).result()


class OperatorConnection:
    """A connection to a controller for any number of requests. Each has one reply, and replies arrive in order."""

    def __init__(self, connection: Connection, replies: _Replies) -> None:
        self._connection = connection
        self._replies = replies

    @classmethod
    async def open(cls, address: Address, token: str, join: JoinToken | None = None) -> OperatorConnection:
        """Connect. With a join token, the connection uses TLS and that token. Raises ConnectError or a subclass."""
        replies = _Replies(address)
        identity = None
        if join is not None:
            token, join = join.token, replace(join, address=address)
            identity = await asyncio.to_thread(_IDENTITIES.of, join, "the command atoll")
        token = token or token_beside(address)
        try:
            connection = await connect(
                address,
                m.ToOperator,
                replies.received,
                replies.connection_lost,
                name="the Atoll controller",
                identity=identity,
            )
        except AccessError:
            if join is not None:  # the cluster may have been restarted with another authority
                _IDENTITIES.forget(join)
            raise
        connection.send(m.Hello(m.PROTOCOL, "operator", token, os.getpid(), __version__, "atoll"))
        return cls(connection, replies)

    async def ask(self, request: m.Message, seconds: float = REPLY_SECONDS) -> Any:
        """Return the reply. Raises ConnectError or a subclass, also if no reply arrives within `seconds`.

        Raises INVALID_ARGUMENT if the request has a number of more than 64 bits.
        """
        replies = self._replies
        if replies.lost is not None:
            raise replies.lost
        try:
            self._connection.send(request)
        except OverflowError:
            raise invalid(f"{type(request).__name__} has a number of more than 64 bits") from None
        reply = replies.next()
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            # Replies have no numbers, so a late one would be taken for the reply to the next request.
            replies.fail(ConnectError(f"the controller at {replies.address} did not reply within {seconds:.0f} s"))
            self.close()
            assert replies.lost is not None
            raise replies.lost from None

    @property
    def is_lost(self) -> bool:
        return self._replies.lost is not None

    def close(self) -> None:
        self._connection.close()


async def ask_serving(
    address: Address, token: str, join: JoinToken | None, request: m.Message, seconds: float = REPLY_SECONDS
) -> tuple[OperatorConnection, Any]:
    """Connect to the controller that serves the cluster of an address, and return the connection and its first reply.

    This process dials the controller first that has issued its certificate. If that is a standby now, it refuses the
    connection, and the controller at another address issues a new certificate. Raises ConnectError or a subclass.
    """
    try:
        return await _connect_and_ask(address, token, join, request, seconds)
    except NotServingError:
        if join is None or not address.others:
            raise
        _IDENTITIES.forget(replace(join, address=address))
    return await _connect_and_ask(address, token, join, request, seconds)


async def _connect_and_ask(
    address: Address, token: str, join: JoinToken | None, request: m.Message, seconds: float
) -> tuple[OperatorConnection, Any]:
    connection = await OperatorConnection.open(address, token, join)
    try:
        return connection, await connection.ask(request, seconds)
    except BaseException:
        connection.close()
        raise


class _Replies:
    """The replies that are awaited on one connection, in order. All fail once the connection is `lost`."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.lost: ConnectError | None = None
        self._replies: deque[asyncio.Future[Any]] = deque()

    def next(self) -> asyncio.Future[Any]:
        """Return the reply to a request that is about to be sent."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        return reply

    def received(self, message: Any) -> None:
        if isinstance(message, m.Refused):
            self.fail(refusal(message.status, f"the cluster at {self.address} refuses the connection: "))
        elif self._replies:
            reply = self._replies.popleft()
            if reply.done():  # its caller has been canceled
                return
            if isinstance(message, m.OperationReply) and message.status.code == Code.PERMISSION_DENIED:
                reply.set_exception(AccessError(message.status.message))
            else:
                reply.set_result(message)

    def connection_lost(self, reason: str) -> None:
        text = f"no reply from {self.address}: {reason}; the request may have succeeded, and can be repeated"
        self.fail(ConnectError(text))

    def fail(self, error: ConnectError) -> None:
        self.lost = self.lost or error
        replies, self._replies = self._replies, deque()
        for reply in replies:
            if not reply.done():
                reply.set_exception(self.lost)
