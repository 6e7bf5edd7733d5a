"""Every control message, by who says it to whom.

Handles, programs, functions and waits are numbered by their sender, so that nobody waits for a number. All numbers of a
session live in a namespace of its own: a worker and the controller name a buffer by (session, handle).

    proxy  -> controller   Hello, then ToController
    worker -> controller   Hello, then FromWorker
    engine -> controller   Hello, then WorkerEnded, IslandGivenUp
    CLI    -> controller   Hello, then Ask...
"""

from __future__ import annotations

import msgspec

from atoll.errors import Status
from atoll.ir.plan import Plan
from atoll.ir.program import Program
from atoll.transport.slices import SliceWish

# Raised whenever a message changes its meaning: two processes speak together only with equal numbers.
PROTOCOL = 5

# Feeds between hosts, whose numbers the controller gives, start here; proxies count below.
OWN_NUMBERS = 1 << 48

DEFAULT_TOKEN_VARIABLE = "ATOLL_TOKEN"


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all control messages."""


# ---- opening a connection


class Hello(Message, frozen=True, tag=1):
    """The first message on any connection to the controller."""

    protocol: int
    role: str  # "proxy", "worker", "engine" or "operator"
    token: str
    pid: int
    version: str
    # What a person would recognise the peer by: the user's script for a proxy.
    label: str = ""


class Refused(Message, frozen=True, tag=2):
    """The answer to a Hello that is not let in; the connection then closes."""

    status: Status


class DeviceInfo(msgspec.Struct, frozen=True, array_like=True):
    """A physical device as its worker describes it. `memories` are (kind, ...) with the default first."""

    ordinal: int
    kind: str
    platform: str
    memories: tuple[str, ...]
    default_memory: str
    coords: tuple[int, ...]
    core_on_chip: int
    local_hardware_id: int
    memory_bytes: int


class VirtualDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device as a session sees it."""

    id: int
    island: int
    host: int
    info: DeviceInfo


# ---- worker -> controller


class WorkerReady(Message, frozen=True, tag=10):
    """A worker's devices, and where its data port listens."""

    island: int
    host: int
    devices: tuple[DeviceInfo, ...]
    platform: str
    platform_version: str
    data_address: str


class Compiled(Message, frozen=True, tag=11):
    """A function can run here, or the status says why not. `info` is a `FunctionInfo`, opaque to the controller."""

    function: str
    status: Status
    info: bytes
    seconds: float
    cached: bool
    scratch_bytes: int = 0  # that it needs on each of its devices while it runs


class Done(Message, frozen=True, tag=12):
    """Turns that have ended: (sequence number, start, end), times in nanoseconds of the host's clock."""

    runs: tuple[tuple[int, int, int], ...]


class Failed(Message, frozen=True, tag=13):
    """A turn failed; the results of its run hold the status from now on."""

    sequence: int
    status: Status


class Arrived(Message, frozen=True, tag=14):
    """Feeds of a client that are now complete at this worker's data port."""

    session: int
    feeds: tuple[int, ...]


class Answer(Message, frozen=True, tag=15):
    """The answer to a Query."""

    session: int
    query: int
    status: Status
    payload: bytes


class Enqueued(Message, frozen=True, tag=16):
    """A turn that was to be acknowledged has been enqueued on the devices."""

    sequence: int


class Pong(Message, frozen=True, tag=17):
    """The answer to a Ping."""


# ---- controller -> worker


class Compile(Message, frozen=True, tag=20):
    """Compile the program that arrived as `feed` of `session`, for these local devices, under the name `function`."""

    function: str
    session: int
    feed: int
    # [replica][partition] of (host of the island, ordinal)
    assignment: tuple[tuple[tuple[int, int], ...], ...]


class DropFunction(Message, frozen=True, tag=21):
    function: str


class KeepPlan(Message, frozen=True, tag=22):
    """Remember a plan under this number."""

    plan: int
    body: Plan


