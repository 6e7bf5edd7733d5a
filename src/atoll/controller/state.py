"""The state of a cluster that most parts of the controller share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from atoll.cluster.lifecycle import Lifecycle
from atoll.cluster.processes.leases import Leases
from atoll.cluster.resources import ResourceManager
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.slice_placement import Slices
from atoll.launch.connections import Connections
from atoll.launch.outbox import Outbox
from atoll.protocol.actions import Log
from atoll.state.decisions import Decisions
from atoll.state.offenses import TenantOffenses
from atoll.state.quarantine import Quarantine
from atoll.state.rates import TenantRates
from atoll.state.session import Session
from atoll.state.stepped_work import Remains
from atoll.state.tenants import Tenants
from atoll.telemetry.history import WARNINGS, History
from atoll.telemetry.snapshot import Event


@dataclass(frozen=True, eq=False)
class ClusterState:
    """The shared state, which makes no decisions. Its parts change, but are never replaced."""

    settings: ClusterSettings
    decisions: Decisions
    tenants: Tenants
    resources: ResourceManager
    lifecycle: Lifecycle
    connections: Connections
    outbox: Outbox
    history: History
    leases: Leases  # of hosts
    rates: TenantRates
    sessions: dict[int, Session] = field(default_factory=dict)  # open ones, by number
    slices: Slices = field(default_factory=Slices)
    quarantine: Quarantine = field(default_factory=Quarantine)
    offenses: TenantOffenses = field(default_factory=TenantOffenses)
    remains: Remains = field(default_factory=Remains)  # of closed sessions

    @classmethod
    def of(cls, settings: ClusterSettings) -> ClusterState:
        """Return the state of a new cluster."""
        connections = Connections()
        outbox = Outbox(connections)
        resources = ResourceManager(settings.topology)
        tenants = Tenants(settings.tenants)
        return cls(
            settings,
            Decisions.of(settings.decisions),
            tenants,
            resources,
            Lifecycle(resources.islands),
            connections,
            outbox,
            History(outbox.time, partial(_log, outbox)),
            Leases(settings.lease_seconds),
            TenantRates(tenants),
        )


def _log(outbox: Outbox, event: Event) -> None:
    """Write an event to the log."""
    of = [f"session {event.session}"] if event.session else []
    of += [f"tenant {event.tenant}"] if event.tenant else []
    of += [f"by {event.actor}"] if event.actor else []
    island = f"island {event.island}: " if event.island >= 0 else ""
    text = f"{event.kind}: {island}{event.text}" + (f" ({', '.join(of)})" if of else "")
    fields = event.island, event.session, event.tenant, event.actor
    outbox.add(Log(outbox.cause, text, event.kind, event.kind in WARNINGS, *fields))
