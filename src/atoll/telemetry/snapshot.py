"""One moment of a cluster, as `atoll top`, the page and the metrics read it.

`Snapshot` is the type of the report (`report`). Fields that a controller of another version does not send have
defaults, and unknown fields are ignored. Times are in seconds of the controller's clock, sizes in bytes.

`python -m docs.status_page` writes the comments of the fields to the page of `atoll status --json`.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.cluster.topology import IslandShape
from atoll.decodable import decodable
from atoll.protocol.events import Load


class SnapshotStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a snapshot."""


class DeviceSnapshot(SnapshotStruct, frozen=True):
    """A physical device."""

    id: int  # its number in the cluster, which slices and errors use
    kind: str = ""  # as the platform names it, such as "cpu" or "NVIDIA H100"
    platform: str = ""  # as JAX names it, such as "cuda"
    memory_bytes: int = 0  # memory for arrays and computations; 0: unknown, so without a limit
    used_bytes: int = 0  # bytes that are reserved now
    peak_bytes: int = 0  # most bytes that were reserved at a time since its island started


class HostSnapshot(SnapshotStruct, frozen=True):
    """A host of an island: one worker process."""

    id: int  # its number in the cluster, which errors use
    pid: int = 0  # process ID of its worker, on its machine
    machine: str = ""  # name of its machine
    state: str = ""  # `ready` or `failed`
    sandbox: Mechanisms | None = None  # how it confines users' Python; null: unknown
    devices: tuple[DeviceSnapshot, ...] = ()


class IslandSnapshot(SnapshotStruct, frozen=True):
    """An island. It keeps its number if it fails and restarts."""

    id: int  # its number in the cluster
    state: str  # `starting`, `ready`, `restarting`, `draining`, `drained` or `removed`
    waits_for: str | None = None  # what its start waits for, as a sentence; null: nothing
    shape: IslandShape | None = None  # its hosts and devices, as configured; null: unknown
    mesh: tuple[int, ...] = ()  # dimensions of the mesh of its devices
    restarts: int = 0  # number of restarts since the cluster started
    working_seconds: float = 0.0  # seconds since all of its hosts joined; 0: it does not work now
    last_failure: str | None = None  # message of the last failure
    waiting: int = 0  # number of gangs in line
    in_flight: int = 0  # number of gangs that were sent to its hosts and have not ended
    busy_ms: float = 0.0  # expected duration of the gangs in flight, in milliseconds
    started: int = 0  # number of gangs that were sent to its hosts since the cluster started
    window: int = 0  # largest number of gangs that may be in flight
    hosts: tuple[HostSnapshot, ...] = ()  # hosts that have joined; empty if it is drained


class MachineSnapshot(SnapshotStruct, frozen=True):
    """A machine with a host agent (`atoll host`). Clusters with `--engine local` have none."""

    name: str  # its host name
    address: str = ""  # IP address from which its agent is connected
    state: str = ""  # as `atoll status` prints it, such as `free`
    group: str = ""  # its group (`atoll host --group`); empty: it has none
    devices: dict[str, int] = {}  # number of its devices by platform
    memory_bytes: int = 0  # memory of the machine
    host: int = -1  # number of the host that it runs; -1: none
    leaves: str = ""  # why it leaves, such as `SIGTERM`; empty: it stays


class EngineSnapshot(SnapshotStruct, frozen=True):
    """The process that has the role of the engine."""

    pid: int = 0  # process ID on its machine
    machine: str = ""  # name or IP address; empty: the controller's machine, on the unix socket


class SliceSnapshot(SnapshotStruct, frozen=True):
    """A slice of a session."""

    id: int  # its number in the session
    shape: tuple[int, ...]  # dimensions of its mesh
    island: int  # number of the island on which it is now
    virtual: tuple[int, ...]  # numbers of its devices in the script
    physical: tuple[int, ...]  # numbers of the devices that they stand for, in the same order


class SessionSnapshot(SnapshotStruct, frozen=True):
    """An open session: one connection of a script. A user sees only its own sessions."""

    id: int  # its number, as in `atoll end-session NUMBER`
    tenant: str = DEFAULT_NAME  # name of its tenant
    pid: int = 0  # process ID of the script, on its machine
    machine: str = ""  # name or IP address; empty: the controller's machine, or unknown after a restart of the cluster
    label: str = ""  # name of the script
    run: str = ""  # name of its run (`atoll run --name`); empty: it has none
    arrays: int = 0  # number of arrays that the script holds
    bytes: int = 0  # bytes of its arrays, on all devices
    programs: int = 0  # number of its programs
    state: str = ""  # empty while it runs; otherwise `detached`, or the progress of its suspension
    spilled_bytes: int = 0  # the part of `bytes` that is in host memory or on disk, not on devices
    functions: int = 0  # number of its compiled functions
    launches: int = 0  # number of launches since it began
    in_flight: int = 0  # number of launches that have not ended
    last_error: str = ""  # message of the last failed launch or lost array, shortened
    slices: tuple[SliceSnapshot, ...] = ()
    moved: dict[str, int] = {}  # number of the physical device by virtual device, if it has moved and is in no slice


