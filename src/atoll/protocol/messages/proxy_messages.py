"""Messages between the controller and proxies."""

from __future__ import annotations

import msgspec

from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.protocol.messages.opening_messages import Message, Refused, VirtualDevice
from atoll.protocol.messages.worker_messages import Ping, Pong, QueryKind

# Nodes per message. The controller needs about a millisecond for them.
MAX_PART_NODES = 256
# Bytes of nodes per message, unless it has a single node.
MAX_PART_BYTES = 256 * 1024
# Arrays that a proxy reports. If it has more, it reports none.
MAX_HANDLES_REPORTED = 1 << 17
# Handles per list in a message. The controller needs about ten milliseconds for them.
MAX_HANDLES = 1 << 15
# Handles that a `Launch` releases. A proxy sends more of them in a `Release`, which the controller divides.
MAX_RELEASED = 1 << 10
# Arrays per version of published arrays, characters of their paths, and bytes of the structure of their tree.
MAX_PUBLISHED = 1 << 14
MAX_PATH = 1 << 10
MAX_STRUCTURE = 4 << 20
# Arrays that one `ReadVersion` makes. The controller needs some milliseconds for the first ones of the same types.
MAX_READ = 128
# Bytes of recorded calls per message.
MAX_CALL_BYTES = 4 << 20

# ---- proxy -> controller


class RegisterFunction(Message, frozen=True, tag=40):
    """Compile the source with hash `content`, sent to each host as `feed`, for these virtual devices.

    With `runs_apart`, its parts on different islands do not communicate. This is for functions of Python.
    """

    function: int
    content: str
    feed: int
    # virtual device IDs as [replica][partition]
    assignment: tuple[tuple[int, ...], ...]
    runs_apart: bool = False


class ReleaseFunction(Message, frozen=True, tag=41):
    function: int


class RegisterProgram(Message, frozen=True, tag=42):
    program: int
    definition: Program


class ProgramPart(Message, frozen=True, tag=175):
    """Add the next nodes of a program that is too large for one message. `RegisterProgram` has the last nodes.

    The first part also has the program's name, arguments and number of feeds. The last part has the results.
    """

    program: int
    definition: Program


class ReleaseProgram(Message, frozen=True, tag=43):
    program: int


class RegisterSwitch(Message, frozen=True, tag=57):
    """Define `program` to run one of the programs `branches`.

    Its arguments are a number and the arguments of the branch, and its results are those of the branch. The program
    `index` reports the number of the branch.
    """

    program: int
    index: int
    branches: tuple[int, ...]


class RegisterLoop(Message, frozen=True, tag=58):
    """Define `program` as a loop. Its arguments are `constants` constant arrays and the carried arrays.

    The program `first` reports whether to continue. While that holds, the loop runs a program that takes all arrays,
    returns the next carried arrays and reports whether to continue: `begins` in the first iteration and `following`,
    which may consume the carried arrays, in later ones. Finally, `last` takes the carried arrays and returns the
    results.
    """

    program: int
    constants: int
    first: int
    begins: int
    following: int
    last: int


# Limit for the contents that a launch carries. Larger contents are sent to the hosts.
MAX_CARRIED_BYTES = 4096


class Launch(Message, frozen=True, tag=44):
    """Run a program. The sender numbers the results and can use them at once.

    If there are `contents`, they are those of the only feed, which the proxy does not send to the hosts. With a `wait`,
    answer `Awaited` as to an `Await` of the results, which are then released: nothing else refers to them.
    """

    program: int
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    traceback_id: int = 0  # the client's number for the Python stack of its request
    credits: int = 1  # of the session's launch window, used until the launch has ended
    released: tuple[int, ...] = ()  # handles to release after the launch
    contents: bytes | None = None
    wait: int = 0  # 0: no wait


class Release(Message, frozen=True, tag=45):
    """Release handles that the client no longer needs. With `delete`, free their memory even if others refer to it."""

    handles: tuple[int, ...]
    delete: bool = False