class DropPlan(Message, frozen=True, tag=23):
    plan: int


class Run(Message, frozen=True, tag=24):
    """Walk a plan: its first `legs` legs now, under this sequence number, the others as `Go` says.

    `feeds[i]` is the data port's number for the program's feed i.
    """

    sequence: int
    session: int
    plan: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    acknowledge: bool = False  # say Enqueued, for each turn
    legs: int = 1


class Go(Message, frozen=True, tag=34):
    """Turns of the next legs of a run have come: each has a sequence number and takes so many legs."""

    session: int
    run: int  # the sequence number of its first turn
    turns: tuple[tuple[int, int], ...]


class DropRun(Message, frozen=True, tag=35):
    """The legs of this run whose turns have not come will not be walked."""

    session: int
    run: int


class Free(Message, frozen=True, tag=25):
    """Forget these handles. With `delete` the memory goes at once, whoever else refers to it."""

    session: int
    handles: tuple[int, ...]
    delete: bool = False


class OpenStore(Message, frozen=True, tag=26):
    """A session begins; `secret` opens the data port for it."""

    session: int
    secret: str


class CloseStore(Message, frozen=True, tag=27):
    """A session has ended: all it owned goes."""

    session: int


class DropFeed(Message, frozen=True, tag=28):
    """A feed that has arrived, or will, is for nobody."""

    session: int
    feed: int


class Query(Message, frozen=True, tag=29):
    """Something only a worker knows: `what` is one of "layout", "cost", "text"."""

    session: int
    query: int
    what: str
    subject: str
    payload: bytes


class Peers(Message, frozen=True, tag=30):
    """Where the other hosts' data ports are: (host, address), and the cluster's own secret for them."""

    hosts: tuple[tuple[int, str], ...]
    secret: str


class FailFeeds(Message, frozen=True, tag=32):
    """These feeds of other hosts will not come, or are for nobody: what awaits them fails with the status."""

    session: int
    feeds: tuple[int, ...]
    status: Status


class Ping(Message, frozen=True, tag=33):
    """The controller is there. A worker that hears nothing for `lease` seconds ends."""

    lease: float


class Stop(Message, frozen=True, tag=31):
    """End, in good order."""


# ---- proxy -> controller


class RegisterFunction(Message, frozen=True, tag=40):
    """Compile `content` (the hash of what was sent as `feed` to each host) for these virtual devices."""

    function: int
    content: str
    feed: int
    # [replica][partition] of virtual device ids
    assignment: tuple[tuple[int, ...], ...]


class ReleaseFunction(Message, frozen=True, tag=41):
    function: int


class RegisterProgram(Message, frozen=True, tag=42):
    program: int
    body: Program


class ReleaseProgram(Message, frozen=True, tag=43):
    program: int


class Launch(Message, frozen=True, tag=44):
    """Run a program. Results are numbered by the sender, who may use them at once."""

    program: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    context: int = 0  # the client's number for the Python stack of its request
    room: int = 1  # that it takes in its session's window until it is retired


class Release(Message, frozen=True, tag=45):
    """The client needs these handles no more; with `delete`, nobody may use their memory either."""

    handles: tuple[int, ...]
    delete: bool = False


class Await(Message, frozen=True, tag=46):
    """Tell me when all of these handles are ready, or the first error."""

    wait: int
    handles: tuple[int, ...]


class CompileAgain(Message, frozen=True, tag=49):
    """The program of `function` is sent again, as `feed`, to hosts that were restarted."""

    function: int
    feed: int


class LossSeen(Message, frozen=True, tag=50):
    """The answer to HostsLost: bytes for these hosts wait from here on until they are back."""

    hosts: tuple[int, ...]


class MakeError(Message, frozen=True, tag=47):
    """These handles stand for an error from now on."""

    handles: tuple[int, ...]
    status: Status


class Inquire(Message, frozen=True, tag=48):
    """A question for the worker that holds `device`; `function` is the session's number or -1."""

    query: int
    what: str
    device: int
    function: int
    payload: bytes


