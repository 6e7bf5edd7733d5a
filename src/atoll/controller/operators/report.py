"""What `atoll status` shows, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from atoll._version import __version__
from atoll.cluster.lifecycle import IslandState
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.resources import ResourceManager
from atoll.cluster.settings import ClusterSettings
from atoll.controller.islands.agents import Agents
from atoll.scheduling.functions import FunctionRegistry
from atoll.scheduling.ledger import Ledger
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import GangRun, Session
from atoll.scheduling.tenants import Tenant, Tenants, without_tokens


class Reported(Protocol):
    """Of a controller, what a report is about."""

    @property
    def settings(self) -> ClusterSettings: ...
    @property
    def resources(self) -> ResourceManager: ...
    @property
    def sessions(self) -> Mapping[int, Session]: ...
    @property
    def scheduler(self) -> Scheduler[GangRun]: ...
    @property
    def memory(self) -> Ledger: ...
    @property
    def agents(self) -> Agents: ...
    @property
    def functions(self) -> FunctionRegistry: ...
    @property
    def tenants(self) -> Tenants: ...


def report(controller: Reported, viewer: Tenant | None = None) -> dict[str, Any]:
    """Islands with their hosts and devices, tenants, sessions with what they own, and counts of what was compiled.

    With a `viewer`, of tenants and sessions its own alone.
    """
    resources = controller.resources
    used, peak = controller.memory.used, controller.memory.peak
    islands = []
    for island in resources.islands:
        scheduler = controller.scheduler.statistics(island)
        record = resources.islands[island]
        hosts = [
            {
                "id": host.number,
                "pid": host.pid,
                "machine": host.machine,
                "state": host.state.value,
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
            for host in sorted(resources.hosts.values(), key=lambda h: h.number)
            if host.island == island and record.state is not IslandState.DRAINED
        ]
        islands.append(
            {
                "id": island,
                "state": record.state.value,
                "waits_for": controller.agents.wait_of(island) or resources.wait_text(island) or None,
                "shape": msgspec.to_builtins(resources.topology.shapes[island]),
                "mesh": list(resources.devices(island).mesh),
                "restarts": record.restarts,
                "last_failure": record.last_failure.message if record.last_failure is not None else None,
                "waiting": scheduler.waiting,
                "in_flight": scheduler.in_flight,
                "busy_ms": round(scheduler.busy_ns / 1e6, 3),
                "started": scheduler.started,
                "hosts": hosts,
            }
        )
    sessions = [
        {
            "id": session.number,
            "pid": session.pid,
            "label": session.label,
            "tenant": session.tenant.name,
            "arrays": len(session.directory.entries),
            "bytes": session.directory.nbytes,
            "programs": len(session.programs),
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
            # Devices in no slice that are not where they were when the session began.
            "moved": {
                str(device): resources.number_of(location)
                for device, location in sorted(session.devices.elsewhere().items())
            },
        }
        for session in controller.sessions.values()
        if viewer in (None, session.tenant)
    ]
    functions = controller.functions
    return {
        "version": __version__,
        "topology": str(resources.topology),
        "wait_seconds": controller.settings.start_seconds,
        "islands": islands,
        "machines": [msgspec.structs.asdict(each) for each in controller.agents.report.machines],
        "sessions": sessions,
        "tenants": [
            _tenant(tenant, controller.sessions)
            for tenant in controller.tenants.by_name.values()
            if viewer in (None, tenant)
        ],
        "functions": {
            "compiled": functions.compiled,
            "cached": functions.cached,
            "seconds": round(functions.seconds, 3),
        },
    }


def _tenant(tenant: Tenant, sessions: Mapping[int, Session]) -> dict[str, Any]:
    """What it is set to, and what it has. A quota of 0 is none."""
    own = [session for session in sessions.values() if session.tenant is tenant]
    settings: dict[str, Any] = msgspec.to_builtins(without_tokens(tenant.settings))
    del settings["token_hash"]
    return settings | {
        "open_sessions": tenant.sessions,
        "bytes": sum(session.directory.nbytes for session in own),
        "in_flight": sum(session.in_flight for session in own),
    }
