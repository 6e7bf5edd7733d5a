"""Build the snapshot of a cluster, on which all displays are based, from the controller's state.

The snapshot is built on request, and costs nothing otherwise.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from atoll._version import __version__
from atoll.cluster.lifecycle import IslandState
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.resources import ResourceManager
from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import may_read
from atoll.launch.connections import Connections, Peer
from atoll.launch.launches import Launches
from atoll.launch.queued_work import SessionWait
from atoll.named_arrays.named_arrays import NamedArrays
from atoll.named_arrays.version_records import Version
from atoll.named_arrays.version_states import VersionState
from atoll.protocol.messages import EngineReport
from atoll.quantities import counted, human_bytes
from atoll.state.compiled_functions import FunctionRegistry
from atoll.state.gang_states import Reason
from atoll.state.offenses import TenantOffenses
from atoll.state.queued_nodes import story
from atoll.state.session import GangRun, Session
from atoll.state.tallies import Histogram, Tally
from atoll.state.tenants import Tenant, Tenants
from atoll.telemetry.history import History
from atoll.telemetry.load import LoadRecord
from atoll.telemetry.snapshot import (
    AheadSnapshot,
    ControllerLoad,
    DeviceSnapshot,
    EngineSnapshot,
    EventCount,
    Functions,
    Gangs,
    HistogramView,
    HostSnapshot,
    IslandSnapshot,
    MachineSnapshot,
    OwedSnapshot,
    SessionSnapshot,
    SliceSnapshot,
    Snapshot,
    StepSnapshot,
    TenantSnapshot,
    TransferSnapshot,
    VersionSnapshot,
    Viewer,
    WaitSnapshot,
)

# Per report.
MAX_WAITS = 200  # the oldest are kept
MAX_VERSIONS = 500  # of published arrays; the newest are kept


class ReportedEngine(Protocol):
    """The controller's knowledge of its engine."""

    @property
    def report(self) -> EngineReport: ...
    def pending_reason(self, island: int) -> str: ...


class OwedWork(Protocol):
    """See `controller.watchdog.Subject`."""

    @property
    def session(self) -> int: ...
    @property
    def island(self) -> int: ...
    @property
    def text(self) -> Callable[[float], str]: ...


class Ahead(msgspec.Struct, frozen=True):
    """A gang of another session that a session waits for.

    Attributes:
      session: the session that waits.
      island: the island where it waits.
      gangs: the number of its gangs in flight that are behind, or 0 if its gangs are in line for the island.
      program: the program of the first of these gangs.
      other: the session of the gang ahead.
      text: describes the gang ahead, and the workers that run it.
      public_text: the same for other tenants, without names.
    """

    session: int
    island: int
    gangs: int
    program: str
    other: int
    text: str
    public_text: str


class OwedSource(Protocol):
    """See `controller.watchdog.Watchdog`."""

    def owed(self, now: float) -> Sequence[tuple[OwedWork, float]]: ...
    def ahead(self, now: float, waits: Mapping[int, list[SessionWait[GangRun]]]) -> Iterator[Ahead]: ...


class ReportSource(Protocol):
    """The parts of the controller that a report and a check (`telemetry.consistency`) read."""

    @property
    def settings(self) -> ClusterSettings: ...
    @property
    def tenants(self) -> Tenants: ...
    @property
    def resources(self) -> ResourceManager: ...
    @property
    def sessions(self) -> Mapping[int, Session]: ...
    @property
    def connections(self) -> Connections: ...
    @property
    def launches(self) -> Launches: ...
    @property
    def functions(self) -> FunctionRegistry: ...
    @property
    def offenses(self) -> TenantOffenses: ...
    @property
    def agents(self) -> ReportedEngine: ...
    @property
    def history(self) -> History: ...
    @property
    def watchdog(self) -> OwedSource: ...
    @property
    def load(self) -> LoadRecord: ...
    @property
    def named_arrays(self) -> NamedArrays: ...


