"""The state of a cluster as plain data, on which all displays are based. `snapshot` is its type.

The report is built from the controller's state on request, and costs nothing otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from atoll._version import __version__
from atoll.cluster.lifecycle import IslandState
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.resources import Host, ResourceManager
from atoll.cluster.sandbox.grants import PythonRules
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import TenantRole
from atoll.launch.reservations import Reservations
from atoll.launch.scheduler import Scheduler, Wait
from atoll.protocol.messages import EngineReport
from atoll.quantities import human_bytes
from atoll.state.compiled_functions import FunctionRegistry
from atoll.state.gang_states import Reason
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.offenses import TenantOffenses
from atoll.state.session import GangRun, Session
from atoll.state.tallies import Histogram, Tallies
from atoll.state.tenants import Tenant, Tenants, without_tokens
from atoll.telemetry.history import History
from atoll.telemetry.load import LoadRecord

MOST_WAITS = 200  # per report; the oldest are kept


class Engine(Protocol):
    """The controller's knowledge of its engine."""

    @property
    def report(self) -> EngineReport: ...
    def pending_reason(self, island: int) -> str: ...


class Launching(Protocol):
    """The parts of the controller's launcher that a report reads."""

    @property
    def memory(self) -> Reservations: ...
    @property
    def tallies(self) -> Tallies: ...


class ReportSource(Protocol):
    """The parts of the controller that a report reads."""

    @property
    def settings(self) -> ClusterSettings: ...
    @property
    def resources(self) -> ResourceManager: ...
    @property
    def sessions(self) -> Mapping[int, Session]: ...
    @property
    def scheduler(self) -> Scheduler[GangRun]: ...
    @property
    def memory(self) -> MemoryLedger: ...
    @property
    def agents(self) -> Engine: ...
    @property
    def launcher(self) -> Launching: ...
    @property
    def history(self) -> History: ...
    @property
    def load(self) -> LoadRecord: ...
    @property
    def functions(self) -> FunctionRegistry: ...
    @property
    def tenants(self) -> Tenants: ...

    @property
    def offenses(self) -> TenantOffenses: ...


def report(controller: ReportSource, viewer: Tenant | None = None, now: float = 0.0) -> dict[str, Any]:
    """Return islands with hosts and devices, tenants, sessions with their resources, waiting gangs, and counts.

    With a `viewer`, the report contains only that tenant and its sessions. `now` is the controller's time, in which
    events are dated.
    """
    resources = controller.resources
    used, peak = controller.memory.used, controller.memory.peak
    islands = []
    hosts_of: dict[int, list[Host]] = {}
    for host in sorted(resources.hosts.values(), key=lambda host: host.number):
        hosts_of.setdefault(host.island, []).append(host)
    for island in resources.islands:
        scheduler = controller.scheduler.statistics(island)
        record = resources.islands[island]
        hosts = [
            {
                "id": host.number,
                "pid": host.pid,
                "machine": host.machine,
                "state": host.state.value,
                "sandbox": msgspec.to_builtins(host.sandbox),
                "devices": [
                    {
                        "id": resources.number_of(DeviceLocation(island, host.number, info.ordinal)),
                        "kind": info.kind,
                        "platform": info.platform,
                        "memory_bytes": controller.memory.capacity.get((host.number, info.ordinal), 0),
                        "used_bytes": used.get((host.number, info.ordinal), 0),
                        "peak_bytes": peak.get((host.number, info.ordinal), 0),
                    }
                    for info in host.devices
                ],
            }
            for host in hosts_of.get(island, ())
            if record.state is not IslandState.DRAINED
        ]
        islands.append(
            {
                "id": island,
                "state": record.state.value,
                "waits_for": controller.agents.pending_reason(island) or resources.pending_reason(island) or None,
                "shape": msgspec.to_builtins(resources.topology.shapes[island]),
                "mesh": list(resources.devices(island).mesh),
                "restarts": record.restarts,
                "last_failure": record.last_failure.message if record.last_failure is not None else None,
                "waiting": scheduler.waiting,
                "in_flight": scheduler.in_flight,
                "busy_ms": round(scheduler.busy_ns / 1e6, 3),
                "started": scheduler.started,
                "window": scheduler.window,
                "hosts": hosts,
            }
        )
    sessions = [
        {
            "id": session.number,
            "tenant": session.tenant.name,
            "pid": session.pid,
            "label": session.label,
            "arrays": len(session.directory.entries),
            "bytes": session.directory.nbytes,
            "programs": len(session.programs),
            "state": session.suspended,
            "spilled_bytes": _spilled_bytes(session),
            "functions": len(session.functions),
            "launches": session.launches,
            "in_flight": session.in_flight,
            "slices": [
                {
                    "id": each.number,
                    "shape": list(each.shape),
                    "island": session.devices.island_of(each.number),
                    "virtual": list(each.devices),
                    "physical": [resources.number_of(session.devices.locations[device]) for device in each.devices],
                }
                for each in session.devices.slices.values()
            ],
            # Devices in no slice that have moved since the session began.
            "moved": {
                str(device): resources.number_of(location)
                for device, location in sorted(session.devices.elsewhere().items())
            },
        }
        for session in controller.sessions.values()
        if viewer in (None, session.tenant)
    ]
    functions = controller.functions
    waits = {island: _waits_of(controller, island, viewer) for island in resources.islands}
    tenants = [each for each in controller.tenants.by_name.values() if viewer in (None, each)]
    return {
        "version": __version__,
        "topology": str(resources.topology),
        "wait_seconds": controller.settings.start_seconds,
        "islands": islands,
        "machines": [msgspec.structs.asdict(each) for each in controller.agents.report.machines],
        "sessions": sessions,
        "tenants": [_tenant(tenant, controller, now) for tenant in tenants],
        "viewer": {
            "tenant": "" if viewer is None else viewer.name,
            "role": TenantRole.OPERATOR if viewer is None else viewer.settings.role,
        },
        "python": msgspec.to_builtins(_python_rules(controller, viewer)),
        "seconds": round(now, 3),
        "gangs": _gangs(controller, waits, viewer),
        "waits": _waits(controller, waits),
        "events": controller.history.events("" if viewer is None else viewer.name),
        "event_counts": [
            {"kind": kind, "island": island, "count": count}
            for (kind, island), count in controller.history.counts.items()
        ],
        "load": {**msgspec.structs.asdict(controller.load.last), "lags": _histogram(controller.load.lag)},
        "functions": {
            "compiled": functions.compiled,
            "cached": functions.cached,
            "seconds": round(functions.seconds, 3),
        },
    }


