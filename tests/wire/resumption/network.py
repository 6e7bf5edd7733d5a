"""A network in memory between a dialed connection and a table, which cuts transports as a test asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from atoll.errors import ConnectError
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.resumption.accepted_link import AcceptedLink, Acceptor
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.resumption.link import LIMITS, LinkLimits
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume, ResumeRefused
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.resumable_connections import AcceptedConnection, ResumableConnections

PATIENCE_SECONDS = 60.0  # in which something happens on any machine, however busy
_OWN_PATIENCE_SECONDS = 10.0  # the same, in a test's own time
_TURN_SECONDS = 1e-5


class _Loop(asyncio.SelectorEventLoop):
    """Its time passes where it has nothing to do, to the next timer; and a little with each turn.

    So a deadline is one of what happens here, however busy the machine is: something that has not come by then never
    comes. For what has no file to wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def at_once(timeout: float | None) -> Any:
            assert timeout is not None, "nobody would ever wake it"
            self._now += max(timeout, _TURN_SECONDS)
            return select(0)

        self._selector.select = at_once  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def play(main: Callable[[], Awaitable[None]], seconds: float = 3 * _OWN_PATIENCE_SECONDS) -> None:
    """Run a test in virtual time, for at most `seconds`."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_whole(main, seconds))


async def _whole(main: Callable[[], Awaitable[None]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await main()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message."""


