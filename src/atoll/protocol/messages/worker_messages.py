"""Between controller and workers."""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.errors import Status
from atoll.ir.plan import Plan
from atoll.protocol.messages.opening_messages import DeviceInfo, Message, Refused
from atoll.protocol.messages.relay_messages import Forward, JoinGroup
from atoll.protocol.messages.spill_messages import DropSpilled, SendSpilled, SendSpilledFailed, SpillReply, SpillRequest

# ---- worker -> controller


class WorkerReady(Message, frozen=True, tag=10):
    """A worker's devices, where its data port listens, and how many runs may be in flight on it."""

    island: int
    host: int
    devices: tuple[DeviceInfo, ...]
    platform: str
    platform_version: str
    data_address: str
    max_in_flight: int
    sandbox: Mechanisms | None = None  # for users' Python on this machine; None: not known


class Compiled(Message, frozen=True, tag=11):
    """A function can run here, or the status says why not.

    `info` is an encoded `FunctionInfo`, of which the controller reads `FunctionOutputs`; empty for a Python function.
    """

    function: str
    status: Status
    info: bytes
    seconds: float
    cached: bool
    scratch_bytes: int = 0  # that it needs on each of its devices while it runs
    calls_client: bool = False  # while it runs
    name: str = ""  # by which people know it
    crashed: bool = False  # the compiler process ended by a signal or at a limit, which the status names


class Done(Message, frozen=True, tag=12):
    """Dispatch units that have ended: (sequence number, start, end), times in nanoseconds of the host's clock."""

    runs: tuple[tuple[int, int, int], ...]


class Failed(Message, frozen=True, tag=13):
    """A dispatch unit failed; the results of its run hold the status from now on."""

    sequence: int
    status: Status


class FeedsArrived(Message, frozen=True, tag=14):
    """Feeds of a client that are now complete at this worker's data port."""

    session: int
    feeds: tuple[int, ...]


class WorkerAnswer(Message, frozen=True, tag=15):
    """The answer to a Query."""

    session: int
    query: int
    status: Status
    payload: bytes


class Enqueued(Message, frozen=True, tag=16):
    """A dispatch unit that was to be acknowledged has been enqueued on the devices."""

    sequence: int


class Pong(Message, frozen=True, tag=17):
    """The answer to a Ping: its `seconds`, and what the sender's monotonic clock says, in nanoseconds; -1: nothing.

    `running`: gangs that keep the devices of the sending host busy.
    """

    seconds: float = 0.0
    clock: int = -1
    running: tuple[int, ...] = ()


class FeedsLost(Message, frozen=True, tag=19):
    """Feeds that this host sent to `host` may not have arrived there, since the connection between the two broke."""

    host: int
    feeds: tuple[tuple[int, int], ...]  # (session, feed)
    status: Status


class PeerSilent(Message, frozen=True, tag=52):
    """This host has heard nothing of `host` for longer than the lease. Said again for as long as that lasts."""

    host: int
    seconds: float


class PlanRegistered(Message, frozen=True, tag=53):
    """The answer to a RegisterPlan that asks for it."""

    plan: int


class ValueReported(Message, frozen=True, tag=55):
    """What the number is that a dispatch unit was to report. Comes beside the unit's end, not instead of it."""

    sequence: int
    value: int


class RowsMoved(Message, frozen=True, tag=59):
    """How many bytes a dispatch unit has sent to other hosts, or received, in a sparse exchange: only its devices knew.

    Comes ahead of the unit's end.
    """

    sequence: int
    sent: int = 0
    received: int = 0


class GangsEnded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gangs of a delegated run that have ended on a host since it last said so. Each had its devices from its start
    there, or from the end of the one before it, to its own end; times are those of Done.
    """

    busy_ns: int  # for how long they had their devices, all together
    started: int  # when the first one was
    free: int  # when what was before it on this host had ended
    ended: int  # when the last one did
    counts: tuple[int, ...]  # by how long they had their devices: as `scheduling.tallies.counts_of`
    samples: tuple[tuple[int, int], ...] = ()  # of the segments for which `Run` asks: (segment, nanoseconds)


class RunProgress(Message, frozen=True, tag=106):
    """How far a delegated run has come since the last time. `times` has two numbers for each segment of the plan from
    `first` up to one that has not ended: its start and its end, as 8 bytes in little-endian order; 0 for one that has
    failed.

    With `is_over`, the host starts none of the others by itself, and all that it has started have ended.
    """

    sequence: int
    first: int
    times: bytes
    ended: GangsEnded | None
    is_over: bool


class RunsRevoked(Message, frozen=True, tag=107):
    """The answer to RevokeRuns: the number of started segments of each delegated run that was not over."""

    session: int
    runs: tuple[tuple[int, int], ...]  # (sequence, segments)


class WorkerFails(Message, frozen=True, tag=118):
    """A bug ends this worker, which this is the last message of: the exception, and where it was raised."""

    text: str


# ---- controller -> worker


class Compile(Message, frozen=True, tag=20):
    """Compile the program that arrived as `feed` of `session`, for these local devices, under the name `function`.

    `recompile`: the session has had it before, on hosts that failed or other ones; what it kept there is gone.
    """

    function: str
    session: int
    feed: int
    # [replica][partition] of (host of the island, ordinal)
    assignment: tuple[tuple[tuple[int, int], ...], ...]
    content: str = ""  # its hash: what arrives with another one is not compiled under this name
    recompile: bool = False
    tenant: str = ""  # whose compiler process compiles it; "": the worker may compile it itself
    share: float = 1.0  # the tenant's, of the host's compiler processes


class DropFunction(Message, frozen=True, tag=21):
    function: str


class RegisterPlan(Message, frozen=True, tag=22):
    """Remember a plan under this number. With `acknowledge`, what is sent later may overtake it: it is answered."""

    plan: int
    definition: Plan
    acknowledge: bool = False


class DropPlan(Message, frozen=True, tag=23):
    plan: int


class Run(Message, frozen=True, tag=24):
    """Run a plan: its first `segments` segments now, under this sequence number, the others as `Dispatch` says.

    `feeds[i]` is the data port's number for feed i of the client; feed i between hosts has number `host_feeds` + i.
    """

    sequence: int
    session: int
    plan: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    host_feeds: int = 0
    acknowledge: bool = False  # answer with Enqueued, for each dispatch unit
    segments: int = 1
    # Of a delegated run: the host starts one segment after another by itself, so that there are no more calls than
    # these from the first that has not ended to the newest. The units' sequence numbers follow from the segments'
    # gangs.
    ahead: int = 0
    sampled: tuple[int, ...] = ()  # segments of a delegated run whose durations are reported


class RevokeRuns(Message, frozen=True, tag=108):
    """Start no more segments of the session's delegated runs by yourself, and report how many have been started."""

    session: int