def report(controller: ReportSource, viewer: Tenant | None = None, now: float = 0.0) -> Snapshot:
    """Return the snapshot of the cluster at `now`, in seconds of the controller's clock.

    With a `viewer`, the snapshot contains only that tenant and its sessions.
    """
    functions, history, load = controller.functions, controller.history, controller.load
    waits = _waits_by_island(controller, viewer)
    tallies = controller.launches.charges.by_island()
    device_ns = _device_ns(tallies)
    machines = _machines(controller)
    agents = Counter(each.address for each in machines)
    names = {each.address: each.name for each in machines if agents[each.address] == 1}
    return Snapshot(
        version=__version__,
        topology=str(controller.resources.topology),
        wait_seconds=controller.settings.start_seconds,
        islands=_islands(controller, now),
        machines=machines,
        engine=_engine(controller.connections, names),
        sessions=tuple(
            _session(session, controller.resources, _machine(session, controller.connections, names))
            for session in controller.sessions.values()
            if viewer in (None, session.tenant) and not session.is_vault
        ),
        tenants=tuple(
            _tenant(tenant, controller, device_ns[tenant.name], now)
            for tenant in controller.tenants.by_name.values()
            if viewer in (None, tenant)
        ),
        viewer=Viewer() if viewer is None else Viewer(tenant=viewer.name, role=viewer.settings.role),
        python=_python_rules(controller, viewer),
        seconds=round(now, 3),
        gangs=_gangs(controller, tallies, waits, viewer),
        waits=_waits(controller, waits),
        owed=_owed(controller, viewer, now),
        ahead=_ahead(controller, waits, viewer, now),
        versions=_versions(controller, viewer, now),
        events=history.events("" if viewer is None else viewer.name),
        event_counts=tuple(
            EventCount(kind=kind, island=island, count=count) for (kind, island), count in history.counts.items()
        ),
        load=ControllerLoad(**msgspec.structs.asdict(load.last), lags=_histogram(load.lag)),
        functions=Functions(compiled=functions.compiled, cached=functions.cached, seconds=round(functions.seconds, 3)),
    )


def _machines(controller: ReportSource) -> tuple[MachineSnapshot, ...]:
    """Return the machines that the engine has reported. Without an engine, nobody knows whether they are there."""
    reported = [MachineSnapshot(**msgspec.structs.asdict(each)) for each in controller.agents.report.machines]
    if controller.connections.has_engine:
        return tuple(reported)
    return tuple(msgspec.structs.replace(each, state="unknown, because the engine is away") for each in reported)


def _islands(controller: ReportSource, now: float) -> tuple[IslandSnapshot, ...]:
    resources, ledger = controller.resources, controller.launches.reservations.ledger
    used, peak = ledger.used, ledger.peak
    hosts: dict[int, list[HostSnapshot]] = {}
    for host in sorted(resources.hosts.values(), key=lambda host: host.number):
        devices = tuple(
            DeviceSnapshot(
                id=resources.number_of(DeviceLocation(host.island, host.number, info.ordinal)),
                kind=info.kind,
                platform=info.platform,
                memory_bytes=ledger.capacity.get((host.number, info.ordinal), 0),
                used_bytes=used.get((host.number, info.ordinal), 0),
                peak_bytes=peak.get((host.number, info.ordinal), 0),
            )
            for info in host.devices
        )
        found = HostSnapshot(
            id=host.number,
            pid=host.pid,
            machine=host.machine,
            state=host.state.value,
            sandbox=host.sandbox,
            devices=devices,
        )
        hosts.setdefault(host.island, []).append(found)
    return tuple(_island(controller, island, tuple(hosts.get(island, ())), now) for island in resources.islands)


def _island(controller: ReportSource, island: int, hosts: tuple[HostSnapshot, ...], now: float) -> IslandSnapshot:
    resources = controller.resources
    record = resources.islands[island]
    statistics = controller.launches.scheduler.statistics(island)
    return IslandSnapshot(
        id=island,
        state=record.state.value,
        waits_for=controller.agents.pending_reason(island) or resources.pending_reason(island) or None,
        shape=resources.topology.shapes[island],
        mesh=resources.devices(island).mesh,
        restarts=record.restarts,
        working_seconds=round(max(0.0, now - controller.history.working_since.get(island, now)), 3),
        last_failure=record.last_failure.message if record.last_failure is not None else None,
        waiting=statistics.waiting,
        in_flight=statistics.in_flight,
        busy_ms=round(statistics.busy_ns / 1e6, 3),
        started=statistics.started,
        window=statistics.window,
        hosts=() if record.state is IslandState.DRAINED else hosts,
    )


def _machine(session: Session, connections: Connections, names: Mapping[str, str]) -> str:
    """Return the name or the IP address of the machine of a session's client, "" if it uses the unix socket."""
    peer = connections.peers.get(connections.sessions.get(session.number, -1))
    return _machine_of(peer, names) if peer is not None else ""


def _machine_of(peer: Peer, names: Mapping[str, str]) -> str:
    return "" if peer.address.startswith("user ") else names.get(peer.address, peer.address)


def _engine(connections: Connections, names: Mapping[str, str]) -> EngineSnapshot | None:
    """Return the process that has the role of the engine, or None if it is away."""
    if not connections.has_engine or connections.engine is None:
        return None
    peer = connections.peers[connections.engine]
    return EngineSnapshot(pid=peer.hello.pid if peer.hello is not None else 0, machine=_machine_of(peer, names))