class AddSlice(Message, frozen=True, tag=90):
    """Make a slice. Until the answer is here, nothing that names devices is sent: some of them may change places."""

    request: int
    wish: SliceWish


class ReleaseSlice(Message, frozen=True, tag=91):
    """Its devices are in no slice any more, and stay where they are."""

    slice: int


class AtRest(Message, frozen=True, tag=96):
    """The answer to `Hold`."""

    move: int


# ---- controller -> proxy


class SliceAdded(Message, frozen=True, tag=92):
    """A slice, or why there is none. `hosts` are (device, host) of the virtual devices in it."""

    request: int
    status: Status
    slice: int = 0
    devices: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    hosts: tuple[tuple[int, int], ...] = ()


class Welcome(Message, frozen=True, tag=60):
    """A session is open. `hosts` are (host, data address); `secret` opens their data ports."""

    session: int
    secret: str
    devices: tuple[VirtualDevice, ...]
    hosts: tuple[tuple[int, str], ...]
    platform: str
    platform_version: str
    launch_window: int


class FunctionReady(Message, frozen=True, tag=61):
    function: int
    status: Status
    info: bytes


class Awaited(Message, frozen=True, tag=62):
    wait: int
    status: Status


class Retired(Message, frozen=True, tag=63):
    """Room in the window of this session that has become free since the last such message, in launches of one."""

    launches: int


class Answered(Message, frozen=True, tag=64):
    query: int
    status: Status
    payload: bytes


class Closing(Message, frozen=True, tag=65):
    """The session is over, by no wish of the client."""

    status: Status


class HostsLost(Message, frozen=True, tag=67):
    """Hosts whose workers are gone, and will be started anew. What was sent to them is lost."""

    hosts: tuple[int, ...]


class HostsBack(Message, frozen=True, tag=66):
    """Hosts whose workers were started anew: (host, data address). They hold nothing of this session."""

    hosts: tuple[tuple[int, str], ...]


class Hold(Message, frozen=True, tag=93):
    """Virtual devices are about to change places: send nothing more that your client asks for until `Moved`.

    Answer with `AtRest`, once all that was sent before is on its way.
    """

    move: int


class SendSources(Message, frozen=True, tag=94):
    """(function, hosts): the source is to be sent to these hosts, and `CompileAgain` said."""

    functions: tuple[tuple[int, tuple[int, ...]], ...]


class Moved(Message, frozen=True, tag=95):
    """The end of a move: (device, host) for what sits elsewhere now; nothing where it failed."""

    move: int
    hosts: tuple[tuple[int, int], ...]


# ---- engine -> controller


class WorkerEnded(Message, frozen=True, tag=70):
    """A worker has ended by itself, with this exit status (negative: the signal); its island is started anew."""

    host: int
    pid: int
    status: int
    text: str  # the status in words


class IslandGivenUp(Message, frozen=True, tag=71):
    """The island is not started again, and why."""

    island: int
    text: str


class IslandEnded(Message, frozen=True, tag=101):
    """The workers of an island have ended, as they were to."""

    island: int


# ---- controller -> engine


class StartIsland(Message, frozen=True, tag=102):
    """Start the workers of one more island; numbers rise by one."""

    island: int


class EndIsland(Message, frozen=True, tag=103):
    """End the island's workers, and do not start them again."""

    island: int


class RestartIsland(Message, frozen=True, tag=75):
    """Kill the island's workers, and start them anew."""

    island: int
    reason: str


# ---- operators


class AskStatus(Message, frozen=True, tag=80):
    pass


class AskStop(Message, frozen=True, tag=81):
    pass


class Report(Message, frozen=True, tag=82):
    """The answer to AskStatus: JSON."""

    body: bytes


class AskDump(Message, frozen=True, tag=84):
    pass


class Dump(Message, frozen=True, tag=85):
    """The answer to AskDump: the controller's event log, a line of JSON each."""

    body: bytes