class TenantSnapshot(SnapshotStruct, frozen=True):
    """A tenant: its settings, as in the file of tenants, and its usage. A quota of 0 means no limit."""

    name: str  # its name in the file of tenants
    share: float = 1.0  # share of device time, relative to other tenants with its priority
    priority: int = 0  # work of a higher priority runs first
    role: str = ""  # `user` or `operator`
    memory: int = 0  # quota in bytes on each device
    total_memory: int = 0  # quota in bytes on all devices
    disk: int = 0  # quota in bytes of the files of its published arrays
    devices: int = 0  # quota of devices in slices
    sessions: int = 0  # quota of open sessions
    launches: int = 0  # quota of launches in flight
    uploads: int = 0  # quota of arrived buffers that no launch has used
    compiles: int = 0  # quota of functions that are compiled at a time
    read: tuple[str, ...] = ()  # directories of hosts that its Python may read
    write: tuple[str, ...] = ()  # directories of hosts that its Python may read and write
    reserve: int = 0  # percentage of device time that it gets even if higher priorities have work
    launch_rate: int = 0  # limit of launches per second
    compile_seconds: int = 0  # limit of compilation per minute, in seconds
    upload_rate: int = 0  # limit of bytes per second to devices
    run_seconds: int = 0  # limit of one run while other tenants wait, in seconds
    native_code: bool = False  # whether its scripts may load shared libraries
    publish: tuple[str, ...] = ("*",)  # patterns of names that it may publish
    subscribe: tuple[str, ...] = ()  # patterns of other tenants' names that it may read
    open_sessions: int = 0  # number of sessions that are open now
    bytes: int = 0  # bytes of the arrays of its sessions
    in_flight: int = 0  # number of launches that have not ended
    device_seconds: float = 0.0  # seconds of device time that it has used since the cluster started
    device_bytes: tuple[tuple[int, int], ...] = ()  # pairs of a device number and the bytes that it holds there
    names: int = 0  # number of its names of published arrays
    versions: int = 0  # number of its versions of published arrays
    published_bytes: int = 0  # bytes of its published arrays
    file_bytes: int = 0  # bytes of the files of its published arrays
    rejected_publications: int = 0  # number of refused publications since the cluster started
    refusals: tuple[tuple[str, int], ...] = ()  # pairs of a quota, or `device memory`, and the number of its refusals
    suspended_seconds: float = 0.0  # seconds for which it may not launch and compile after crashes; 0: it may


class VersionSnapshot(SnapshotStruct, frozen=True):
    """A version of published arrays. The report has the newest 500."""

    tenant: str  # tenant that published it
    name: str  # name under which it is published
    version: int  # its number
    state: str  # `pending`, `complete`, `retired`, `lost`, `failed` or `freed`
    session: int  # session that published it
    arrays: int = 0  # number of its arrays
    bytes: int = 0  # bytes of its complete arrays on all devices, without copies
    replicas: int = 1  # requested number of copies of each array on different islands
    islands: tuple[int, ...] = ()  # islands that have its arrays
    devices: tuple[int, ...] = ()  # devices that have its arrays
    readers: int = 0  # number of readers that use it now
    sent: int = 0  # bytes that its arrays and copies have sent to readers on other islands
    passed_on: int = 0  # bytes that such readers have received from copies of earlier readers
    age: float = 0.0  # seconds since it became complete, or since its publication if it is not complete
    note: str = ""  # the reason if it is lost, or what it waits for
    files: str = ""  # the state of its files, if it was published with `spill="disk"`


class Viewer(SnapshotStruct, frozen=True):
    """The identity for which the report was made."""

    tenant: str = ""  # its tenant; empty: an operator, who sees all tenants
    role: str = "operator"  # `user` or `operator`


class HistogramView(SnapshotStruct, frozen=True):
    """A histogram of durations."""

    counts: tuple[int, ...] = ()  # observations per bucket; the buckets are those of the metrics
    seconds: float = 0.0  # sum of the observations

    @property
    def count(self) -> int:
        return sum(self.counts)


class TransferSnapshot(SnapshotStruct, frozen=True):
    """Completed transfers of one kind since the cluster started."""

    kind: str  # `put`, `get`, `move`, `send` or `receive`
    count: int = 0  # number of transfers
    bytes: int = 0  # bytes of these transfers


