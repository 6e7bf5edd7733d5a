"""The dialer's end of a resumable connection, on an event loop.

If the acceptor sends no resume token, the dialer keeps no messages, and the connection ends with its socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.errors import ConnectError, FrameError
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.resumption.link_messages import (
    FIRST_PAUSE_SECONDS,
    MOST_PAUSE_SECONDS,
    SILENT_SECONDS,
    Acknowledge,
    AlternateAddresses,
    AnyLinkMessage,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeRefusedError,
    ResumeToken,
)
from atoll.wire.resumption.peer_addresses import PeerAddresses
from atoll.wire.resumption.resumable_connection import ResumableConnection
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer
from atoll.wire.sockets import NEXT_SECONDS
from atoll.wire.tls.identity import Identity

_SILENCE = 2  # seconds; the acceptor sends at least once per second


class DialedConnection(ResumableConnection):
    """The dialer's end of a connection; see `dial`.

    The connection calls `on_away()` when it loses a transport, and `on_back()` when it has the next one. It calls
    `on_silence(True)` when its transport is silent, and `on_silence(False)` if the transport then receives something.
    """

    def __init__(
        self,
        address: Address,
        message_type: Any,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        name: str,
        role: str,
        identity: Identity | None,
        on_away: Callable[[], None] = lambda: None,
        on_back: Callable[[], None] = lambda: None,
        on_silence: Callable[[bool], None] = lambda is_silent: None,
    ) -> None:
        super().__init__(on_message, on_lost, name)
        self._on_away, self._on_back, self._on_silence = on_away, on_back, on_silence
        self._address = address
        self._addresses = PeerAddresses(address)
        self.where = address  # address of the last resumed transport, or of the peer if none was resumed yet
        self.refused_at: Address | None = None  # address of the acceptor that finally refused to resume
        self._message_type = message_type
        self._role = role
        self._identity = identity
        self._loop = asyncio.get_running_loop()
        self._resume_token: ResumeToken | None = None
        self._term = 0
        self._attempt = 0
        self._redialing: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None

    @property
    def can_resume(self) -> bool:
        """Whether the acceptor has sent a resume token, which arrives before its first message."""
        return self._resume_token is not None

    # ---- the first transport

    async def open(self, timeout: float) -> None:
        """Connect the first transport. Raise ConnectError if that fails."""
        transport = await self._connect(self._address, timeout, self._first, self._transport_lost)
        if not self._closed:
            self.adopt(transport)
            self._receive_with(self._first)

    def _first(self, message: Any) -> None:
        """Handle the first message. If no resume token arrived before it, keep no more messages."""
        transport = self._transport
        assert transport is not None
        if self._resume_token is None:
            self.retransmit_buffer = RetransmitBuffer()
            self._acknowledges = False
            # Without resumption, sending costs no more than with a plain connection.
            self.send, self.send_encoded = transport.send, transport.send_encoded  # type: ignore[method-assign]
            self.send_in_pieces = transport.send_in_pieces  # type: ignore[method-assign]
        self._receive_with(self._on_message)
        self._on_message(message)

    def _link(self, message: AnyLinkMessage) -> None:
        if isinstance(message, ResumeToken):
            is_first = self._resume_token is None
            self._resume_token, self._term = message, message.term
            self._receive_with(self._on_message)
            if is_first:
                self._look(0, 0)
            return
        if isinstance(message, AlternateAddresses):
            self._addresses.told(message, self._identity)
            return
        super()._link(message)
        if isinstance(message, Acknowledge) and self._acknowledged != self.received:
            self.acknowledge()

    # ---- later transports

    def _went_away(self, reason: str) -> None:
        if self._resume_token is None:
            self._lose(reason)
            return
        self._on_away()
        if self._redialing is None:
            self._redialing = self._loop.create_task(self._redial(reason, self._resume_token))

    async def _redial(self, reason: str, token: ResumeToken) -> None:
        deadline = self._loop.time() + token.seconds
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                error = await self._try_all(token)
                if error is None:
                    break
                if isinstance(error, ResumeRefusedError) and error.final:
                    self._lose(f"{reason}; {error}")
                    return
                if self._loop.time() > deadline:
                    self._lose(f"{reason}; reconnecting failed for {token.seconds:.0f} s: {error}")
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)
        finally:
            self._redialing = None
        if self._transport is None and not self._closed:  # the new transport was lost before this task resumed
            self._redialing = self._loop.create_task(self._redial(reason, token))

    async def _try_all(self, token: ResumeToken) -> ConnectError | ResumeRefusedError | None:
        """Try each of the addresses. Return the last error if no acceptor resumed the connection."""
        last: ConnectError | ResumeRefusedError | None = None
        for address in self._addresses.in_turn:
            try:
                await self._resume_at(address, token)
                return None
            except ConnectError as error:  # also AccessError, because a process that ends refuses in many ways
                last = error
            except ResumeRefusedError as error:
                last = error
                if error.final:
                    self.refused_at = address
                    break
                self._addresses.answered(address)
        return last

    async def _resume_at(self, address: Address, token: ResumeToken) -> None:
        resumed: asyncio.Future[None] = self._loop.create_future()

        def fail(error: ConnectError | ResumeRefusedError) -> None:
            if not resumed.done():
                resumed.set_exception(error)

        def on_link(message: AnyLinkMessage) -> None:
            match message:
                case Resumed(term=term) if term < self._term:
                    fail(ResumeRefusedError(f"{self._name} at {address} has an earlier term", False))
                case Resumed() if not resumed.done():
                    try:
                        self.where = address
                        self._addresses.answered(address)
                        self._resumed(transport, message)
                        resumed.set_result(None)
                    except FrameError as error:
                        fail(ResumeRefusedError(str(error), True))
                case ResumeRefused(reason=reason, final=final):
                    fail(
                        ResumeRefusedError(f"{self._name} at {address} does not resume the connection: {reason}", final)
                    )

        def on_lost(reason: str) -> None:
            fail(ConnectError(reason))

        transport = await self._connect(address, NEXT_SECONDS, self._on_message, on_lost)
        transport.set_handlers(self._on_message, on_lost, on_link)
        self._attempt += 1
        received = self.retransmit_buffer.received
        transport.send_link(Resume(token.number, token.secret, self._term, *received, self._attempt))
        try:
            async with asyncio.timeout(NEXT_SECONDS):
                await resumed
        except TimeoutError:
            raise ConnectError(f"{self._name} at {address} does not answer") from None
        finally:
            if not resumed.cancel() and not resumed.cancelled():
                resumed.exception()  # mark it as retrieved, because this task may have been cancelled
            if self._transport is not transport:
                transport.abort()

    def _resumed(self, transport: Connection, message: Resumed) -> None:
        """Adopt the resumed transport, and send the missing messages before any later ones."""
        self._term = message.term
        self.retransmit_buffer.acknowledge(Counts(message.whole, message.pieced))
        self.adopt(transport)
        self._acknowledged = self.received
        self._send_again()
        self._on_back()

    async def _connect(
        self, address: Address, timeout: float, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> Connection:
        return await connect(
            address,
            self._message_type,
            on_message,
            on_lost,
            name=self._name,
            timeout=timeout,
            role=self._role,
            identity=self._identity,
        )

    # ---- silence

    def _look(self, bytes_in: int, silent: int) -> None:
        """Detect silence of the transport. Runs once per second."""
        if self._closed:
            return
        transport = self._transport
        now = transport.bytes_in if transport is not None else 0
        before, silent = silent, silent + 1 if transport is not None and now == bytes_in else 0
        if transport is not None and (before >= _SILENCE) != (silent >= _SILENCE):
            self._on_silence(silent >= _SILENCE)
        if silent >= SILENT_SECONDS:
            self.drop(f"{self._name} was silent for {silent} s")
            silent = 0
        self._looking = self._loop.call_later(1.0, self._look, now, silent)

    # ---- closing

    def _over(self) -> None:
        super()._over()
        if self._looking is not None:
            self._looking.cancel()
        if self._redialing is not None and self._redialing is not asyncio.current_task(self._loop):
            self._redialing.cancel()

    # ---- addresses of the transport; "" if the connection is away

    @property
    def local_host(self) -> str:
        return self._transport.local_host if self._transport is not None else ""

    @property
    def peer_host(self) -> str:
        return self._transport.peer_host if self._transport is not None else ""


async def dial(
    address: Address,
    message_type: Any,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    *,
    name: str,
    timeout: float = 10.0,
    role: str = "controller",
    identity: Identity | None = None,
    on_away: Callable[[], None] = lambda: None,
    on_back: Callable[[], None] = lambda: None,
    on_silence: Callable[[bool], None] = lambda is_silent: None,
) -> DialedConnection:
    """Dial a connection as `wire.endpoints.connect` does. It survives its sockets if the acceptor allows that."""
    connection = DialedConnection(
        address, message_type, on_message, on_lost, name, role, identity, on_away, on_back, on_silence
    )
    await connection.open(timeout)
    return connection
