"""The events that a controller handles. Its decisions depend on them alone, and on how it was started.

Time, secrets and all else that differs from run to run arrive in events, so the same events lead to the same actions,
to the last byte. A connection is known by the number that the shell gave it.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.usage.usage_records import Estimate
from atoll.protocol import messages as m


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all events. `seconds` is the time of the shell's clock, which never goes back."""

    seconds: float


class Received(Event, frozen=True, tag=1):
    """A connection's peer has sent a message."""

    connection: int
    message: m.ToController


# Of a flush, unless the shell says otherwise: of programs that are lowered, each step is the work for one node.
STEPS_PER_FLUSH = 64


class Flush(Event, frozen=True, tag=2):
    """The turn ends: its events are handled, and their actions are returned. No other event returns actions.

    At most so many `steps` of large work are done. The shell chooses them by the time that they took before.
    """

    steps: int = STEPS_PER_FLUSH


class Started(Event, frozen=True, tag=3):
    """The first event."""


class ConnectionOpened(Event, frozen=True, tag=4):
    """Somebody connects. `secret` is drawn at random: that of the session that this connection may become.

    `role` is that of a certificate (`security.roles`); "" where there is none, as on a unix socket. `address` is that
    of the peer, or the user of a unix socket.
    """

    connection: int
    secret: str
    role: str = ""
    address: str = ""


class ConnectionLost(Event, frozen=True, tag=5):
    """A connection has ended, by no decision of the controller's."""

    connection: int
    reason: str


class TimerEnded(Event, frozen=True, tag=6):
    """The time that a `SetTimer` asked for has passed."""

    timer: int


class Load(msgspec.Struct, frozen=True):
    """How busy the controller's process is; counts are since it began.

    `lag` is how late its event loop was at most, in seconds, since the measurement before.
    """

    lag: float = 0.0
    cpu_seconds: float = 0.0
    connections: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    unsent_bytes: int = 0


class Tick(Event, frozen=True, tag=7):
    """Comes once every `PING_SECONDS`. `load` is for reports alone; None where nobody measures it."""

    load: Load | None = None


class StopAsked(Event, frozen=True, tag=8):
    """The process is to end. With `persist_sessions`, sessions that are suspended on disk outlive the cluster."""

    persist_sessions: bool = False


class EstimatesRead(Event, frozen=True, tag=9):
    """The duration estimates of gangs that earlier clusters have stored."""

    estimates: tuple[Estimate, ...]


class Restarted(Event, frozen=True, tag=10):
    """The controller's process has ended, and another one goes on where it was, as the `term`-th.

    The clock goes on where it stopped: the time between does not count.
    """

    term: int


class SessionsPersisted(Event, frozen=True, tag=13):
    """An ended cluster has persisted these suspended sessions (`migration.persisted_sessions`), which this one
    restores.

    `secrets` are what hosts know them by, by session.
    """

    content: bytes
    secrets: dict[int, str] = {}


class ConnectionAway(Event, frozen=True, tag=11):
    """A connection has lost its socket, and its peer has some time to come back. What is sent to it is kept."""

    connection: int


class Skipped(Event, frozen=True, tag=14):
    """The controller failed at the event before this one, by a bug: that event is not handled, now or in a replay.

    The sessions of `connections` end, and so do `sessions`. The island of a worker at such a connection restarts.
    The tenant of these, and that of the `suspects`, which are connections, is charged if it is the only one. `reason`
    is for people.
    """

    reason: str
    connections: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()


class ConnectionBack(Event, frozen=True, tag=12):
    """Its peer is back, with nothing lost."""

    connection: int


AnyEvent = (
    Received
    | Flush
    | Started
    | ConnectionOpened
    | ConnectionLost
    | TimerEnded
    | Tick
    | StopAsked
    | EstimatesRead
    | Restarted
    | ConnectionAway
    | ConnectionBack
    | SessionsPersisted
    | Skipped
)