class Note(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int
    content: bytes = b""


class End:
    """One end of a transport: the `asyncio` transport of its connection."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.protocol: Connection
        self.other: End
        self.is_open = True

    def write(self, data: Any) -> None:
        if self.is_open:
            self.network.carry(self, bytes(data))

    def deliver(self, data: bytes) -> None:
        if self.is_open:
            buffer = self.protocol.get_buffer(-1)
            buffer[: len(data)] = data
            self.protocol.buffer_updated(len(data))

    def lose(self) -> None:
        if self.is_open:
            self.is_open = False
            self.protocol.connection_lost(None)

    def close(self) -> None:
        """Close after delivering what was written."""
        asyncio.get_running_loop().call_soon(self.abort)

    def abort(self) -> None:
        self.is_open = False
        asyncio.get_running_loop().call_soon(self.other.lose)

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        """There are none."""


class Network:
    """Carries bytes in parts of at most `part`, and cuts the transport after each of the byte counts in `cuts`."""

    def __init__(self, cuts: Sequence[int], part: int = 4096) -> None:
        self.part = part
        self.can_dial = True
        self.transports = 0
        self.ends: list[End] = []  # of the newest transport, the dialer's first
        self.listener: Listener
        self.others: dict[str, Listener] = {}  # by where they listen, for dialers that know several addresses
        self.cut_after(cuts)

    def cut_after(self, cuts: Sequence[int]) -> None:
        self.cuts = list(cuts)
        self._left = self.cuts.pop(0) if self.cuts else -1

    def carry(self, end: End, data: bytes) -> None:
        while data:
            part, data = data[: self.part], data[self.part :]
            if 0 <= self._left < len(part):
                part, data, self._left = part[: self._left], b"", -1
                asyncio.get_running_loop().call_soon(end.other.deliver, part)
                asyncio.get_running_loop().call_soon(self.cut, end)
                return
            self._left -= len(part) if self._left >= 0 else 0
            asyncio.get_running_loop().call_soon(end.other.deliver, part)

    def cut(self, end: End) -> None:
        for each in (end, end.other):
            each.lose()
        self._left = self.cuts.pop(0) if self.cuts else -1

    async def connect(
        self, address: Any, kind: Any, on_message: Callable[[Any], None], on_lost: Any, *, name: str, **_: Any
    ) -> Connection:
        await asyncio.sleep(0)
        listener = self.others.get(address.path, self.listener)
        if not self.can_dial:
            raise ConnectError("nobody listens there")
        self.transports += 1
        self.ends = [End(self), End(self)]
        (here, there), (dialed, accepted) = (
            self.ends,
            (
                Connection(kind, on_message, on_lost, name=name),
                listener.accept(),
            ),
        )
        here.other, there.other, here.protocol, there.protocol = there, here, dialed, accepted
        accepted.connection_made(there)  # type: ignore[arg-type]
        dialed.connection_made(here)  # type: ignore[arg-type]
        return dialed


class _Accepted(Connection):
    """A connection that passes on why it is refused."""

    def __init__(
        self,
        kind: Any,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        on_refusal: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(kind, on_message, on_lost, **options)
        self._on_refusal = on_refusal

    def refuse(self, reason: str) -> None:
        self._on_refusal(reason)


class Listener:
    """Grants each connection; keeps what comes on the first, which is the one that tests dial."""

    def __init__(self, grants: bool = True, seconds: float = 5.0, term: int = 1, limits: LinkLimits = LIMITS) -> None:
        self.grants = grants
        self.puts_off = 0  # the next first messages
        self.messages: list[Any] = []
        self.events: list[str] = []
        self.refusals: list[str] = []  # that a controller would log
        self.connection: AcceptedConnection | Connection
        self.watched: dict[int, Callable[[], None]] = {}
        self.superseded: list[int] = []  # later terms of peers
        self.acceptor = Acceptor(term, seconds, b"a key")
        self.table = self.make_table(limits)

    def make_table(self, limits: LinkLimits) -> ResumableConnections:
        return ResumableConnections(
            self.acceptor,
            on_away=lambda number: self.events.append("away"),
            on_back=lambda number: self.events.append("back"),
            acknowledge_soon=lambda connection: connection.acknowledge(),
            commit=lambda: None,
            watch=self._watch,
            on_superseded=lambda message: self.superseded.append(message.term),
            limits=limits,
        )

    def _watch(self, pid: int, then: Callable[[], None]) -> None:
        self.watched[pid] = then

    def lost(self, reason: str) -> None:
        self.events.append(reason)

    def restore(self, record: LinkRecord) -> None:
        """Continue the connection of another listener."""
        self.connection = self.table.add(AcceptedLink(self.acceptor, record), self.messages.append, self.lost)

    def refuse(self) -> Connection:
        """As a process that is about to end."""
        transport = Connection(Hello | Note, self.messages.append, lambda reason: None)
        asyncio.get_running_loop().call_soon(transport.abort)
        return transport

    def accept(self) -> Connection:
        def first(message: Any) -> None:
            if self.puts_off:
                self.puts_off -= 1
                transport.ignore()
                transport.send_link(ResumeRefused("not now", final=False))
                transport.close()
                return
            transport.set_handlers(self.messages.append, self.lost, on_link)
            self.connection = transport
            if self.grants:
                self.connection = self.table.grant(1, transport, self.messages.append, self.lost)

        def on_link(message: AnyLinkMessage) -> None:
            assert isinstance(message, Resume)
            transport.ignore()
            self.table.resume(transport, message)

        transport = _Accepted(
            Hello | Note, first, lambda reason: None, self.refusals.append, name="the worker", on_link=on_link
        )
        return transport


class Dialer:
    """The other end, and what it got."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.silences: list[bool] = []
        self.connection: DialedConnection

    @classmethod
    async def open(
        cls,
        network: Network,
        listener: Listener,
        *others: str,
        limits: LinkLimits = LIMITS,
        patience: float = 0.0,
        on_back: Callable[[], None] = lambda: None,
        confirms_close: bool = False,
    ) -> Dialer:
        """Send a Hello. The dialer also knows other addresses."""
        network.listener = listener
        self = cls()
        self.connection = await dial(
            Address(path="/there", others=tuple(Address(path=each) for each in others)),
            Note,
            self.messages.append,
            self.lost.append,
            name="the controller",
            on_silence=self.silences.append,
            limits=limits,
            patience=patience,
            on_back=on_back,
            connect=network.connect,
            confirms_close=confirms_close,
        )
        self.connection.send(Hello())
        return self


def pass_unnoticed(seconds: float) -> None:
    """Let time pass as if this process was stopped meanwhile."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop._now += seconds


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds. Fail after a time that would suffice on any machine."""
    has_own_time = isinstance(asyncio.get_running_loop(), _Loop)
    async with asyncio.timeout(_OWN_PATIENCE_SECONDS if has_own_time else PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.001)