class Await(Message, frozen=True, tag=46):
    """Report when all of these handles are ready, or the first error."""

    wait: int
    handles: tuple[int, ...]


class Recompile(Message, frozen=True, tag=49):
    """Compile `function` again on restarted hosts, to which the proxy sends the source as `feed`."""

    function: int
    feed: int


# Limit for the feeds in each field of a `FailureAcknowledged`.
MAX_FEEDS_NAMED = 1024


class FailureAcknowledged(Message, frozen=True, tag=50):
    """Answer HostsFailed. The proxy holds bytes for these hosts back until the hosts have restarted.

    `resent` are feeds of launches before this message that the proxy sends to the restarted hosts, as (host, feed). It
    may have sent some of them before. `unsent` are feeds whose bytes the client has not sent yet. All other feeds are
    lost.
    """

    hosts: tuple[int, ...]
    resent: tuple[tuple[int, int], ...] = ()
    unsent: tuple[int, ...] = ()


class MakeError(Message, frozen=True, tag=47):
    """Define handles that hold an error instead of an array."""

    handles: tuple[int, ...]
    status: Status


class Query(Message, frozen=True, tag=48):
    """Query the worker that has `device`. `function` is the session's number of a function, or -1."""

    query: int
    what: QueryKind
    device: int
    function: int
    payload: bytes


class AddSlice(Message, frozen=True, tag=90):
    """Create a slice. The proxy sends no message that names devices until the answer, because devices may be moved."""

    request: int
    slice_request: SliceRequest


class ReleaseSlice(Message, frozen=True, tag=91):
    """Dissolve a slice. Its devices stay where they are."""

    slice: int


class HandlesReported(Message, frozen=True, tag=104):
    """Answer ReportHandles: by handle, whether the array failed before it was launched.

    `handles` is None if the client does not track them, or if there are more than `MAX_HANDLES_REPORTED`.
    """

    check: int
    handles: dict[int, bool] | None


class Quiesced(Message, frozen=True, tag=96):
    """Answer `Quiesce`."""

    migration: int


class LeavesIslands(Message, frozen=True, tag=74):
    """Declare that the client itself leaves an island that is drained (`HostsLeave`), so nothing is migrated."""


class FailOnLoss(Message, frozen=True, tag=78):
    """Request that launches and transfers to a failed island fail instead of waiting for its restart."""


class CallsRecorded(Message, frozen=True, tag=56):
    """Answer SendCalls with its numbers. `clock` is as in `Pong`, `calls` as in `protocol.spans.SessionCalls`."""

    request: int
    seconds: float
    clock: int
    calls: bytes


# ---- controller -> proxy


class RecordCalls(Message, frozen=True, tag=68):
    """Record the client's calls for `seconds` from now on. With 0, stop recording."""

    seconds: float


class SendCalls(Message, frozen=True, tag=69):
    """Request the calls recorded so far. `seconds` is the controller's time."""

    request: int
    seconds: float


class SliceAdded(Message, frozen=True, tag=92):
    """Answer AddSlice with a slice or an error. `hosts` are (device, host) for the slice's virtual devices."""

    request: int
    status: Status
    slice: int = 0
    devices: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    hosts: tuple[tuple[int, int], ...] = ()


class Welcome(Message, frozen=True, tag=60):
    """Open a session. `hosts` are (host, data address); `secret` opens their data ports."""

    session: int
    secret: str
    devices: tuple[VirtualDevice, ...]
    hosts: tuple[tuple[int, str], ...]
    platform: str
    platform_version: str
    launch_window: int
    lease: float = LEASE_SECONDS  # silence of a host after which it is considered failed
    most_carried: int = 0  # bytes of contents that a launch may carry


class FunctionReady(Message, frozen=True, tag=61):
    function: int
    status: Status
    info: bytes


class Awaited(Message, frozen=True, tag=62):
    wait: int
    status: Status


class CreditReturned(Message, frozen=True, tag=63):
    """Return credits of the session's launch window. A plain launch uses one."""

    launches: int


