"""The state of a cluster that most parts of the controller share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.cluster.lifecycle import Lifecycle
from atoll.cluster.processes.leases import Leases
from atoll.cluster.resources import ResourceManager
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.slice_placement import Slices
from atoll.launch.connections import Connections
from atoll.launch.outbox import Outbox
from atoll.launch.shared_state import SharedState
from atoll.protocol.actions import Log
from atoll.state.rates import TenantRates
from atoll.state.tenants import Tenants
from atoll.telemetry.history import WARNINGS, History
from atoll.telemetry.snapshot import Event


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterState(SharedState):
    """The records that the parts of launches share, and those of the rest of the controller."""

    tenants: Tenants
    lifecycle: Lifecycle
    history: History
    leases: Leases  # of hosts
    slices: Slices = field(default_factory=Slices)

    @classmethod
    def of(cls, settings: ClusterSettings) -> ClusterState:
        """Return the state of a new cluster."""
        connections = Connections()
        outbox = Outbox(connections)
        resources = ResourceManager(settings.topology)
        tenants = Tenants(settings.tenants)
        return cls(
            settings=settings,
            tenants=tenants,
            resources=resources,
            lifecycle=Lifecycle(resources.islands),
            connections=connections,
            outbox=outbox,
            history=History(outbox.time, partial(_log, outbox)),
            leases=Leases(settings.lease_seconds),
            rates=TenantRates(tenants),
        )

    def parts(self) -> dict[str, Any]:
        """Return the parts that have state, by the names that dumps use."""
        return {
            "state": self,
            "tenants": self.tenants,
            "resources": self.resources,
            "connections": self.connections,
            "outbox": self.outbox,
            "history": self.history,
            "leases": self.leases,
            "rates": self.rates,
            "slices": self.slices,
            "quarantine": self.quarantine,
            "offenses": self.offenses,
            "remains": self.remains,
        }


def _log(outbox: Outbox, event: Event) -> None:
    """Write an event to the log."""
    of = [f"session {event.session}"] if event.session else []
    of += [f"tenant {event.tenant}"] if event.tenant else []
    of += [f"by {event.actor}"] if event.actor else []
    island = f"island {event.island}: " if event.island >= 0 else ""
    text = f"{event.kind}: {island}{event.text}" + (f" ({', '.join(of)})" if of else "")
    fields = event.island, event.session, event.tenant, event.actor
    outbox.add(Log(outbox.cause, text, event.kind, event.kind in WARNINGS, *fields))
