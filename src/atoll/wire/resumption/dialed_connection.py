"""The driver of a dialer's link on an event loop; see `dialing_link`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from atoll.errors import ConnectError, FrameError
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.late_timers import ReadingTimer, call_later
from atoll.wire.resumption.dialing_link import Dial, DialingLink
from atoll.wire.resumption.link import LIMITS, LinkEvent, LinkLimits
from atoll.wire.resumption.resumable_connection import ResumableConnection
from atoll.wire.tls.identity import Identity


class DialedConnection(ResumableConnection[DialingLink]):
    """The dialer's end of a connection; see `dial`.

    The connection calls `on_away()` when it loses a transport, and `on_back()` when it has the next one. It calls
    `on_silence(True)` when its transport is silent, and `on_silence(False)` if the transport then receives something.
    `connect(address, on_message, on_lost, timeout)` makes a transport.
    """

    def __init__(
        self,
        link: DialingLink,
        connect: Callable[..., Awaitable[Connection]],
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        on_away: Callable[[], None] = lambda: None,
        on_back: Callable[[], None] = lambda: None,
        on_silence: Callable[[bool], None] = lambda is_silent: None,
    ) -> None:
        super().__init__(link, on_message, on_lost)
        self._connect = connect
        self._on_away, self._on_back, self._on_silence = on_away, on_back, on_silence
        self._dialing: asyncio.Task[None] | None = None
        self._answer: ReadingTimer | None = None  # when the acceptor must have confirmed a new transport
        self._ticks: asyncio.TimerHandle | None = None

    @property
    def can_resume(self) -> bool:
        """Whether the acceptor has sent a resume token, which arrives before its first message."""
        return self.link.token is not None

    @property
    def grace(self) -> float:
        """Seconds for which the acceptor waits for a peer that is away. 0 if the connection cannot be resumed."""
        return self.link.grace

    async def open(self, address: Address, timeout: float, patience: float = 0.0) -> None:
        """Connect the first transport. Raise ConnectError if that fails.

        If the acceptor admits nobody now, later transports try again for `patience` seconds.
        """
        transport = await self._connect(address, self._first, self._transport_lost, timeout)
        if not self.is_closed:
            self.link.open(transport.decoder, self._loop.time() + patience)
            self._adopt(transport, self._first)

    def _first(self, message: Any) -> None:
        """Handle the first message of a transport, before the acceptor has sent a resume token or confirmed."""
        self.link.first_message()
        self._receive_with(self._on_message)
        self._on_message(message)

    def _do(self, event: LinkEvent) -> None:
        super()._do(event)
        if self._answer is not None and event in (LinkEvent.FAILED, LinkEvent.BACK, LinkEvent.GRANTED):
            self._answer.cancel()
        match event:
            case LinkEvent.GRANTED:
                self._receive_with(self._on_message)
                self._ticks = self._loop.call_later(1.0, self._tick)
            case LinkEvent.AWAY:
                self._on_away()
                self._dial_next()
            case LinkEvent.FAILED:
                self._dial_next()
            case LinkEvent.BACK:
                self._receive_with(self._on_message)
                self._on_back()
            case LinkEvent.QUIET | LinkEvent.HEARD:
                self._on_silence(event is LinkEvent.QUIET)

    # ---- later transports

    def _dial_next(self) -> None:
        dial = self.link.next_dial(self._loop.time())
        if dial is not None:
            self._dialing = self._loop.create_task(self._dial(dial))
        self._do_effects()

    async def _dial(self, dial: Dial) -> None:
        await asyncio.sleep(dial.pause)
        early: list[str] = []
        try:
            transport = await self._connect(dial.address, _too_early, early.append, dial.seconds)
        except ConnectError as error:  # also AccessError, because a process that ends refuses in many ways
            self._failed(str(error))
            return
        if early:
            self._failed(early[0])
            return
        self.link.resume(transport.decoder)
        self._adopt(transport, self._first)
        self._do_effects()
        reason = f"{self.name} at {dial.address} does not answer"
        self._answer = call_later(self._loop, dial.seconds, partial(self._no_answer, transport, reason))

    def _failed(self, error: str) -> None:
        self.link.dial_failed(error)
        self._dial_next()

    def _no_answer(self, transport: Connection, reason: str) -> None:
        if self._transport is transport and self.link.is_starting:
            self.drop(reason)

    def _tick(self) -> None:
        self._ticks = self._loop.call_later(1.0, self._tick)
        self.link.tick(self._loop.time())
        self._do_effects()

    # ---- closing

    def close(self) -> None:
        """Close as `ResumableConnection.close`. A connection that `confirms_close` `is_closed` later."""
        self._on_lost = _ignore
        super().close()

    def _over(self) -> None:
        for timer in (self._answer, self._ticks):
            if timer is not None:
                timer.cancel()
        if self._dialing is not None and self._dialing is not asyncio.current_task(self._loop):
            self._dialing.cancel()

    # ---- addresses of the acceptor

    @property
    def put_off(self) -> str:
        """The reason why no acceptor has admitted this process yet, after one has put it off, or ""."""
        return self.link.put_off

    @property
    def address(self) -> Address:
        """The address of the last confirmed transport."""
        return self.link.address

    @property
    def refused_at(self) -> Address | None:
        """The address of the acceptor that finally refused to resume the connection."""
        return self.link.refused_at

    # ---- addresses of the transport; "" if the connection is away

    @property
    def local_host(self) -> str:
        return self._transport.local_host if self._transport is not None else ""

    @property
    def peer_host(self) -> str:
        return self._transport.peer_host if self._transport is not None else ""


def _ignore(reason: str) -> None:
    """Ignore the loss of a connection that was closed."""


def _too_early(message: Any) -> None:
    raise FrameError("a message arrived before the connection was resumed")


async def dial(
    address: Address,
    message_type: Any,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    *,
    name: str,
    timeout: float = 10.0,
    patience: float = 0.0,
    role: str = "controller",
    identity: Identity | None = None,
    on_away: Callable[[], None] = lambda: None,
    on_back: Callable[[], None] = lambda: None,
    on_silence: Callable[[bool], None] = lambda is_silent: None,
    limits: LinkLimits = LIMITS,
    connect: Callable[..., Awaitable[Connection]] = connect,
    confirms_close: bool = False,
) -> DialedConnection:
    """Dial a connection as `wire.endpoints.connect` does. It survives its sockets if the acceptor allows that.

    If the acceptor admits nobody now, the connection tries all addresses for `patience` seconds, and is lost then.
    A connection that `confirms_close` `is_closed` only when the acceptor knows that, or when the grace is over.
    """

    def connected(
        address: Address, on_message: Callable[[Any], None], on_lost: Callable[[str], None], timeout: float
    ) -> Awaitable[Connection]:
        return connect(
            address, message_type, on_message, on_lost, name=name, timeout=timeout, role=role, identity=identity
        )

    link = DialingLink(name, address, identity, limits, confirms_close)
    connection = DialedConnection(link, connected, on_message, on_lost, on_away, on_back, on_silence)
    await connection.open(address, timeout, patience)
    return connection
