"""The data channels of one session to the workers of all hosts, across the restarts of these.

What is sent to a host that is gone waits for it to be back. All methods run on the event loop's thread but for what the
docstrings say.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.errors import AtollError, Code, Status
from atoll.transfers.channel import DataChannel
from atoll.transfers.engine import Piece
from atoll.wire.address import Address

# The controller tells that a host is lost soon after its channel broke; else it is the channel alone that broke.
_NEWS_SECONDS = 3.0

_OnPiece = Callable[[Piece, Any, Callable[[], None]], None]
_Send = Callable[[DataChannel], None]


class Channels:
    """One channel a host. `on_broken(status)` is called where one breaks whose host is still there."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_piece: _OnPiece, on_broken: Callable[[Status], None]
    ) -> None:
        self._loop = loop
        self._on_piece = on_piece
        self._on_broken = on_broken
        self._open: dict[int, DataChannel] = {}
        self._absent: dict[int, list[tuple[_Send, bool]]] = {}  # by host: what to send, and whether it is small
        self._broken_for_now: dict[int, asyncio.TimerHandle] = {}  # by host, until the controller tells of its loss
        self._senders = ThreadPoolExecutor(2, "atoll-upload")
        self._closed = False

    async def open(self, host: int, address: Address, session: int, secret: str) -> None:
        """Opens the channel, and sends what has waited for it. Raises ConnectError."""
        channel = await self._loop.run_in_executor(None, _open, address, session, secret)
        if self._closed:
            channel.close()
            return
        self._open[host] = channel
        self._explained(host)
        threading.Thread(target=self._receive, args=(host, channel), name="atoll-download", daemon=True).start()
        for send, small in self._absent.pop(host, ()):
            self.send(host, send, small)

    def send(self, host: int, send: _Send, small: bool) -> None:
        """Has `send(channel)` called: here and now if it is `small`, else on a thread; or once the host is back."""
        channel = self._open.get(host)
        if channel is None:
            self._absent.setdefault(host, []).append((send, small))
        elif small:
            self._try(host, channel, send)
        else:
            self._senders.submit(self._try, host, channel, send)

    def lose(self, hosts: Iterable[int]) -> None:
        """The controller says that these hosts are gone, for now."""
        for host in hosts:
            self._explained(host)
            channel = self._open.pop(host, None)
            if channel is not None:
                channel.close()

    def close(self) -> None:
        self._closed = True
        for channel in self._open.values():
            channel.close()
        self._open.clear()
        self._absent.clear()
        self._senders.shutdown(wait=False, cancel_futures=True)

    # ---- on any thread

    def _try(self, host: int, channel: DataChannel, send: _Send) -> None:
        try:
            send(channel)
        except (OSError, AtollError) as error:
            self._tell(self._broken, host, channel, f"bulk data cannot be sent to host {host}: {error}")

    def _receive(self, host: int, channel: DataChannel) -> None:
        try:
            channel.receive(lambda *piece: self._tell(self._on_piece, *piece))
            reason = "it closed the connection"
        except (AtollError, OSError) as error:
            reason = str(error)
        self._tell(self._broken, host, channel, f"the data port of host {host} is gone: {reason}")

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(what, *arguments)

    # ---- breaks

    def _broken(self, host: int, channel: DataChannel, reason: str) -> None:
        if self._closed or self._open.get(host) is not channel:
            return
        del self._open[host]
        channel.close()
        self._broken_for_now[host] = self._loop.call_later(_NEWS_SECONDS, self._still_there, host, reason)

    def _explained(self, host: int) -> None:
        """The host was lost or is back: what broke was its end, and not its channel alone."""
        timer = self._broken_for_now.pop(host, None)
        if timer is not None:
            timer.cancel()

    def _still_there(self, host: int, reason: str) -> None:
        del self._broken_for_now[host]
        if not self._closed:
            self._on_broken(Status(Code.UNAVAILABLE, reason))


def _open(address: Address, session: int, secret: str) -> DataChannel:
    channel = DataChannel.dial(address)
    channel.open(session, secret)
    return channel
