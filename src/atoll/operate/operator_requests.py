"""An operator's request to a controller, and the reply. With a join token, by TLS; its token is then the one said."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.cluster.usage.usage_records import By
from atoll.errors import AccessError, Code, ConnectError, refusal
from atoll.protocol import messages as m
from atoll.protocol.spans import TraceRecord
from atoll.security.access import joined, token_beside
from atoll.security.join_token import JoinToken
from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect

REPLY_SECONDS = 10.0
OPERATION_SECONDS = 900.0  # longer than the controller tries to move something

Operation = (
    m.RemapRequest
    | m.SuspendRequest
    | m.ResumeRequest
    | m.AddIslandRequest
    | m.DrainRequest
    | m.SetTenant
    | m.RemoveTenant
    | m.EndSessionRequest
)


def request_report(address: Address, token: str, join: JoinToken | None = None) -> bytes:
    """What the cluster at `address` has and does, as JSON. Raises ConnectError and its kin."""
    reply = _run(_request(address, token, join, m.StatusRequest()))
    assert isinstance(reply, m.StatusReply)
    return reply.content


def request_dump(address: Address, token: str, join: JoinToken | None = None) -> bytes:
    """The event log of the controller at `address`; see `atoll.journal.event_log`. Raises ConnectError and its kin."""
    reply = _run(_request(address, token, join, m.DumpRequest()))
    assert isinstance(reply, m.DumpReply)
    return reply.content


def request_check(address: Address, token: str, join: JoinToken | None = None) -> m.CheckReply:
    """Whether what the controller keeps agrees with itself and with its hosts. Raises ConnectError and its kin."""
    reply = _run(_request(address, token, join, m.CheckRequest()))
    assert isinstance(reply, m.CheckReply)
    return reply


def request_trace(
    address: Address,
    token: str,
    since: int = 0,
    join: JoinToken | None = None,
    recording: m.RecordReply | None = None,
) -> TraceRecord:
    """What ran on the cluster's hosts and ended after `since`; or during a recording, which ends.

    Raises ConnectError and its kin.
    """
    request = m.TraceRequest(since)
    if recording is not None:
        request = m.TraceRequest(since, recording.position, recording=recording.recording)
    return merged(_run(_trace(address, token, join, request)))


async def _trace(address: Address, token: str, join: JoinToken | None, request: m.TraceRequest) -> list[TraceRecord]:
    """Return the parts of the trace, in order, up to what was recorded at the first reply."""
    connection = await OperatorConnection.open(address, token, join)
    try:
        parts, end = [], 0
        while True:
            reply = await connection.ask(request)
            if isinstance(reply, m.OperationReply):
                reply.status.raise_if_error()
            assert isinstance(reply, m.TraceReply)
            parts.append(msgspec.msgpack.decode(reply.content, type=TraceRecord))
            end = end or reply.end
            if reply.position >= end:
                return parts
            request = m.TraceRequest(request.since, reply.position)
    finally:
        connection.close()


def merged(parts: Sequence[TraceRecord]) -> TraceRecord:
    """Return the parts of a trace as one record, host by host in the order of the spans' ends."""
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
    """Has proxies record what clients ask, until `request_trace` or for so long. Raises ConnectError and its kin."""
    reply = _run(_request(address, token, join, m.RecordRequest(seconds)))
    assert isinstance(reply, m.RecordReply)
    return reply


def request_usage(address: Address, token: str, by: By, seconds: float, join: JoinToken | None = None) -> bytes:
    """Return the usage of the last `seconds` (0: of all time) as JSON. Raise ConnectError or a kin of it."""
    reply = _run(_request(address, token, join, m.UsageRequest(by, seconds)))
    assert isinstance(reply, m.UsageReply)
    return reply.content


def request_stop(
    address: Address, token: str, join: JoinToken | None = None, all_sessions: bool = False
) -> m.StopReply:
    """Returns as the controller ends its cluster, with who stays. Raises ConnectError and its kin."""
    reply = _run(_request(address, token, join, m.StopRequest(all_sessions)))
    assert isinstance(reply, m.StopReply)
    return reply


def request_operation(
    address: Address,
    token: str,
    operation: Operation,
    join: JoinToken | None = None,
    seconds: float = OPERATION_SECONDS,
) -> str:
    """Returns once the operation is done, with a sentence that says so.

    Raises StatusError where it cannot be done, ConnectError and its kin where nobody answers.
    """
    reply = _run(_request(address, token, join, operation, seconds))
    assert isinstance(reply, m.OperationReply)
    reply.status.raise_if_error()
    return reply.text


def _run(request: Coroutine[Any, Any, Any]) -> Any:
    """The reply. Blocks, also where this thread runs an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(request)
    with ThreadPoolExecutor(1, "atoll-request") as pool:
        return pool.submit(asyncio.run, request).result()


async def _request(
    address: Address, token: str, join: JoinToken | None, request: m.Message, seconds: float = REPLY_SECONDS
) -> Any:
    connection = await OperatorConnection.open(address, token, join)
    try:
        return await connection.ask(request, seconds)
    finally:
        connection.close()


class OperatorConnection:
    """A connection to a controller, for one request after another: each has one reply, and they come in order."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._replies: deque[asyncio.Future[Any]] = deque()
        self._lost: ConnectError | None = None
        self._connection: Connection

    @classmethod
    async def open(cls, address: Address, token: str, join: JoinToken | None = None) -> OperatorConnection:
        """Raises ConnectError and its kin. With a join token by TLS, with the token of that."""
        self = cls(address)
        identity = None
        if join is not None:
            token = join.token
            identity = await asyncio.to_thread(joined, replace(join, address=address), Role.CLIENT, "the command atoll")
        token = token or token_beside(address)
        self._connection = await connect(
            address, m.ToOperator, self._on_message, self._on_lost, name="the Atoll controller", identity=identity
        )
        self._connection.send(m.Hello(m.PROTOCOL, "operator", token, os.getpid(), __version__, "atoll"))
        return self

    def _on_message(self, message: Any) -> None:
        if isinstance(message, m.Refused):
            self._fail(refusal(message.status, f"the cluster at {self._address} refuses the connection: "))
        elif self._replies:
            reply = self._replies.popleft()
            if reply.done():  # nobody waits for it any more
                return
            if isinstance(message, m.OperationReply) and message.status.code == Code.PERMISSION_DENIED:
                reply.set_exception(AccessError(message.status.message))
            else:
                reply.set_result(message)

    def _on_lost(self, reason: str) -> None:
        text = f"no reply from {self._address}: {reason}; whether it was done is not known, and it may be asked again"
        self._fail(ConnectError(text))

    def _fail(self, error: ConnectError) -> None:
        self._lost = self._lost or error
        replies, self._replies = self._replies, deque()
        for reply in replies:
            if not reply.done():
                reply.set_exception(self._lost)

    async def ask(self, request: m.Message, seconds: float = REPLY_SECONDS) -> Any:
        """The reply. Raises ConnectError and its kin, also where it does not come within `seconds`."""
        if self._lost is not None:
            raise self._lost
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        self._connection.send(request)
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError:
            # Replies have no names: one that comes now would be taken for that of the next request.
            self._fail(ConnectError(f"the controller at {self._address} did not reply within {seconds:.0f} s"))
            self.close()
            assert self._lost is not None
            raise self._lost from None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def close(self) -> None:
        self._connection.close()
