"""Between controller and proxies."""

from __future__ import annotations

from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.protocol.messages.opening_messages import Message, Refused, VirtualDevice
from atoll.protocol.messages.worker_messages import Ping, Pong

# Nodes of one message: about a millisecond's work for the controller.
MAX_PART_NODES = 256
# The same in bytes, unless one node has more.
MAX_PART_BYTES = 256 * 1024
# Arrays that a proxy reports; with more, it reports none.
MOST_HANDLES_REPORTED = 1 << 17
# Handles in one list of a message: about ten milliseconds' work for the controller.
MAX_HANDLES = 1 << 15
# Handles that a `Launch` releases. A proxy sends more in a `Release`, which the controller divides.
MAX_RELEASED = 1 << 10
# What a proxy may send of its record.
MOST_CALL_BYTES = 4 << 20

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
    definition: Program


class ProgramPart(Message, frozen=True, tag=175):
    """The next nodes of a program that is too large for one message. `RegisterProgram` brings the last ones.

    The first part also has the program's name, arguments and number of feeds; the last one has the results.
    """

    program: int
    definition: Program


class ReleaseProgram(Message, frozen=True, tag=43):
    program: int


class RegisterSwitch(Message, frozen=True, tag=57):
    """A launch of `program` takes a number and what the `branches` take, runs the one of these programs that the number
    chooses, and gives what that gives. `index` is the program that reports the number.
    """

    program: int
    index: int
    branches: tuple[int, ...]


class RegisterLoop(Message, frozen=True, tag=58):
    """A launch of `program` takes `constants` arrays that stay, and carried ones, and gives carried ones.

    It runs `first`, which reports whether to go on; for as long as that is so, what takes all arrays, gives the next
    carried ones and reports the same: `begins` once, and then `following`, which may consume what is carried; and then
    `last`, which takes the carried ones and gives the results.
    """

    program: int
    constants: int
    first: int
    begins: int
    following: int
    last: int


class Launch(Message, frozen=True, tag=44):
    """Run a program. Results are numbered by the sender, who may use them at once."""

    program: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    traceback_id: int = 0  # the client's number for the Python stack of its request
    credits: int = 1  # that it takes of its session's window until it has ended
    released: tuple[int, ...] = ()  # handles that the client needs no more, after this


class Release(Message, frozen=True, tag=45):
    """The client needs these handles no more; with `delete`, nobody may use their memory either."""

    handles: tuple[int, ...]
    delete: bool = False


class Await(Message, frozen=True, tag=46):
    """Report when all of these handles are ready, or the first error."""

    wait: int
    handles: tuple[int, ...]


class Recompile(Message, frozen=True, tag=49):
    """The program of `function` is sent again, as `feed`, to hosts that were restarted."""

    function: int
    feed: int


# Feeds that a `FailureAcknowledged` names in each of its fields.
MOST_FEEDS_NAMED = 1024


class FailureAcknowledged(Message, frozen=True, tag=50):
    """The answer to HostsFailed: bytes for these hosts wait from here on until the hosts have restarted.

    `resent` are feeds of launches before this message that the proxy sends to the restarted hosts, as (host, feed). It
    has sent some of them before. `unsent` are feeds whose bytes its client has yet to send. All other feeds are lost.
    """

    hosts: tuple[int, ...]
    resent: tuple[tuple[int, int], ...] = ()
    unsent: tuple[int, ...] = ()


class MakeError(Message, frozen=True, tag=47):
    """These handles stand for an error from now on."""

    handles: tuple[int, ...]
    status: Status


class Query(Message, frozen=True, tag=48):
    """A question for the worker that holds `device`; `function` is the session's number or -1."""

    query: int
    what: str
    device: int
    function: int
    payload: bytes


class AddSlice(Message, frozen=True, tag=90):
    """Make a slice. Until the answer is here, nothing that names devices is sent: some of them may be put elsewhere."""

    request: int
    slice_request: SliceRequest


class ReleaseSlice(Message, frozen=True, tag=91):
    """Its devices are in no slice any more, and stay where they are."""

    slice: int


