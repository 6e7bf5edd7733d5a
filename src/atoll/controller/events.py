"""The controller's event log: everything that it was told, in order, from which its decisions replay.

The state machine decides by its events alone: the same events in the same order make it say the same things (but for
the secrets of sessions, which come from the system). So a log is a complete account of why something happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.controller.outbox import Destination
from atoll.protocol import messages as m

# Beyond so many the oldest go, and the log no longer replays from the beginning.
MOST_EVENTS = 50_000

_Said = m.ToController | m.WorkerReady | m.WorkerEnded


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One call of the controller. `who` is a host, a session or an island, as `what` has it."""

    seconds: float  # of the shell's clock
    what: str
    who: int = 0
    text: str = ""
    message: bytes = b""  # a control message, encoded


class Header(msgspec.Struct, frozen=True):
    """How the controller was started, and how many events are missing at the beginning."""

    version: str
    settings: ClusterSettings
    missing: int = 0


class EventLog:
    """Passes events on to a controller, and keeps them."""

    def __init__(self, controller: Controller, settings: ClusterSettings, version: str) -> None:
        self.controller = controller
        self._events: deque[tuple[float, str, int, str, Any]] = deque(maxlen=MOST_EVENTS)
        self._count = 0
        self._header = Header(version, settings)

    def tell(self, seconds: float, what: str, who: int = 0, text: str = "", message: Any = None) -> Any:
        """The event happens. Returns what the controller does; raises what it raises."""
        self._events.append((seconds, what, who, text, message))
        self._count += 1
        return apply(self.controller, seconds, what, who, text, message)

    def dump(self) -> bytes:
        """A line of JSON for the start, and one for each event."""
        encode = msgspec.json.encode
        lines = [encode(msgspec.structs.replace(self._header, missing=self._count - len(self._events)))]
        for seconds, what, who, text, message in self._events:
            body = b"" if message is None else msgspec.msgpack.encode(message)
            lines.append(encode(Event(seconds, what, who, text, body)))
        return b"\n".join(lines) + b"\n"


def apply(controller: Controller, seconds: float, what: str, who: int, text: str, message: Any) -> Any:
    """Has the event happen to a controller."""
    match what:
        case "proxy":
            return controller.from_proxy(who, message)
        case "worker":
            controller.leases.heard(who, seconds)
            return controller.from_worker(who, message)
        case "session opens":
            return controller.open_session(who, text)
        case "session ends":
            return controller.close_session(who)
        case "worker joins":
            controller.leases.heard(message.host, seconds)
            return controller.worker_joined(message, who)
        case "worker lost":
            return controller.worker_lost(who, text)
        case "worker ended":
            return controller.worker_ended(message)
        case "island ended":
            return controller.island_ended(who)
        case "operator":
            return controller.from_operator(who, message)
        case "island given up":
            return controller.island_given_up(who, text)
        case "tick":
            return controller.tick(seconds)
        case "flush":
            return controller.take_outbox()
    raise ValueError(f"no event of a controller: {what!r}")


def replay(lines: Iterable[bytes]) -> Iterator[tuple[Event, list[tuple[Destination, Any]]]]:
    """Each event of a dump, and what a controller says that is told the same. Raises ValueError for what is no dump.

    Messages leave at the events named "flush".
    """
    rows = iter(lines)
    try:
        header = msgspec.json.decode(next(rows), type=Header)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise ValueError(f"this is no event log: {error}") from None
    if header.missing:
        raise ValueError(f"the first {header.missing} events are missing: such a log can be read, and not replayed")
    controller = Controller(Topology.parse(header.settings.islands), header.settings)
    for row in rows:
        event = msgspec.json.decode(row, type=Event)
        message = msgspec.msgpack.decode(event.message, type=_Said) if event.message else None
        try:
            said = apply(controller, event.seconds, event.what, event.who, event.text, message)
        except Exception:
            said = None  # as it was: the shell has ended the session, which is the next event
        yield event, said if event.what == "flush" and said else []