class Gangs(SnapshotStruct, frozen=True):
    """The gangs of one tenant on one island."""

    island: int  # number of the island
    tenant: str = DEFAULT_NAME  # name of the tenant
    waiting: int = 0  # number of gangs in line
    running: int = 0  # number of gangs that were sent to hosts and have not ended
    failed: int = 0  # number of gangs that failed after they were sent, since the cluster started
    device_seconds: float = 0.0  # seconds of device time since the cluster started
    waited: HistogramView = HistogramView()  # times from the launch until the gang was sent to its hosts
    ran: HistogramView = HistogramView()  # times from then until the end of the gang
    transfers: tuple[TransferSnapshot, ...] = ()


class StepSnapshot(SnapshotStruct, frozen=True):
    """A transition of a gang."""

    seconds: float  # time of the transition
    state: str  # the next state, as `atoll why` prints it
    reason: str = ""  # why it waits from then on


class WaitSnapshot(SnapshotStruct, frozen=True):
    """The gangs of a session that wait for an island. The report has the 200 that have waited longest."""

    session: int  # number of the session
    island: int  # number of the island
    gangs: int = 0  # number of gangs that wait
    program: str = ""  # program of the first gang
    since: float = 0.0  # time at which the first gang was launched
    reason: str = ""  # why the first gang waits, as in traces
    text: str = ""  # the reason in words
    steps: tuple[StepSnapshot, ...] = ()  # transitions of the first gang


class OwedSnapshot(SnapshotStruct, frozen=True):
    """Unfinished work for a session, and the process that must act next. The report has the 200 oldest."""

    session: int  # number of the session
    island: int  # number of the island; -1: none
    seconds: float  # seconds for which it has been found unfinished
    text: str  # description of the work, and of the process that must act next


class AheadSnapshot(SnapshotStruct, frozen=True):
    """A gang of another session that a session waits for on an island."""

    session: int  # number of the session that waits
    island: int  # number of the island where it waits
    gangs: int = 0  # number of its gangs on the hosts, behind the gang ahead; 0: its gangs are in line
    program: str = ""  # program of the first of its gangs
    other: int = 0  # session of the gang ahead; 0: a session of another tenant than the viewer
    text: str = ""  # description of the gang ahead, and of the workers that run it


class Event(SnapshotStruct, frozen=True):
    """An event. The report has the last 200."""

    number: int  # its number, from 1 since the cluster started
    seconds: float  # time of the event
    kind: str  # its kind, as in the metric `atoll_events_total`
    text: str  # what happened, in words
    island: int = -1  # number of the island that it is about; -1: none
    session: int = 0  # number of the session that it is about; 0: none
    tenant: str = ""  # name of the tenant that it is about; empty: none
    actor: str = ""  # who requested the operation; empty: nobody


class EventCount(SnapshotStruct, frozen=True):
    """The number of events of one kind since the cluster started."""

    kind: str  # the kind, as in `events`
    island: int  # number of the island; -1: none
    count: int  # number of events since the cluster started


class ControllerLoad(Load, frozen=True):
    """The load of the controller's process. Counts are since its start."""

    lags: HistogramView = HistogramView()  # delays of its event loop


class Functions(SnapshotStruct, frozen=True):
    """Compilations since the cluster started."""

    compiled: int = 0  # functions that hosts have compiled, counted per host
    cached: int = 0  # functions that hosts had in their caches, counted per host
    seconds: float = 0.0  # seconds of compilation, summed over hosts


class Snapshot(SnapshotStruct, frozen=True):
    """A cluster at one moment."""

    version: str = ""  # version of Atoll that the controller runs
    topology: str = ""  # the islands, as in `--islands`
    wait_seconds: float = 0.0  # seconds for which an island may wait for its hosts (`--wait`)
    islands: tuple[IslandSnapshot, ...] = ()
    machines: tuple[MachineSnapshot, ...] = ()
    engine: EngineSnapshot | None = None  # the process that has the role of the engine; null: none now
    sessions: tuple[SessionSnapshot, ...] = ()
    tenants: tuple[TenantSnapshot, ...] = ()
    viewer: Viewer = Viewer()
    python: PythonRules = PythonRules()  # rules for the Python of the viewer's sessions on hosts
    seconds: float = 0.0  # time of the report; all times are of the controller's clock
    gangs: tuple[Gangs, ...] = ()
    waits: tuple[WaitSnapshot, ...] = ()
    owed: tuple[OwedSnapshot, ...] = ()
    ahead: tuple[AheadSnapshot, ...] = ()
    versions: tuple[VersionSnapshot, ...] = ()  # versions of published arrays, the oldest first
    events: tuple[Event, ...] = ()  # events, the oldest first
    event_counts: tuple[EventCount, ...] = ()
    load: ControllerLoad = ControllerLoad()
    functions: Functions = Functions()

    @property
    def devices(self) -> int:
        return sum(len(host.devices) for island in self.islands for host in island.hosts)


_decode = msgspec.json.Decoder(decodable(Snapshot)).decode


def read_snapshot(report: bytes) -> Snapshot:
    """Decode a report. Raises msgspec.MsgspecError if it is invalid."""
    return _decode(report)