class HandlesReported(Message, frozen=True, tag=104):
    """The answer to ReportHandles: by handle, whether the array is one that failed before it was launched.

    None: whoever is there keeps no account of them, or there are more than `MOST_HANDLES_REPORTED`.
    """

    check: int
    handles: dict[int, bool] | None


class Quiesced(Message, frozen=True, tag=96):
    """The answer to `Quiesce`."""

    migration: int


class LeavesIslands(Message, frozen=True, tag=74):
    """The client leaves an island by itself when it is told that it is to (`HostsLeave`): nothing of it is migrated."""


class FailOnLoss(Message, frozen=True, tag=78):
    """What the client sends to a failed island is to fail, and not to wait until the island is back."""


class CallsRecorded(Message, frozen=True, tag=56):
    """The answer to SendCalls, with its numbers; `clock` as in a Pong, `calls` as in `protocol.spans.SessionCalls`."""

    request: int
    seconds: float
    clock: int
    calls: bytes


# ---- controller -> proxy


class RecordCalls(Message, frozen=True, tag=68):
    """Record what the client asks, for so many seconds from now; with 0, no more."""

    seconds: float


class SendCalls(Message, frozen=True, tag=69):
    """Answer with what was recorded so far. `seconds` is the controller's time."""

    request: int
    seconds: float


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
    lease: float = LEASE_SECONDS  # for hosts to be silent


class FunctionReady(Message, frozen=True, tag=61):
    function: int
    status: Status
    info: bytes


class Awaited(Message, frozen=True, tag=62):
    wait: int
    status: Status


class CreditReturned(Message, frozen=True, tag=63):
    """Credits of this session's window that have returned since the last such message; a plain launch takes one."""

    launches: int


class QueryReply(Message, frozen=True, tag=64):
    query: int
    status: Status
    payload: bytes


class Closing(Message, frozen=True, tag=65):
    """The session is over; the client did not ask for this."""

    status: Status


class Late(Message, frozen=True, tag=119):
    """Something that the session waits for has not ended after its deadline; nothing else follows from that."""

    text: str


class ReportHandles(Message, frozen=True, tag=105):
    """Say which arrays your client has, after all that you have said before."""

    check: int


class HostsFailed(Message, frozen=True, tag=67):
    """Hosts whose workers are lost, and will be started anew. What was sent to them is lost."""

    hosts: tuple[int, ...]


class HostsLeave(Message, frozen=True, tag=77):
    """Hosts whose island is being drained, to a client that leaves it by itself; or they stay after all."""

    hosts: tuple[int, ...]
    stay: bool = False


class HostsRestarted(Message, frozen=True, tag=66):
    """Hosts whose workers were started anew: (host, data address). They hold nothing of this session."""

    hosts: tuple[tuple[int, str], ...]


class Quiesce(Message, frozen=True, tag=93):
    """Virtual devices are about to migrate: send nothing more that your client asks for until `Migrated`.

    Answer with `Quiesced`, once all that was sent before is on its way.
    """

    migration: int


class SendSources(Message, frozen=True, tag=94):
    """(function, hosts): the source is to be sent to these hosts, and `Recompile` said."""

    functions: tuple[tuple[int, tuple[int, ...]], ...]


class Migrated(Message, frozen=True, tag=95):
    """The end of a migration: (device, host) for virtual devices that are elsewhere now; nothing where it failed."""

    migration: int
    hosts: tuple[tuple[int, int], ...]


FromProxy = (
    RegisterFunction
    | ReleaseFunction
    | ProgramPart
    | RegisterProgram
    | ReleaseProgram
    | RegisterSwitch
    | RegisterLoop
    | Launch
    | Release
    | Await
    | MakeError
    | Recompile
    | FailureAcknowledged
    | AddSlice
    | ReleaseSlice
    | Quiesced
    | Query
    | Pong
    | LeavesIslands
    | FailOnLoss
    | CallsRecorded
    | HandlesReported
)
ToProxy = (
    Refused
    | Welcome
    | FunctionReady
    | Awaited
    | CreditReturned
    | QueryReply
    | HostsFailed
    | HostsLeave
    | HostsRestarted
    | SliceAdded
    | Quiesce
    | SendSources
    | Migrated
    | Closing
    | Ping
    | RecordCalls
    | SendCalls
    | ReportHandles
    | Late
)
