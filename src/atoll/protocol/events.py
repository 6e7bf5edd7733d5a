"""The events that a controller handles. Its decisions depend only on them and on its start options.

Time, secrets and all other values that differ between runs are part of events, so the same events lead to exactly the
same actions. The shell numbers connections.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.usage.usage_records import Estimate
from atoll.protocol import messages as m


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base class of events. `seconds` is the time of the shell's clock, which never decreases."""

    seconds: float


class Received(Event, frozen=True, tag=1):
    """A peer has sent a message."""

    connection: int
    message: m.ToController


# Default of `Flush.steps`. When a program is lowered, a step is the work for one node.
STEPS_PER_FLUSH = 64


class Flush(Event, frozen=True, tag=2):
    """The end of a turn, whose actions are returned. No other event returns actions.

    The controller performs at most `steps` of large work. The shell bases the number on the duration of earlier steps.
    """

    steps: int = STEPS_PER_FLUSH


class Started(Event, frozen=True, tag=3):
    """The first event."""


class ConnectionOpened(Event, frozen=True, tag=4):
    """A peer has connected. `secret` is a random secret for the session, if the connection opens one.

    `role` is the role in the peer's certificate (`security.roles`), or "" without one, as on a unix socket. `address`
    is the peer's IP address or the user of a unix socket.
    """

    connection: int
    secret: str
    role: str = ""
    address: str = ""


class ConnectionLost(Event, frozen=True, tag=5):
    """A connection has ended without a decision of the controller."""

    connection: int
    reason: str


class TimerEnded(Event, frozen=True, tag=6):
    """The time of a `SetTimer` has passed."""

    timer: int


class JournalLoad(msgspec.Struct, frozen=True):
    """The state of a journal."""

    complete: bool  # whether a controller can continue from it
    snapshots: int  # number of snapshots that this process has written
    snapshot_age: float  # seconds since the last snapshot
    bytes: int  # bytes of events since the last snapshot
    standby: str = ""  # address of a standby that has all events and takes over if the controller ends; empty: none
    lease: str = ""  # name of the external lease; empty: none
    holds_lease: bool = False  # whether the controller holds the lease; without it, it sends nothing to its peers
    pause: float = 0.0  # seconds for which the controller stood still to begin the last snapshot


class Load(msgspec.Struct, frozen=True):
    """The load of the controller's process. Counts are since its start."""

    lag: float = 0.0  # maximal delay of the event loop since the previous measurement, in seconds
    cpu_seconds: float = 0.0  # CPU time of the process
    connections: int = 0  # number of open connections
    messages_in: int = 0  # number of received messages
    messages_out: int = 0  # number of sent messages
    bytes_in: int = 0  # bytes received
    bytes_out: int = 0  # bytes sent
    unsent_bytes: int = 0  # bytes that wait for slow peers
    journal: JournalLoad | None = None  # the state of the journal; null: without `--journal`
    certificate_seconds: float = -1.0  # validity that remains of the controller's certificate; -1: without TLS


class ClockReading(msgspec.Struct, frozen=True):
    """The clocks of a machine at one time, in seconds."""

    wall: float
    uptime: float  # the monotonic clock, which counts from the machine's start
    boot: str  # names that start


class Tick(Event, frozen=True, tag=7):
    """A period of `PING_SECONDS` has passed. `load` is only for reports, and None if it is not measured.

    The process was stopped for `skipped` seconds before this event, which its clock did not count. `reading` is that of
    the machine's clocks, from which a later process knows the time between the two processes. Both are only for traces.
    """

    load: Load | None = None
    skipped: float = 0.0
    reading: ClockReading | None = None


class StopAsked(Event, frozen=True, tag=8):
    """The process must end. With `persist_sessions`, sessions suspended on disk are persisted for the next cluster."""

    persist_sessions: bool = False


class EstimatesRead(Event, frozen=True, tag=9):
    """Duration estimates of gangs that earlier clusters have stored."""

    estimates: tuple[Estimate, ...]


class Restarted(Event, frozen=True, tag=10):
    """A new process continues the work of a controller that has ended, in term `term`.

    The clock also continues, without the time between the processes. That is `skipped` seconds, which is only for
    traces.
    """

    term: int
    skipped: float = 0.0


class SessionsPersisted(Event, frozen=True, tag=13):
    """Suspended sessions and published arrays that an ended cluster has persisted, to restore.

    `content` is encoded by `migration.persisted_sessions`. `secrets` are the secrets by
    session with which hosts identify them.
    """

    content: bytes
    secrets: dict[int, str] = {}


class ConnectionAway(Event, frozen=True, tag=11):
    """A connection has lost its socket, and its peer has some time to resume it. Messages to the peer are kept."""

    connection: int


class Skipped(Event, frozen=True, tag=14):
    """Skip the event before this one, at which the controller failed because of a bug, now and in a replay.

    Without `skips`, the bug has changed nothing, and the event before this one is handled.

    `sessions` and the sessions of `connections` end. If a worker has one of the connections, its island restarts. If
    these and the connections `suspects` belong to a single tenant, the bug is charged to it. `reason` is for users.
    """

    reason: str
    connections: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    skips: bool = True


class ConnectionBack(Event, frozen=True, tag=12):
    """A peer has resumed its connection, and no messages are lost."""

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
