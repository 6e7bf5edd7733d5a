"""A session's link to a simulated cluster: of `proxy.link`, what a bare client uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import ClusterError, Status
from atoll.operate.engines.virtual.tasks import Future
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox


class SimulatedLink:
    """`send` has the session's messages reach the controller; `handle` takes the replies. `inboxes` are the hosts'."""

    def __init__(
        self, welcome: m.Welcome, send: Callable[[Any], None], inboxes: dict[int, Inbox], on_close: Callable[[], None]
    ) -> None:
        self.welcome = welcome
        self.send = send
        self.close = on_close
        self.on_credit_returned: Callable[[int], None] = lambda count: None
        self._inboxes = inboxes
        self._hosts = {device.id: device.host for device in welcome.devices}
        self._waits: dict[int, Callable[[Status], None]] = {}
        self._functions: dict[int, Future[m.FunctionReady]] = {}
        self._next = 1

    def number(self) -> int:
        self._next += 1
        return self._next

    def wait(self, handles: Sequence[int], then: Callable[[Status], None]) -> None:
        number = self.number()
        self._waits[number] = then
        self.send(m.Await(number, tuple(handles)))

    async def register_function(
        self, source: bytes, content: str, assignment: tuple[tuple[int, ...], ...]
    ) -> tuple[int, bytes]:
        """As `Link.register_function`. The source is at its hosts at once."""
        number, feed = self.number(), self.number()
        future = self._functions[number] = Future()
        for host in sorted({self._hosts[device] for partitions in assignment for device in partitions}):
            self._inboxes[host].put(self.welcome.session, feed, source)
        self.send(m.RegisterFunction(number, content, feed, assignment))
        ready = await future
        ready.status.raise_if_error()
        return number, ready.info

    def handle(self, message: Any) -> None:
        match message:
            case m.CreditReturned(launches=launches):
                self.on_credit_returned(launches)
            case m.Awaited(wait=wait, status=status):
                self._waits.pop(wait)(status)
            case m.FunctionReady(function=function):
                self._functions.pop(function).set_result(message)
            case m.Closing(status=status):
                raise ClusterError(f"the controller has closed session {self.welcome.session}: {status}")
