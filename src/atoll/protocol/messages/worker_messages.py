"""Messages between the controller and workers, and within a group of hosts (`worker.host_group`)."""

from __future__ import annotations

import enum

import msgspec

from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.errors import Status
from atoll.ir.plan import Plan
from atoll.protocol.messages.opening_messages import DeviceInfo, Message, Refused

# ---- worker -> controller


class CompileStage(enum.StrEnum):
    """State of a compilation on a host, as the host reports it."""

    UNKNOWN = "unknown"  # nothing: the request did not arrive, or its outcome was lost
    WAITING = "waiting"  # for FFI libraries, a Python process, or the hosts of other islands
    QUEUED = "queued"
    COMPILING = "compiling"
    ASKING = "asking"  # waits for an answer of its client


class QueryKind(enum.StrEnum):
    """The kind of a query. The comments have its subject, the encoded `payload`, and the answer."""

    LAYOUT = "layout"  # the default layout of an array; `ArrayKind`; text
    COST = "cost"  # the cost analysis of a function; nothing; JSON
    TEXT = "text"  # a compiled function; nothing; text
    MEMORY = "memory"  # the memory of a device; nothing, but `DeviceMemory` in `WorkerQuery`; JSON
    PROFILE = "profile"  # a profile of the host; a request of `protocol.profiles`; nothing