def _python_rules(controller: ReportSource, viewer: Tenant | None) -> PythonRules:
    """Return the resources of hosts that the viewer's Python may access."""
    tenants = controller.tenants
    return tenants.python_rules(tenants.default if viewer is None else viewer, controller.settings)


def _spilled_bytes(session: Session) -> int:
    if not session.has_spilled:
        return 0
    return sum(entry.nbytes for entry in session.directory.entries.values() if entry.spilled is not None)


def _tenant(tenant: Tenant, controller: ReportSource, now: float) -> dict[str, Any]:
    """Return the settings and the usage of a tenant. A quota of 0 means no limit."""
    own = [session for session in controller.sessions.values() if session.tenant is tenant]
    settings: dict[str, Any] = msgspec.to_builtins(without_tokens(tenant.settings))
    del settings["token_hash"]
    memory = controller.memory if tenant.memory is None else tenant.memory
    number_of = controller.resources.topology.number_of
    used = [[number_of(*device), nbytes] for device, nbytes in memory.used.items() if nbytes]
    tallies = controller.launcher.tallies
    device_ns = sum(tally.device_ns for (_, name), tally in tallies.items() if name == tenant.name)
    return settings | {
        "open_sessions": tenant.sessions,
        "bytes": sum(session.directory.nbytes for session in own),
        "in_flight": sum(session.in_flight for session in own),
        "device_seconds": round(device_ns / 1e9, 6),
        "device_bytes": used,
        "suspended_seconds": round(controller.offenses.suspended_seconds(tenant.name, now), 1),
    }


def _waits_of(controller: ReportSource, island: int, viewer: Tenant | None) -> list[Wait]:
    sessions = controller.sessions
    return [
        wait
        for wait in controller.scheduler.waits(island)
        if wait.session in sessions and viewer in (None, sessions[wait.session].tenant)
    ]


def _gangs(controller: ReportSource, waits: Mapping[int, list[Wait]], viewer: Tenant | None) -> list[dict[str, Any]]:
    """Return counts of gangs per island and tenant."""
    waiting: Counter[tuple[int, str]] = Counter()
    for island, some in waits.items():
        for wait in some:
            waiting[island, controller.sessions[wait.session].tenant.name] += wait.gangs
    tallies = controller.launcher.tallies
    rows = []
    for island, tenant in sorted({*tallies, *waiting}):
        if viewer is not None and tenant != viewer.name:
            continue
        tally = tallies[island, tenant]
        rows.append(
            {
                "island": island,
                "tenant": tenant,
                "waiting": waiting[island, tenant],
                "running": tally.running,
                "failed": tally.failed,
                "device_seconds": round(tally.device_ns / 1e9, 6),
                "waited": _histogram(tally.waited),
                "ran": _histogram(tally.ran),
                "transfers": [
                    {"kind": kind, "count": count, "bytes": nbytes} for kind, (count, nbytes) in tally.moved.items()
                ],
            }
        )
    return rows


def _histogram(histogram: Histogram) -> dict[str, Any]:
    return {"counts": list(histogram.counts), "seconds": round(histogram.total, 6)}


def _waits(controller: ReportSource, waits: Mapping[int, list[Wait]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for island, some in waits.items():
        for wait in some:
            run = wait.first.run
            assert isinstance(run, GangRun)
            reason, text = _why(controller, island, wait)
            rows.append(
                {
                    "session": wait.session,
                    "island": island,
                    "gangs": wait.gangs,
                    "program": run.launch.program.name,
                    "since": round(run.launch.seconds, 3),
                    "reason": reason.value,
                    "text": text,
                }
            )
    return sorted(rows, key=lambda row: row["since"])[:MOST_WAITS]


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


def _why(controller: ReportSource, island: int, wait: Wait) -> tuple[Reason, str]:
    if wait.reason is Reason.ISLAND:
        return wait.reason, f"island {island}, which is {controller.resources.islands[island].state}"
    node: Any = wait.first.node
    lacking = controller.launcher.memory.waits.lacking(node)
    if lacking is None:
        return wait.reason, _TEXTS[wait.reason]
    (host, ordinal), nbytes, quota = lacking
    text = f"{human_bytes(nbytes)} on device {controller.resources.topology.number_of(host, ordinal)}"
    if quota:
        return Reason.QUOTA, f"{text}, within its tenant's quota `{quota}`"
    return Reason.MEMORY, text
