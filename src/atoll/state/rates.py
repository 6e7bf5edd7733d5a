"""Limits on the rates at which a tenant launches programs, compiles, and uploads bytes.

Each limit is a token bucket. A tenant may use more than the bucket contains. It is then in debt, and its next requests
are delayed until the debt is paid. So a large upload or a long compilation is never refused. The limits apply only
while another tenant has open sessions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.cluster.tenant_settings import TenantSettings
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun, Launch
from atoll.state.tenants import Tenant, Tenants

# Capacities of the buckets, as the time that an empty one takes to fill: for launches and uploads; for compilations.
BURST_SECONDS = 10.0
COMPILE_BURST_MINUTES = 10.0
_MAX_AT_ONCE = 64  # delayed launches of a tenant that may compete for devices after one event


@dataclass(slots=True)
class Bucket:
    """A token bucket that may go into debt. A rate of 0 means no limit."""

    rate: float  # per second
    seconds: float  # time that an empty bucket takes to fill
    level: float = 0.0
    time: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.rate * self.seconds if self.rate else math.inf

    def fill(self, now: float) -> float:
        """Fill the bucket up to the time `now`. Return its level."""
        if now > self.time:
            self.level = min(self.rate * self.seconds, self.level + (now - self.time) * self.rate)
            self.time = now
        return self.level

    def take(self, amount: float, now: float) -> None:
        """Take tokens, and go into debt if there are not enough."""
        if self.rate:
            self.fill(now)
            self.level -= amount

    def wait(self, now: float) -> float:
        """Return the seconds until the debt is paid, or 0 without a debt."""
        level = self.fill(now) if self.rate else 0.0
        return -level / self.rate if level < 0 else 0.0

    def changed(self, rate: float) -> None:
        """Change the rate. A debt stays. If there was no limit before, the bucket is full."""
        full = not self.rate
        self.rate = rate
        if not rate:
            self.level = math.inf
        else:
            self.level = rate * self.seconds if full else min(self.level, rate * self.seconds)


@dataclass(slots=True, eq=False)
class Rates:
    """The buckets of one tenant, and the first nodes of its delayed launches, in order."""

    tenant: Tenant
    tenants: Tenants
    settings: TenantSettings = field(init=False)
    launches: Bucket = field(init=False)
    uploads: Bucket = field(init=False)
    compiles: Bucket = field(init=False)
    delayed: deque[QueuedNode[GangRun]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.settings = self.tenant.settings
        self.launches = Bucket(self.settings.launch_rate, BURST_SECONDS)
        self.uploads = Bucket(self.settings.upload_rate, BURST_SECONDS)
        self.compiles = Bucket(self.settings.compile_seconds / 60, COMPILE_BURST_MINUTES * 60)

    def change(self, settings: TenantSettings) -> None:
        """Apply changed settings of the tenant."""
        if settings.launch_rate != self.settings.launch_rate:
            self.launches.changed(settings.launch_rate)
        if settings.upload_rate != self.settings.upload_rate:
            self.uploads.changed(settings.upload_rate)
        if settings.compile_seconds != self.settings.compile_seconds:
            self.compiles.changed(settings.compile_seconds / 60)
        self.settings = settings

    def charge_launch(self, launch: Launch, now: float) -> bool:
        """Charge a launch. Return whether its first node may compete for devices now. If not, the node is delayed."""
        if launch.program.fed:
            gangs = [gang for node in launch.nodes for gang in node.gangs]
            self.uploads.take(sum(launch.moved_by(each.run.spec) for each in gangs if each.run.spec.awaited), now)
        if launch.nodes and (self.delayed or self._has_debt(now)) and self._has_others():
            self.delayed.append(launch.nodes[0])
            return False
        self.launches.take(1, now)
        return True

    def due(self, now: float) -> Iterator[QueuedNode[GangRun]]:
        """Take the delayed nodes that may compete for devices now, at most `_MAX_AT_ONCE`."""
        for _ in range(min(len(self.delayed), _MAX_AT_ONCE)):
            if self.delayed[0].is_pending:
                if self._has_debt(now) and self._has_others():
                    return
                self.launches.take(1, now)
            node = self.delayed.popleft()
            if node.is_pending:
                yield node

    def _has_others(self) -> bool:
        return any(each.sessions for each in self.tenants.by_name.values() if each is not self.tenant)

    def _has_debt(self, now: float) -> bool:
        return self.launches.wait(now) > 0 or self.uploads.wait(now) > 0

    def compile_wait(self, now: float) -> float:
        """Return the seconds until the tenant's next compilation may begin."""
        wait = self.compiles.wait(now)
        return wait if wait and self._has_others() else 0.0


class TenantRates:
    """The rates of all tenants. On a cluster without tenants, nothing is limited."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._by_name: dict[str, Rates] = {}
        self.delayed: dict[str, Rates] = {}  # tenants that have delayed launches

    def of(self, tenant: Tenant) -> Rates | None:
        """Return the buckets of a tenant with its current limits, or None if nothing is limited."""
        if not self._tenants.are_told_apart:
            return None
        rates = self._by_name.get(tenant.name)
        if rates is None:
            for name in [name for name in self._by_name if name not in self._tenants.by_name]:
                del self._by_name[name]
            rates = self._by_name[tenant.name] = Rates(tenant, self._tenants)
        elif rates.settings is not tenant.settings:
            rates.change(tenant.settings)
        return rates

    def charge_launch(self, tenant: Tenant, launch: Launch, now: float) -> bool:
        """Charge a launch. Return whether its first node may compete for devices now. If not, the node is delayed."""
        if not self._tenants.are_told_apart:
            return True
        rates = self._by_name.get(tenant.name)
        if rates is not None and rates.settings is tenant.settings and not (launch.program.fed or rates.delayed):
            bucket = rates.launches
            if bucket.level > 1 and rates.uploads.level >= 0:  # the common case: a bucket is filled when it is empty
                bucket.level -= 1
                return True
        rates = self.of(tenant)
        if rates is None or rates.charge_launch(launch, now):
            return True
        self.delayed[tenant.name] = rates
        return False

    def due(self, now: float) -> list[QueuedNode[GangRun]]:
        """Take the delayed nodes that may compete for devices now."""
        found: list[QueuedNode[GangRun]] = []
        for name, rates in list(self.delayed.items()):
            found += rates.due(now)
            if not rates.delayed:
                del self.delayed[name]
        return found
