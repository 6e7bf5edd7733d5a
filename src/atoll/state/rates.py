"""Limits per second on launches, compile seconds, and uploaded bytes of a tenant. Pure.

Each is a token bucket. Use may exceed what the bucket has: the tenant is then in debt, and what comes next is delayed
until the debt is paid. So a large upload or a long compilation is never refused. The limits apply only while another
tenant has open sessions.
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

BURST_SECONDS = 10.0  # of launches and uploads: a bucket holds so many seconds' worth
COMPILE_BURST_MINUTES = 10.0
_MOST_AT_ONCE = 64  # delayed launches of a tenant that join the competition in one step of the controller


@dataclass(slots=True)
class Bucket:
    """A token bucket that may go into debt. A rate of 0 is no limit."""

    rate: float  # per second
    seconds: float  # that an empty bucket takes to fill
    level: float = 0.0
    time: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.rate * self.seconds if self.rate else math.inf

    def fill(self, now: float) -> float:
        """Return the level at this time."""
        if now > self.time:
            self.level = min(self.rate * self.seconds, self.level + (now - self.time) * self.rate)
            self.time = now
        return self.level

    def take(self, amount: float, now: float) -> None:
        """Use so much, into debt if need be."""
        if self.rate:
            self.fill(now)
            self.level -= amount

    def wait(self, now: float) -> float:
        """Return the seconds until the debt is paid; 0 without a debt."""
        level = self.fill(now) if self.rate else 0.0
        return -level / self.rate if level < 0 else 0.0

    def changed(self, rate: float) -> None:
        """Use another rate from now on. A debt stays, and a new limit begins with a full bucket."""
        full = not self.rate
        self.rate = rate
        if not rate:
            self.level = math.inf
        else:
            self.level = rate * self.seconds if full else min(self.level, rate * self.seconds)


@dataclass(slots=True, eq=False)
class Rates:
    """The buckets of one tenant, and the first nodes of its launches that are delayed, in their order."""

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
        """The tenant has other limits from now on."""
        if settings.launch_rate != self.settings.launch_rate:
            self.launches.changed(settings.launch_rate)
        if settings.upload_rate != self.settings.upload_rate:
            self.uploads.changed(settings.upload_rate)
        if settings.compile_seconds != self.settings.compile_seconds:
            self.compiles.changed(settings.compile_seconds / 60)
        self.settings = settings

    def launched(self, launch: Launch, now: float) -> bool:
        """A launch came. Return whether its first node may compete for devices now; otherwise it is delayed."""
        if launch.program.fed:
            gangs = [gang for node in launch.nodes for gang in node.gangs]
            self.uploads.take(sum(launch.moved_by(each.run.spec) for each in gangs if each.run.spec.awaited), now)
        if launch.nodes and (self.delayed or self._has_debt(now)) and self._has_others():
            self.delayed.append(launch.nodes[0])
            return False
        self.launches.take(1, now)
        return True

    def due(self, now: float) -> Iterator[QueuedNode[GangRun]]:
        """Take the delayed nodes that may compete for devices now, a bounded number of them."""
        for _ in range(min(len(self.delayed), _MOST_AT_ONCE)):
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
    """The rates of all tenants; nothing is limited on a cluster without tenants."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._by_name: dict[str, Rates] = {}
        self.delayed: dict[str, Rates] = {}  # that have delayed launches

    def of(self, tenant: Tenant) -> Rates | None:
        """Return the buckets of a tenant, at its present limits."""
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

    def launched(self, tenant: Tenant, launch: Launch, now: float) -> bool:
        """A launch came. Return whether its first node may compete for devices now; otherwise it is delayed."""
        if not self._tenants.are_told_apart:
            return True
        rates = self._by_name.get(tenant.name)
        if rates is not None and rates.settings is tenant.settings and not (launch.program.fed or rates.delayed):
            bucket = rates.launches
            if bucket.level > 1 and rates.uploads.level >= 0:  # nearly always: it is filled when it is empty
                bucket.level -= 1
                return True
        rates = self.of(tenant)
        if rates is None or rates.launched(launch, now):
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