class ArrayKind(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A type of arrays on the device of a host with this ordinal."""

    dtype: str
    shape: tuple[int, ...]
    ordinal: int


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The device of a host with this ordinal, and what the controller knows about its memory."""

    ordinal: int
    known: dict[str, int]


class CompileReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A compilation on a host. While it is compiled, `progress` changes; -1: not known."""

    function: str
    stage: CompileStage
    progress: int = -1


class WorkerReady(Message, frozen=True, tag=10):
    """Announce a worker with its devices, the address of its data port and the number of runs that it can hold."""

    island: int
    host: int
    devices: tuple[DeviceInfo, ...]
    platform: str
    platform_version: str
    data_address: str
    max_in_flight: int
    sandbox: Mechanisms | None = None  # for users' Python on this machine; None if unknown
    compiles_first: bool = False  # whether it finds out if a function needs a world: see `Compile`


class Compiled(Message, frozen=True, tag=11):
    """Answer Compile: the function can run here, or `status` has the error.

    `info` is an encoded `FunctionInfo`, or empty for a Python function. The controller reads it as `FunctionOutputs`.
    """

    function: str
    status: Status
    info: bytes
    seconds: float
    cached: bool
    scratch_bytes: int = 0  # needed on each device while the function runs
    calls_client: bool = False  # whether it calls the client's Python while it runs
    name: str = ""  # for users
    crashed: bool = False  # a signal or a limit, which `status` names, ended the compiler process
    is_apart: bool = False  # each island runs its part of the function by itself, without a world


class Done(Message, frozen=True, tag=12):
    """Report ended dispatch units: (sequence number, start, end), with times in nanoseconds of the host's clock."""

    runs: tuple[tuple[int, int, int], ...]


class Failed(Message, frozen=True, tag=13):
    """Report that a dispatch unit failed. The results of its run hold the status from now on."""

    sequence: int
    status: Status


class DeviceFailed(Message, frozen=True, tag=191):
    """Report that a collective failed on a device, while it may not end on other devices of the same host."""

    sequence: int
    status: Status


class FeedsArrived(Message, frozen=True, tag=14):
    """Report feeds of a client that are complete at this worker's data port."""

    session: int
    feeds: tuple[int, ...]


class WorkerAnswer(Message, frozen=True, tag=15):
    """Answer WorkerQuery."""

    session: int
    query: int
    status: Status
    payload: bytes


class Enqueued(Message, frozen=True, tag=16):
    """Report that a dispatch unit of a `Run` with `acknowledge` has been enqueued on the devices."""

    sequence: int


class Pong(Message, frozen=True, tag=17):
    """Answer Ping with its `seconds`, and the sender's monotonic clock in nanoseconds (-1: not reported).

    `running` are the gangs that keep the devices of the sending host busy. `compiles` answers `Ping.compiles`.
    """

    seconds: float = 0.0
    clock: int = -1
    running: tuple[int, ...] = ()
    compiles: tuple[CompileReport, ...] = ()


class FeedsLost(Message, frozen=True, tag=19):
    """Report feeds that this host sent to `host` and that may be lost, because the connection between the two broke."""

    host: int
    feeds: tuple[tuple[int, int], ...]  # (session, feed)
    status: Status


class PeerSilent(Message, frozen=True, tag=52):
    """Report that `host` has been silent for longer than the lease. Repeated while the silence lasts."""

    host: int
    seconds: float


class PlanRegistered(Message, frozen=True, tag=53):
    """Answer a RegisterPlan with `acknowledge`."""

    plan: int


class ValueReported(Message, frozen=True, tag=55):
    """Report the number that a dispatch unit computed. The end of the unit is reported separately."""

    sequence: int
    value: int


class RowsMoved(Message, frozen=True, tag=59):
    """Report the bytes that a dispatch unit exchanged with other hosts in a sparse exchange, before the unit's end.

    Only the devices know these numbers in advance.
    """

    sequence: int
    sent: int = 0
    received: int = 0


class GangsEnded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The gangs of a delegated run that have ended on a host since its last report. Times are as in `Done`.

    A gang occupies its devices from its start, or from the end of the gang before it, to its own end.
    """

    busy_ns: int  # total time for which the gangs occupied their devices
    started: int  # start of the first gang
    free: int  # end of the work before the first gang on this host
    ended: int  # end of the last gang
    counts: tuple[int, ...]  # histogram of these times, as `state.tallies.counts_of` returns
    samples: tuple[tuple[int, int], ...] = ()  # (segment, nanoseconds) for the segments in `Run.sampled`


class RunProgress(Message, frozen=True, tag=106):
    """Report the progress of a delegated run since the last report.

    `times` has the start and the end of each segment of the plan from `first` up to one that has not ended, as 8 bytes
    in little-endian order. They are 0 for a failed segment. With `is_over`, all segments that the host has started have
    ended, and it does not start others by itself.
    """

    sequence: int
    first: int
    times: bytes
    ended: GangsEnded | None
    is_over: bool


class RunsRevoked(Message, frozen=True, tag=107):
    """Answer RevokeRuns with the number of started segments of each delegated run that was not over."""

    session: int
    runs: tuple[tuple[int, int], ...]  # (sequence, segments)


class WorldServed(Message, frozen=True, tag=182):
    """Report the address of a world's coordination service."""

    world: int
    address: str


class WorldFailed(Message, frozen=True, tag=200):
    """Report that this host cannot join a world, or cannot start its coordination service."""

    world: int
    status: Status


class NeedsWorld(Message, frozen=True, tag=198):
    """Report that a function was compiled whose islands compute together. The answer is LoadInWorld."""

    function: str


class WorkerFails(Message, frozen=True, tag=118):
    """Report the exception that ends this worker, and where it was raised. This is the worker's last message."""

    text: str


# ---- controller -> worker


class Compile(Message, frozen=True, tag=20):
    """Compile the program that arrives as `feed` of `session`, for these local devices, under the name `function`.

    With `recompile`, the session had the function before, on hosts that failed or on others, and its state is lost.

    A function on several islands runs in a `world`, in which the hosts of this island have `ranks` (first, number). On
    devices that join no worlds, and without a world, the parts on different islands run independently.

    With `islands` (the number of hosts of each) and no world, the host compiles the function first. If its devices
    communicate across islands, the host answers with NeedsWorld.
    """

    function: str
    session: int
    feed: int
    # (host of the island, or rank in the world, and ordinal) as [replica][partition]
    assignment: tuple[tuple[tuple[int, int], ...], ...]
    content: str = ""  # hash of the program; a program with another hash is not compiled
    recompile: bool = False
    tenant: str = ""  # tenant whose compiler process compiles it; "": the worker can compile it itself
    share: float = 1.0  # the tenant's share of the host's compiler processes
    world: int = 0
    ranks: tuple[int, int] = (0, 0)
    native_code: bool = False  # whether the tenant may load shared libraries into the worker
    islands: tuple[int, ...] = ()


class LoadInWorld(Message, frozen=True, tag=199):
    """Load a function in this world, after NeedsWorld."""

    function: str
    world: int


class JoinWorld(Message, frozen=True, tag=180):
    """Join a world of hosts of several islands, as host `rank` of `ranks`. Functions of the world wait for that.

    Without an address, start the world's coordination service, and answer with WorldServed. If the host cannot join the
    world, it answers with WorldFailed.
    """

    world: int
    rank: int
    ranks: int
    address: str = ""
    islands: tuple[int, ...] = ()  # for messages


class CloseWorld(Message, frozen=True, tag=181):
    """Leave a world, and drop its functions. Its runs in flight fail.

    With a `successor`, compile its functions again in that world. Runs of these functions wait for that, except for the
    runs that have `ended`. Runs that have ended and were sent to the host do not begin, and fail with the status. Other
    hosts do not take part in them, so in a later world they would meet other runs.
    """

    world: int
    status: Status  # of its functions that are being compiled
    successor: int = 0
    ended: tuple[int, ...] = ()  # sequence numbers


class DropFunction(Message, frozen=True, tag=21):
    function: str


class StopCompiling(Message, frozen=True, tag=197):
    """Kill the compiler process that compiles the function, and report nothing. Keep a function that is compiled."""

    function: str


class RegisterPlan(Message, frozen=True, tag=22):
    """Store a plan under this number. With `acknowledge`, later messages can overtake it, and the worker answers."""

    plan: int
    definition: Plan
    acknowledge: bool = False


class DropPlan(Message, frozen=True, tag=23):
    plan: int


class Run(Message, frozen=True, tag=24):
    """Run a plan: its first `segments` segments now, under this sequence number, the others on `Dispatch`.

    `feeds[i]` is the data port's number for feed i of the client. Feed i between hosts has number `host_feeds` + i. If
    there are `contents`, they are those of the client's only feed, which is not sent to the data port.
    """

    sequence: int
    session: int
    plan: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    host_feeds: int = 0
    acknowledge: bool = False  # answer with Enqueued for each dispatch unit
    segments: int = 1
    # For a delegated run. The host starts the segments by itself, with at most this number of calls from the first one
    # that has not ended to the newest one. The gangs of the segments determine the sequence numbers of the units.
    ahead: int = 0
    sampled: tuple[int, ...] = ()  # segments of a delegated run whose durations are reported
    contents: bytes | None = None


class RevokeRuns(Message, frozen=True, tag=108):
    """Stop starting segments of the session's delegated runs, and report how many have been started."""

    session: int


class SetRunLimit(Message, frozen=True, tag=109):
    """Limit the segments of revoked runs that the host starts by itself, as (sequence, segments).

    The controller uses `Dispatch` for the others, if it starts them.
    """

    session: int
    runs: tuple[tuple[int, int], ...]


class Dispatch(Message, frozen=True, tag=34):
    """Start the next dispatch units of a run."""

    session: int
    run: int  # the sequence number of its first dispatch unit
    units: tuple[tuple[int, int], ...]  # (sequence number, segments)


class DropRun(Message, frozen=True, tag=35):
    """Drop the segments of this run that were not dispatched."""

    session: int
    run: int


class CollectiveEnded(Message, frozen=True, tag=76):
    """Report that a collective that this host skipped (`Failed`) has ended on all hosts, so others can start here.

    It also reports this about a call of Python that failed on this host.
    """

    sequence: int


class Free(Message, frozen=True, tag=25):
    """Free these handles. With `delete`, free the memory at once, even if others refer to it."""

    session: int
    handles: tuple[int, ...]
    delete: bool = False


class FreeMany(Message, frozen=True, tag=124):
    """Free handles of several sessions, in this order."""

    frees: tuple[Free, ...]


class OpenStore(Message, frozen=True, tag=26):
    """Open the store of a session. `secret` opens the data port for it; `python` are the rules for its Python."""

    session: int
    secret: str
    tenant: str = ""  # tenant whose programs are compiled separately: see `Compile`
    python: PythonRules = PythonRules()


class CloseStore(Message, frozen=True, tag=27):
    """Close the store of a session that has ended, and free all of its objects."""

    session: int


class ShareBuffers(Message, frozen=True, tag=189):
    """Give session `target` buffers that share the memory of buffers of session `source`: (its handle, new handle).

    The buffers of `source` are ready, so this does not wait for earlier work of either session.
    """

    source: int
    target: int
    handles: tuple[tuple[int, int], ...]


class DropFeed(Message, frozen=True, tag=28):
    """Drop a feed that is not needed, now or when it arrives."""

    session: int
    feed: int


class WorkerQuery(Message, frozen=True, tag=29):
    """Query a worker. `subject` is the name of the function that the query is about, or empty."""

    session: int
    query: int
    what: QueryKind
    subject: str
    payload: bytes


class Peers(Message, frozen=True, tag=30):
    """The present hosts: (host, address of its data port, secret).

    A host presents its own secret to the data ports of others. Each incarnation of a worker has a new secret, so data
    ports refuse workers of earlier incarnations and close their connections. A host reports `PeerSilent` if another one
    is silent for `lease` seconds.
    """

    hosts: tuple[tuple[int, str, str], ...]
    lease: float


class FailFeeds(Message, frozen=True, tag=32):
    """Fail feeds of other hosts, as (first, count), that will not arrive or are not needed, with `status`."""

    session: int
    feeds: tuple[tuple[int, int], ...]
    status: Status


class Ping(Message, frozen=True, tag=33):
    """Renew the lease of a worker, which ends if it gets no ping for `lease` seconds.

    `seconds` is the controller's time. The worker reports about the compilations of the functions `compiles`.
    """

    lease: float
    seconds: float = 0.0
    compiles: tuple[str, ...] = ()


class StopRun(Message, frozen=True, tag=176):
    """End the run of a gang with CANCELLED and `text` if its devices support that. Repeated until the run has ended.

    With a `function` of Python, end its session's process that runs the function, also if the call has ended on this
    host. `text` says why, and continues a sentence that begins with the name of the process. Sent once.
    """

    sequence: int
    text: str
    function: str = ""


class ReportStores(Message, frozen=True, tag=72):
    """Report the contents of the stores, after handling all earlier messages."""

    check: int


class StoreContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The handles in a session's store. With `is_busy`, the effect of earlier messages is not complete."""

    session: int
    handles: tuple[int, ...]
    is_busy: bool = False


class StoresReported(Message, frozen=True, tag=73):
    """Answer ReportStores."""

    check: int
    stores: tuple[StoreContent, ...]


class Stop(Message, frozen=True, tag=31):
    """Shut the worker down."""


# ---- controller -> worker, for groups of hosts


# In place of the number of a host: see `JoinGroup`.
PROCESS_RELAY = -1


class JoinGroup(Message, frozen=True, tag=36):
    """Join the group of `hosts`, whose host `relay` forwards the controller's messages from now on.

    If `relay` is `PROCESS_RELAY`, the relay of the host's process does so. Stop still arrives directly, and so does
    Ping if the relay may be lost. A host holds messages from the relay until it has received JoinGroup, so that it
    handles all messages in the order in which the controller sent them.
    """

    relay: int
    hosts: tuple[int, ...]


class Forward(Message, frozen=True, tag=37):
    """Forward an encoded message to these hosts of the relay's group. It starts the dispatch units `units`.

    With `in_pieces`, messages that are forwarded later may overtake it. Only the relays of processes receive messages
    with `runs`: the message is a Run or a Dispatch, and `runs` has the sequence number of the run on each host. The
    units of the Dispatch, and `units`, are relative to this number. With `asks`, the message is a Ping, and the relay
    reports the answers of the hosts together.
    """

    hosts: tuple[int, ...]
    content: bytes
    units: tuple[int, ...] = ()
    in_pieces: bool = False
    runs: tuple[int, ...] = ()
    asks: bool = False


# ---- controller -> relay of a process


class AddMember(Message, frozen=True, tag=193):
    """Forward messages to a host of this process from now on, if it has this incarnation of the host's island."""

    host: int
    incarnation: int


# ---- relay -> controller


class RelayedPong(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`Pong` of a host behind a relay, which has held it for `held` nanoseconds."""

    host: int
    seconds: float
    clock: int
    running: tuple[int, ...]
    held: int


class GroupEnds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A dispatch unit that has ended on `hosts`. `times` has its start and its end on each host, as in `Done`."""

    sequence: int
    hosts: tuple[int, ...]
    times: tuple[int, ...]


class Gathered(Message, frozen=True, tag=18):
    """Report dispatch units that have ended on hosts of the group, and answers of hosts to Ping."""

    units: tuple[GroupEnds, ...]
    pongs: tuple[RelayedPong, ...] = ()


class MembersDone(Message, frozen=True, tag=194):
    """Report dispatch units that have ended on hosts of a process, as a relay of the process does.

    Unit `sequences[i]` has ended on `hosts[i]`. `times` has its start and its end there, as in `Done`. `pongs` are
    answers of hosts of the process to Ping.
    """

    hosts: tuple[int, ...]
    sequences: tuple[int, ...]
    times: tuple[int, ...]
    pongs: tuple[RelayedPong, ...] = ()


class LinkLost(Message, frozen=True, tag=39):
    """Report that this host and `host` of its group cannot reach each other, and that messages are lost."""

    host: int
    text: str


# ---- host of a group -> relay


class MemberDone(Message, frozen=True, tag=38):
    """`Done` of a host of the group, or its answer to a Ping, for the relay."""

    host: int
    runs: tuple[tuple[int, int, int], ...]
    pong: Pong | None = None


class MemberFailed(Message, frozen=True, tag=51):
    """`Failed` of a host of the group, which the relay forwards to the controller."""

    host: int
    sequence: int
    status: Status


# ---- relay -> host of its group


class RelayedPiece(Message, frozen=True, tag=54):
    """A piece of an encoded message, which later messages may overtake. Pieces of two messages do not mix."""

    content: bytes
    is_last: bool


# ---- spilled arrays, which use no device memory until they are restored


class SpilledPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The contents of a shard of an array, or of several equal shards on a host. The controller numbers pieces.

    With a `path`, the file there has its bytes from `offset` on, as a feed would have them. Otherwise, they are in the
    host's memory. `checksum` is their CRC-32. A file may have further pieces, and is removed if one of them is dropped.
    So the controller drops it with its last piece.
    """

    number: int
    nbytes: int = 0
    path: str = ""
    checksum: int = 0
    offset: int = 0


class SpillRequest(Message, frozen=True, tag=160):
    """Copy shards to the host's memory or to files in `directory`. The arrays do not change.

    `shards` are (number of the piece, handle, index of the shard on this host). `manifest` describes the session and is
    written beside files. `directory` is absolute, or relative to the host's directory for spilled arrays. With
    `are_dropped_together`, small pieces may share a file: the controller drops none of them before the last one.
    """

    session: int
    request: int
    shards: tuple[tuple[int, int, int], ...]
    to_files: bool = False
    directory: str = ""
    manifest: bytes = b""
    are_dropped_together: bool = False


class SpillReply(Message, frozen=True, tag=161):
    """Answer SpillRequest when all shards are copied, or with an error and none."""

    session: int
    request: int
    status: Status
    pieces: tuple[SpilledPiece, ...] = ()
    seconds: float = 0.0


class SendSpilled(Message, frozen=True, tag=162):
    """Send pieces as feeds, as (piece, feed, receiving hosts), and keep the pieces.

    One launch needs all of them. For its number, see `transfers.inbox`.
    """

    session: int
    launch: int
    pieces: tuple[tuple[SpilledPiece, int, tuple[int, ...]], ...]


class SendSpilledFailed(Message, frozen=True, tag=163):
    """Report that a piece cannot be sent as this feed."""

    session: int
    feed: int
    status: Status


class DropSpilled(Message, frozen=True, tag=164):
    """Drop pieces that are not needed."""

    session: int
    pieces: tuple[SpilledPiece, ...]


class KeepFiles(Message, frozen=True, tag=196):
    """Remove the directories of published arrays that no version has, which killed hosts have left.

    The name of a directory is `prefix`, in the directory for spilled arrays, and a number. Those with a number in
    `numbers`, or not below `before`, stay.
    """

    prefix: str
    before: int
    numbers: tuple[int, ...] = ()


FromRelay = Gathered | LinkLost | MemberFailed
FromProcessRelay = MembersDone | MemberFailed
FromWorker = (
    WorkerReady
    | Compiled
    | Done
    | Failed
    | DeviceFailed
    | FeedsArrived
    | WorkerAnswer
    | Enqueued
    | Pong
    | FeedsLost
    | PeerSilent
    | PlanRegistered
    | WorldServed
    | WorldFailed
    | NeedsWorld
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
    | JoinWorld
    | LoadInWorld
    | CloseWorld
    | DropFunction
    | StopCompiling
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
    | ShareBuffers
    | DropFeed
    | FailFeeds
    | SpillRequest
    | SendSpilled
    | DropSpilled
    | KeepFiles
    | Ping
    | WorkerQuery
    | Peers
    | JoinGroup
    | Forward
    | ReportStores
    | Stop
)
ToProcessRelay = Refused | AddMember | Forward