class QueryReply(Message, frozen=True, tag=64):
    query: int
    status: Status
    payload: bytes


class Closing(Message, frozen=True, tag=65):
    """End the session without a request of the client."""

    status: Status


class Late(Message, frozen=True, tag=119):
    """Warn that an operation for which the session waits, or its opening, takes long. It continues."""

    text: str


class ReportHandles(Message, frozen=True, tag=105):
    """Report the client's arrays, after all messages that were sent before."""

    check: int


class HostsFailed(Message, frozen=True, tag=67):
    """Report that the workers of these hosts are lost and will be restarted. All data sent to them is lost."""

    hosts: tuple[int, ...]


class HostsLeave(Message, frozen=True, tag=77):
    """Ask a client that leaves islands itself to leave these hosts, which are drained, or if `stay`, cancel that."""

    hosts: tuple[int, ...]
    stay: bool = False


class HostsRestarted(Message, frozen=True, tag=66):
    """Report hosts with restarted workers, as (host, data address). They have no data of this session."""

    hosts: tuple[tuple[int, str], ...]


class Quiesce(Message, frozen=True, tag=93):
    """Send no requests of the client until `Migrated`, because virtual devices are about to migrate.

    Answer with `Quiesced` when everything before is sent.
    """

    migration: int


class SendSources(Message, frozen=True, tag=94):
    """Send the sources of functions to hosts, as (function, hosts), followed by `Recompile`."""

    functions: tuple[tuple[int, tuple[int, ...]], ...]


class Migrated(Message, frozen=True, tag=95):
    """End a migration, with (device, host) for virtual devices that have moved. It is empty if the migration failed."""

    migration: int
    hosts: tuple[tuple[int, int], ...]


# ---- published arrays: see `atoll.named_arrays`


class Publish(Message, frozen=True, tag=183):
    """Publish arrays as the next version of `name`. The handles of the arrays belong to the controller from now on.

    Copies of the arrays are made until there are `replicas` of each on different islands, with the published one.
    With `on_disk`, the arrays are also written to files.
    `paths` are their places in the published tree. `structure` is the tree, in a form that only clients read.
    """

    request: int
    name: str
    keep: int
    handles: tuple[int, ...]
    paths: tuple[str, ...]
    structure: bytes = b""
    replicas: int = 1
    on_disk: bool = False


class Published(Message, frozen=True, tag=184):
    """Answer Publish: the number of the version, which becomes visible when all of its arrays are complete."""

    request: int
    status: Status
    version: int = 0


class OpenVersion(Message, frozen=True, tag=185):
    """Request a reader of a version of `name`: version `number`, or if it is -1, the newest one after `newer_than`.

    The name may begin with the name of a tenant and a slash. If there is no such version within `seconds`, the answer
    is an error. With `in_files`, wait until all arrays of version `number` are in files. The answer then has no reader.
    """

    request: int
    name: str
    number: int = -1
    newer_than: int = 0
    seconds: float = 0.0
    in_files: bool = False


class VersionArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The path, the dtype and the shape of an array of a version."""

    path: str
    dtype: str
    shape: tuple[int, ...]


class VersionOpened(Message, frozen=True, tag=186):
    """Answer OpenVersion. The version exists until `CloseVersion` with this `reader`, unless the reader is -1."""

    request: int
    status: Status
    reader: int = 0
    version: int = 0
    arrays: tuple[VersionArray, ...] = ()
    structure: bytes = b""


class ReadVersion(Message, frozen=True, tag=187):
    """Make arrays of the types `targets` from those of a version, from number `first` on.

    If `is_original` is set, the source is the version itself, and not the copy of another subscriber.
    """

    reader: int
    first: int
    targets: tuple[ArraySpec, ...]
    results: tuple[int, ...]
    is_original: bool = False


class CloseVersion(Message, frozen=True, tag=188):
    """End a reader. Reads that were requested before are completed."""

    reader: int


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
    | Publish
    | OpenVersion
    | ReadVersion
    | CloseVersion
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
    | Published
    | VersionOpened
)