def _session(session: Session, resources: ResourceManager, machine: str) -> SessionSnapshot:
    devices, directory = session.devices, session.directory
    return SessionSnapshot(
        id=session.number,
        tenant=session.tenant.name,
        pid=session.pid,
        machine=machine,
        label=session.label,
        arrays=len(directory.entries),
        bytes=directory.nbytes,
        programs=len(session.programs),
        run=session.run.name,
        state=session.state_text,
        spilled_bytes=_spilled_bytes(session),
        functions=len(session.functions),
        launches=session.launches,
        in_flight=session.in_flight,
        last_error=session.last_error,
        slices=tuple(
            SliceSnapshot(
                id=each.number,
                shape=each.shape,
                island=devices.island_of(each.number),
                virtual=each.devices,
                physical=tuple(resources.number_of(devices.locations[device]) for device in each.devices),
            )
            for each in devices.slices.values()
        ),
        moved={str(device): resources.number_of(location) for device, location in sorted(devices.elsewhere().items())},
    )


def _spilled_bytes(session: Session) -> int:
    if not session.has_spilled:
        return 0
    return sum(entry.nbytes for entry in session.directory.entries.values() if entry.spilled is not None)


def _device_ns(tallies: Mapping[tuple[int, str], Tally]) -> Counter[str]:
    """Return the device time of each tenant, by its name."""
    found: Counter[str] = Counter()
    for (_, tenant), tally in tallies.items():
        found[tenant] += tally.device_ns
    return found


def _tenant(tenant: Tenant, controller: ReportSource, device_ns: int, now: float) -> TenantSnapshot:
    own = [session for session in controller.sessions.values() if session.tenant is tenant]
    versions = [version for version in controller.named_arrays.versions() if version.tenant == tenant.name]
    settings = msgspec.structs.asdict(tenant.settings)
    del settings["token_hash"]
    memory = controller.launches.reservations.ledger if tenant.memory is None else tenant.memory
    number_of = controller.resources.topology.number_of
    return TenantSnapshot(
        **settings,
        open_sessions=tenant.sessions,
        bytes=sum(session.directory.nbytes for session in own),
        in_flight=sum(session.in_flight for session in own),
        device_seconds=round(device_ns / 1e9, 6),
        device_bytes=tuple((number_of(*device), nbytes) for device, nbytes in memory.used.items() if nbytes),
        names=len({version.name for version in versions}),
        versions=len(versions),
        published_bytes=sum(version.nbytes for version in versions),
        file_bytes=sum(version.files.nbytes for version in versions if version.files is not None),
        rejected_publications=tenant.rejected_publications,
        refusals=tuple(sorted(tenant.refusals.items())),
        suspended_seconds=round(controller.offenses.suspended_seconds(tenant.name, now), 1),
    )


def _versions(controller: ReportSource, viewer: Tenant | None, now: float) -> tuple[VersionSnapshot, ...]:
    """Return the versions of published arrays that the viewer may read, the newest last."""
    found = [
        each
        for each in controller.named_arrays.versions()
        if viewer is None or may_read(viewer.settings, each.tenant, each.name)
    ]
    newest = heapq.nlargest(MAX_VERSIONS, found, key=lambda each: each.seconds)
    island_of = controller.resources.topology.island_of_device
    return tuple(
        VersionSnapshot(
            tenant=each.tenant,
            name=each.name,
            version=each.number,
            state=each.state.name.lower(),
            session=each.session,
            arrays=len(each.handles),
            bytes=each.nbytes,
            replicas=each.replicas,
            islands=tuple(sorted({island_of(number) for number in each.device_numbers})),
            devices=each.device_numbers,
            readers=len(each.readers),
            sent=each.sent,
            passed_on=each.passed_on,
            age=round(max(0.0, now - each.seconds), 3),
            note=_note(each),
            files="" if each.files is None else each.files.state.name.lower(),
        )
        for each in reversed(newest)
    )


def _note(version: Version) -> str:
    if version.error is not None:
        return version.error.message
    if version.state is VersionState.PENDING:
        return f"{counted(len(version.held), 'array')} complete"
    if version.files is not None and not version.is_on_devices:
        return version.files.restoring_text()
    if version.files is not None and version.files.problem:
        return f"it is not in files: {version.files.problem}"
    return version.problem and f"a copy is missing: {version.problem}"


def _python_rules(controller: ReportSource, viewer: Tenant | None) -> PythonRules:
    """Return the resources of hosts that the viewer's Python may access."""
    tenants = controller.tenants
    return tenants.python_rules(tenants.default if viewer is None else viewer, controller.settings)


def _waits_by_island(controller: ReportSource, viewer: Tenant | None) -> dict[int, list[SessionWait[GangRun]]]:
    sessions = controller.sessions
    return {
        island: [wait for wait in waits if wait.session in sessions and viewer in (None, sessions[wait.session].tenant)]
        for island, waits in controller.launches.scheduler.waits().items()
    }