class AskTrace(Message, frozen=True, tag=86):
    since: int  # spans that ended before, in nanoseconds of their hosts' clocks, are left out


class TraceOf(Message, frozen=True, tag=87):
    """The answer to AskTrace: msgpack of a list of `controller.trace.Span`."""

    body: bytes


class AskRemap(Message, frozen=True, tag=97):
    """Move a slice to an island; to these devices of it, by their numbers in the report, or to any."""

    session: int
    slice: int
    island: int
    devices: tuple[int, ...] = ()


class AskAddIsland(Message, frozen=True, tag=99):
    """Start one more island like the others."""


class AskDrain(Message, frozen=True, tag=100):
    """Move all that is on the island to others, and end its workers."""

    island: int


class Told(Message, frozen=True, tag=98):
    """The answer to a request of an operator, when it is done or refused: a sentence."""

    status: Status
    text: str


class Stopping(Message, frozen=True, tag=83):
    """The answer to AskStop."""


ToController = (
    Hello
    | WorkerReady
    | Compiled
    | Done
    | Failed
    | Arrived
    | Answer
    | Enqueued
    | Pong
    | RegisterFunction
    | ReleaseFunction
    | RegisterProgram
    | ReleaseProgram
    | Launch
    | Release
    | Await
    | MakeError
    | CompileAgain
    | LossSeen
    | AddSlice
    | ReleaseSlice
    | AtRest
    | Inquire
    | WorkerEnded
    | IslandGivenUp
    | IslandEnded
    | AskRemap
    | AskAddIsland
    | AskDrain
    | AskStatus
    | AskDump
    | AskTrace
    | AskStop
)
ToWorker = (
    Refused
    | Compile
    | DropFunction
    | KeepPlan
    | DropPlan
    | Run
    | Go
    | DropRun
    | Free
    | OpenStore
    | CloseStore
    | DropFeed
    | FailFeeds
    | Ping
    | Query
    | Peers
    | Stop
)
ToProxy = (
    Refused
    | Welcome
    | FunctionReady
    | Awaited
    | Retired
    | Answered
    | HostsLost
    | HostsBack
    | SliceAdded
    | Hold
    | SendSources
    | Moved
    | Closing
)
ToEngine = Refused | RestartIsland | StartIsland | EndIsland
ToOperator = Refused | Report | Dump | TraceOf | Told | Stopping


class OutputInfo(msgspec.Struct, frozen=True, array_like=True):
    """One output of a compiled function."""

    dtype: str
    shape: tuple[int, ...]
    op_sharding: bytes | None  # serialized xla.OpSharding; None where the program is not partitioned
    memory_kind: str
    layout: bytes  # in XLA's text form, such as {1,0}; empty where XLA has none


class FunctionInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells of a compiled function; read by the proxy, carried by the controller."""

    name: str
    fingerprint: bytes
    parameter_shardings: tuple[bytes, ...] | None
    parameter_layouts: tuple[bytes, ...]  # in XLA's text form; none where XLA tells none
    outputs: tuple[OutputInfo, ...]
    donated: tuple[int, ...]
    memory_stats: dict[str, int]
    generated_code_bytes: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of one shard


class MemoryHolder(msgspec.Struct, frozen=True, array_like=True):
    """Buffers on one device that one program made for one stack of the client; sizes in bytes."""

    context: int  # the client's number for the stack; 0: not its own, or not known
    maker: str
    ready: int
    ready_bytes: int
    unready: int
    unready_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a device's memory, the largest first."""

    device: str
    holders: tuple[MemoryHolder, ...]


# The payload of a RESOURCE_EXHAUSTED status in which a `MemoryReport` travels to the proxy.
MEMORY_REPORT = "atoll.memory_report"


class FunctionSource(msgspec.Struct, frozen=True, array_like=True):
    """What a proxy sends for compilation: the program's bytes and XLA's serialized CompileOptions."""

    program: bytes
    options: bytes
