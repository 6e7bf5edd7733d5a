"""One moment of a cluster, as `atoll top`, the page and the metrics read it.

`Snapshot` is the type of the report (`report`). Fields that a controller of another version does not send have
defaults, and unknown fields are ignored. Times are in seconds of the controller's clock, sizes in bytes.
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
    """A physical device. A `memory_bytes` of 0 means unknown."""

    id: int
    kind: str = ""
    platform: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0


class HostSnapshot(SnapshotStruct, frozen=True):
    id: int
    pid: int = 0
    machine: str = ""
    state: str = ""
    sandbox: Mechanisms | None = None
    devices: tuple[DeviceSnapshot, ...] = ()


class IslandSnapshot(SnapshotStruct, frozen=True):
    """An island. `busy_ms` is the expected duration of the work in flight; `started` counts gangs.

    `working_seconds` is the time since all of its hosts joined; 0 if the island does not work now.
    """

    id: int
    state: str
    waits_for: str | None = None
    shape: IslandShape | None = None
    mesh: tuple[int, ...] = ()
    restarts: int = 0
    working_seconds: float = 0.0
    last_failure: str | None = None
    waiting: int = 0
    in_flight: int = 0
    busy_ms: float = 0.0
    started: int = 0
    window: int = 0
    hosts: tuple[HostSnapshot, ...] = ()


class MachineSnapshot(SnapshotStruct, frozen=True):
    """A machine, as in `protocol.messages.MachineReport`."""

    name: str
    address: str = ""
    state: str = ""
    group: str = ""
    devices: dict[str, int] = {}
    memory_bytes: int = 0
    host: int = -1
    leaves: str = ""


class EngineSnapshot(SnapshotStruct, frozen=True):
    """The process that has the role of the engine."""

    pid: int = 0
    machine: str = ""  # its name or IP address; "" for the controller's machine if the engine uses the unix socket


class SliceSnapshot(SnapshotStruct, frozen=True):
    id: int
    shape: tuple[int, ...]
    island: int
    virtual: tuple[int, ...]
    physical: tuple[int, ...]


class SessionSnapshot(SnapshotStruct, frozen=True):
    id: int
    tenant: str = DEFAULT_NAME
    pid: int = 0
    machine: str = ""  # its name or IP address; "" for the controller's machine if the client uses the unix socket
    label: str = ""
    run: str = ""  # the name of its run
    arrays: int = 0
    bytes: int = 0
    programs: int = 0
    state: str = ""  # "" while it runs; otherwise "detached", or the progress of its suspension
    spilled_bytes: int = 0  # the part of `bytes` that is in host memory or on disk, not on devices
    functions: int = 0
    launches: int = 0
    in_flight: int = 0
    last_error: str = ""  # message of the last failed launch or lost array, shortened
    slices: tuple[SliceSnapshot, ...] = ()
    # The physical devices of the virtual devices that belong to no slice and have moved since the session began.
    moved: dict[str, int] = {}


class TenantSnapshot(SnapshotStruct, frozen=True):
    """The settings of a tenant, as in `cluster.tenant_settings.TenantSettings`, and its usage.

    A quota of 0 means no limit. `device_bytes` has pairs of a device number and bytes.
    """

    name: str
    share: float = 1.0
    priority: int = 0
    role: str = ""
    memory: int = 0
    total_memory: int = 0
    disk: int = 0
    devices: int = 0
    sessions: int = 0
    launches: int = 0
    uploads: int = 0
    compiles: int = 0
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    reserve: int = 0
    launch_rate: int = 0
    compile_seconds: int = 0
    upload_rate: int = 0
    run_seconds: int = 0
    native_code: bool = False
    publish: tuple[str, ...] = ("*",)
    subscribe: tuple[str, ...] = ()
    open_sessions: int = 0
    bytes: int = 0
    in_flight: int = 0
    device_seconds: float = 0.0
    device_bytes: tuple[tuple[int, int], ...] = ()
    names: int = 0  # of published arrays
    versions: int = 0  # of these
    published_bytes: int = 0
    file_bytes: int = 0  # of the files of published arrays
    rejected_publications: int = 0
    suspended_seconds: float = 0.0  # until it may launch and compile again (`state.offenses`)


class VersionSnapshot(SnapshotStruct, frozen=True):
    """A version of published arrays. `note` is the reason if it is lost, or what it waits for."""

    tenant: str
    name: str
    version: int
    state: str
    session: int  # that published it
    arrays: int = 0
    bytes: int = 0  # of the arrays that are complete, on all devices, without copies
    replicas: int = 1  # copies of each array on different islands that the publisher asked for
    islands: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    readers: int = 0
    sent: int = 0  # bytes that its arrays and copies have sent to readers on other islands
    passed_on: int = 0  # bytes that such readers have received from copies of earlier readers
    age: float = 0.0  # seconds since it is complete, or since its publication
    note: str = ""
    files: str = ""  # the state of its files, if it was published with `spill="disk"`


class Viewer(SnapshotStruct, frozen=True):
    """The viewer of the snapshot: a tenant, who sees only its own sessions, or an operator."""

    tenant: str = ""
    role: str = "operator"


class HistogramView(SnapshotStruct, frozen=True):
    """A histogram: `counts` per bucket of `state.tallies.BOUNDS`, and the sum of the observations in `seconds`."""

    counts: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Transfers(SnapshotStruct, frozen=True):
    """Completed transfers of one kind: put, get, move, send or receive."""

    kind: str
    count: int = 0
    bytes: int = 0


class Gangs(SnapshotStruct, frozen=True):
    """The gangs of one tenant on one island. `failed` counts gangs that had started."""

    island: int
    tenant: str = DEFAULT_NAME
    waiting: int = 0
    running: int = 0
    failed: int = 0
    device_seconds: float = 0.0
    waited: HistogramView = HistogramView()
    ran: HistogramView = HistogramView()
    transfers: tuple[Transfers, ...] = ()


class StepSnapshot(SnapshotStruct, frozen=True):
    """A transition of a gang to `state`, and the reason to wait from then on."""

    seconds: float
    state: str
    reason: str = ""


class WaitSnapshot(SnapshotStruct, frozen=True):
    """The gangs of a session that wait for an island, and the reason and the story of the first of them."""

    session: int
    island: int
    gangs: int = 0
    program: str = ""
    since: float = 0.0
    reason: str = ""
    text: str = ""
    steps: tuple[StepSnapshot, ...] = ()


class OwedSnapshot(SnapshotStruct, frozen=True):
    """Work that a process owes to a session, with the seconds for which it has been found. -1 means no island."""

    session: int
    island: int
    seconds: float
    text: str


class AheadSnapshot(SnapshotStruct, frozen=True):
    """A gang of another session that a session waits for on an island, and who owes its end.

    Attributes:
      session: the session that waits.
      island: the island where it waits.
      gangs: the number of its gangs that were sent to their hosts, behind that gang; 0 if its gangs are in line.
      program: the program of the first of these gangs.
      other: the session of the gang ahead, or 0 if it belongs to another tenant than the viewer.
      text: describes the gang ahead.
    """

    session: int
    island: int
    gangs: int = 0
    program: str = ""
    other: int = 0
    text: str = ""


class Event(SnapshotStruct, frozen=True):
    """An event. An `island` of -1 and a `session` of 0 mean none. `actor` requested an operation."""

    number: int
    seconds: float
    kind: str
    text: str
    island: int = -1
    session: int = 0
    tenant: str = ""
    actor: str = ""


class EventCount(SnapshotStruct, frozen=True):
    kind: str
    island: int
    count: int


class ControllerLoad(Load, frozen=True):
    """The load of the controller's process, with a histogram of its loop's lag."""

    lags: HistogramView = HistogramView()


class Functions(SnapshotStruct, frozen=True):
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0


class Snapshot(SnapshotStruct, frozen=True):
    """A cluster at `seconds` of its controller's clock."""

    version: str = ""
    topology: str = ""
    wait_seconds: float = 0.0
    islands: tuple[IslandSnapshot, ...] = ()
    machines: tuple[MachineSnapshot, ...] = ()
    engine: EngineSnapshot | None = None  # None: no process has its role now
    sessions: tuple[SessionSnapshot, ...] = ()
    tenants: tuple[TenantSnapshot, ...] = ()
    viewer: Viewer = Viewer()
    python: PythonRules = PythonRules()  # for the viewer's sessions
    seconds: float = 0.0
    gangs: tuple[Gangs, ...] = ()
    waits: tuple[WaitSnapshot, ...] = ()
    owed: tuple[OwedSnapshot, ...] = ()
    ahead: tuple[AheadSnapshot, ...] = ()
    versions: tuple[VersionSnapshot, ...] = ()  # of published arrays; the newest ones
    events: tuple[Event, ...] = ()
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