def _gangs(
    controller: ReportSource,
    tallies: Mapping[tuple[int, str], Tally],
    waits: Mapping[int, list[SessionWait[GangRun]]],
    viewer: Tenant | None,
) -> tuple[Gangs, ...]:
    """Return counts of gangs per island and tenant."""
    waiting: Counter[tuple[int, str]] = Counter()
    for island, some in waits.items():
        for wait in some:
            waiting[island, controller.sessions[wait.session].tenant.name] += wait.gangs
    return tuple(
        _gangs_of(island, tenant, waiting[island, tenant], tallies.get((island, tenant), Tally()))
        for island, tenant in sorted({*tallies, *waiting})
        if viewer is None or tenant == viewer.name
    )


def _gangs_of(island: int, tenant: str, waiting: int, tally: Tally) -> Gangs:
    return Gangs(
        island=island,
        tenant=tenant,
        waiting=waiting,
        running=tally.running,
        failed=tally.failed,
        device_seconds=round(tally.device_ns / 1e9, 6),
        waited=_histogram(tally.waited),
        ran=_histogram(tally.ran),
        transfers=tuple(
            TransferSnapshot(kind=kind, count=count, bytes=nbytes) for kind, (count, nbytes) in tally.moved.items()
        ),
    )


def _histogram(histogram: Histogram) -> HistogramView:
    return HistogramView(counts=tuple(histogram.counts), seconds=round(histogram.total, 6))


def _waits(controller: ReportSource, waits: Mapping[int, list[SessionWait[GangRun]]]) -> tuple[WaitSnapshot, ...]:
    each_wait = [(island, wait) for island, some in waits.items() for wait in some]
    oldest = sorted(each_wait, key=lambda each: round(each[1].first.run.launch.seconds, 3))[:MAX_WAITS]
    rows = []
    for island, wait in oldest:
        launch = wait.first.run.launch
        reason, text = _why(controller, island, wait)
        row = WaitSnapshot(
            session=wait.session,
            island=island,
            gangs=wait.gangs,
            program=launch.program.name,
            since=round(launch.seconds, 3),
            reason=reason.value,
            text=text,
            steps=tuple(
                StepSnapshot(seconds=round(step.seconds, 3), state=step.state.name.lower(), reason=step.reason.value)
                for step in story(wait.first)
            ),
        )
        rows.append(row)
    return tuple(rows)


def _owed(controller: ReportSource, viewer: Tenant | None, now: float) -> tuple[OwedSnapshot, ...]:
    sessions = controller.sessions
    rows = [
        OwedSnapshot(
            session=subject.session, island=subject.island, seconds=round(seconds, 3), text=subject.text(seconds)
        )
        for subject, seconds in controller.watchdog.owed(now)
        if subject.session in sessions and viewer in (None, sessions[subject.session].tenant)
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:MAX_WAITS])


def _ahead(
    controller: ReportSource, waits: Mapping[int, list[SessionWait[GangRun]]], viewer: Tenant | None, now: float
) -> tuple[AheadSnapshot, ...]:
    sessions = controller.sessions

    def is_visible(session: int) -> bool:
        return session in sessions and viewer in (None, sessions[session].tenant)

    found = (each for each in controller.watchdog.ahead(now, waits) if is_visible(each.session))
    return tuple(
        AheadSnapshot(
            session=each.session,
            island=each.island,
            gangs=each.gangs,
            program=each.program,
            other=each.other if viewer is None or is_visible(each.other) else 0,
            text=each.text if viewer is None or is_visible(each.other) else each.public_text,
        )
        for each in islice(found, MAX_WAITS)
    )


_TEXTS = {
    Reason.OWN: "earlier launches of its session",
    Reason.ORDER: "its turn",
    Reason.ALONE: "a gang that runs exclusively",
    Reason.RATE: "its tenant's limit of launches or uploads per second",
    Reason.BYTES: "bytes from its client",
    Reason.PLAN: "the hosts to receive its plan",
    Reason.PYTHON: "a result of Python, or a value that decides control flow",
    Reason.FUNCTIONS: "functions to be recompiled",
}


def _why(controller: ReportSource, island: int, wait: SessionWait[GangRun]) -> tuple[Reason, str]:
    if wait.reason is Reason.ISLAND:
        return wait.reason, f"island {island}, which is {controller.resources.islands[island].state}"
    lacking = controller.launches.reservations.waits.lacking(wait.first.node)
    if lacking is None:
        return wait.reason, _TEXTS[wait.reason]
    (host, ordinal), nbytes, quota = lacking
    text = f"{human_bytes(nbytes)} on device {controller.resources.topology.number_of(host, ordinal)}"
    if quota:
        return Reason.QUOTA, f"{text}, within its tenant's quota `{quota}`"
    return Reason.MEMORY, text