class SetRunLimit(Message, frozen=True, tag=109):
    """Limits for the segments of revoked runs that the host starts by itself: (sequence, segments).

    The controller dispatches the others with `Dispatch`, if at all.
    """

    session: int
    runs: tuple[tuple[int, int], ...]


class Dispatch(Message, frozen=True, tag=34):
    """Start the next dispatch units of a run: each has a sequence number and so many segments."""

    session: int
    run: int  # the sequence number of its first dispatch unit
    units: tuple[tuple[int, int], ...]


class DropRun(Message, frozen=True, tag=35):
    """The segments of this run that were not dispatched will not run."""

    session: int
    run: int


class CollectiveEnded(Message, frozen=True, tag=76):
    """A collective that this host has left out (`Failed`) has ended on all of its hosts: others may start here."""

    sequence: int


class Free(Message, frozen=True, tag=25):
    """Forget these handles. With `delete` the memory goes at once, even if others refer to it."""

    session: int
    handles: tuple[int, ...]
    delete: bool = False


class FreeMany(Message, frozen=True, tag=124):
    """The same of several sessions, in this order."""

    frees: tuple[Free, ...]


class OpenStore(Message, frozen=True, tag=26):
    """A session begins; `secret` opens the data port for it. `python` says what its Python processes may do."""

    session: int
    secret: str
    tenant: str = ""  # whose programs are compiled apart: see `Compile`
    python: PythonRules = PythonRules()


class CloseStore(Message, frozen=True, tag=27):
    """A session has ended: all it owned goes."""

    session: int


class DropFeed(Message, frozen=True, tag=28):
    """A feed that has arrived, or will, is not needed."""

    session: int
    feed: int


class WorkerQuery(Message, frozen=True, tag=29):
    """Something only a worker knows: `what` is one of "layout", "cost", "text", "memory"."""

    session: int
    query: int
    what: str
    subject: str
    payload: bytes


class Peers(Message, frozen=True, tag=30):
    """All hosts that are there: (host, address of its data port, secret).

    A host shows its own secret to the others' data ports. It is drawn anew with each incarnation of its worker, so one
    that is of an earlier incarnation is not let in, and what it has opened before is closed. Of one that it has not
    heard for `lease` seconds a host reports `PeerSilent`.
    """

    hosts: tuple[tuple[int, str, str], ...]
    lease: float


class FailFeeds(Message, frozen=True, tag=32):
    """These feeds of other hosts, as (first, count), will not come, or are not needed: what awaits them fails with the
    status.
    """

    session: int
    feeds: tuple[tuple[int, int], ...]
    status: Status


class Ping(Message, frozen=True, tag=33):
    """The controller is there. A worker that gets no ping for `lease` seconds ends. `seconds` is its time."""

    lease: float
    seconds: float = 0.0


class StopRun(Message, frozen=True, tag=176):
    """End the run of a gang with CANCELLED and `text`, if its devices can be stopped. Sent again until it has ended."""

    sequence: int
    text: str


class ReportStores(Message, frozen=True, tag=72):
    """Say what is in the stores, after all that was told before."""

    check: int


class StoreContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The handles in a session's store; with `is_busy`, some of what was told before has yet to be done."""

    session: int
    handles: tuple[int, ...]
    is_busy: bool = False


class StoresReported(Message, frozen=True, tag=73):
    """The answer to ReportStores."""

    check: int
    stores: tuple[StoreContent, ...]


class Stop(Message, frozen=True, tag=31):
    """End, in good order."""


FromWorker = (
    WorkerReady
    | Compiled
    | Done
    | Failed
    | FeedsArrived
    | WorkerAnswer
    | Enqueued
    | Pong
    | FeedsLost
    | PeerSilent
    | PlanRegistered
    | ValueReported
    | RowsMoved
    | SpillReply
    | SendSpilledFailed
    | StoresReported
    | RunProgress
    | RunsRevoked
    | WorkerFails
)
ToWorker = (
    Refused
    | Compile
    | DropFunction
    | RegisterPlan
    | DropPlan
    | Run
    | Dispatch
    | DropRun
    | CollectiveEnded
    | RevokeRuns
    | SetRunLimit
    | StopRun
    | Free
    | FreeMany
    | OpenStore
    | CloseStore
    | DropFeed
    | FailFeeds
    | SpillRequest
    | SendSpilled
    | DropSpilled
    | Ping
    | WorkerQuery
    | Peers
    | JoinGroup
    | Forward
    | ReportStores
    | Stop
)
