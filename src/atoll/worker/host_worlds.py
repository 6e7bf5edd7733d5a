"""The worlds that this host has joined or joins: see `devices.xla.xla_world`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from atoll.devices.device import WorldMaker
from atoll.errors import Code, Details, Kind, Status, failure, status_of
from atoll.host_services.python.rendezvous import KeyValues
from atoll.protocol import messages as m

# Worlds that were closed last, of which functions may still arrive.
_CLOSED_WORLDS = 1024


class _Joining(msgspec.Struct, eq=False):
    """A world, with the functions that wait until this host has joined it.

    `status` is None until then.
    """

    status: Status | None = None
    is_closed: bool = False
    waiting: list[Callable[[Status], None]] = msgspec.field(default_factory=list)


class HostWorlds:
    """Joins and closes worlds, each on its own thread. Any thread may call the methods.

    Args:
        maker: Joins worlds of this host's devices.
        report: Sends messages to the controller.
        address: Returns a free address for the service of a world that this host starts.
        hostname: The address at which collectives of this host receive messages of other hosts.
    """

    def __init__(
        self, maker: WorldMaker, report: Callable[..., None], address: Callable[[int], str], hostname: str
    ) -> None:
        self._maker = maker
        self._report = report
        self._address = address
        self.hostname = hostname
        self._lock = threading.Lock()
        self._worlds: dict[int, _Joining] = {}
        self._closed: OrderedDict[int, m.CloseWorld] = OrderedDict()

    def join(self, message: m.JoinWorld) -> None:
        """Join a world, on another thread."""
        with self._lock:
            joining = self._worlds.setdefault(message.world, _Joining())
        threading.Thread(target=self._join, args=(message, joining), name="atoll-join-world", daemon=True).start()

    def when_joined(self, world: int, then: Callable[[Status], None]) -> None:
        """Call `then` with the outcome when this host has joined the world, or the world is closed, on any thread."""
        with self._lock:
            closed = self._closed.get(world)
            status = None if closed is None else closed.status
            if status is None:
                joining = self._worlds.setdefault(world, _Joining())
                status = joining.status
                if status is None:
                    joining.waiting.append(then)
                    return
        then(status)

    def has_joined(self, world: int) -> bool:
        """Return whether this host has joined the world, which is not closed."""
        with self._lock:
            joining = self._worlds.get(world)
            return (
                world not in self._closed and joining is not None and joining.status is not None and joining.status.ok
            )

    def note_closing(self, message: m.CloseWorld) -> None:
        """Note that a world is closed: functions that arrive for it from now on fail."""
        with self._lock:
            self._closed[message.world] = message
            if len(self._closed) > _CLOSED_WORLDS:
                self._closed.popitem(last=False)

    def closing_of(self, world: int) -> m.CloseWorld | None:
        """Return the message that closed the world, or None if it is not closed."""
        return self._closed.get(world)

    def key_values(self, world: int) -> KeyValues:
        """Return the store that the hosts of a joined world share. Raise FAILED_PRECONDITION if it was closed."""
        return self._maker.key_values(world)

    def close(self, message: m.CloseWorld) -> None:
        """Leave a world whose closing was noted. Functions that wait for it fail."""
        waiting: list[Callable[[Status], None]] = []
        with self._lock:
            joining = self._worlds.pop(message.world, None)
            if joining is not None:
                joining.is_closed = True
                waiting, joining.waiting = joining.waiting, []
        self._maker.close(message.world)
        for then in waiting:
            then(message.status)

    def _join(self, message: m.JoinWorld, joining: _Joining) -> None:
        status = Status()
        try:
            address = message.address
            if not address:
                address = self._address(message.world)
                self._maker.serve(message.world, address, message.ranks)
                self._report(m.WorldServed(message.world, address))
            self._maker.join(message.world, address, message.rank, message.ranks, self.hostname)
        except Exception as error:
            islands = ", ".join(map(str, message.islands))
            text = f"this host cannot join the hosts of islands {islands}: {status_of(error).message}"
            status = failure(Code.UNAVAILABLE, text, Details(Kind.LINK, retriable=True))
            if not joining.is_closed:
                self._report(m.WorldFailed(message.world, status))
        with self._lock:
            joining.status = status
            waiting, joining.waiting = joining.waiting, []
            is_closed = joining.is_closed
        if is_closed:  # while this host joined it
            self._maker.close(message.world)
        for then in waiting:
            then(status)
