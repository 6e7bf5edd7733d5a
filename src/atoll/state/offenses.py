"""Crashes that tenants cause, counted per tenant, and the suspensions of tenants for them.

Crashes of workers, of compiler processes, and of the controller are counted separately. A crash is forgotten after
`SPAN_SECONDS`.

A crash that one tenant has certainly caused counts 1. If several tenants may have caused it, each is charged an equal
part. If functions were running that have never ended well, only the tenants of these are charged: a tenant whose
functions have all run before pays nothing for a neighbor's new function.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from atoll.errors import Code, Details, Kind, Status, failure
from atoll.state.tenants import Tenant

MAX_CRASHES = 3  # within `SPAN_SECONDS` suspend the tenant
SPAN_SECONDS = 60.0
FIRST_SUSPENSION_SECONDS = 30.0  # doubles each time
LONGEST_SUSPENSION_SECONDS = 3600.0
FORGET_SECONDS = 3600.0  # from the end of a suspension until the next one is as short as the first
_TOLERANCE = 1e-9  # of sums of parts


class Running(NamedTuple):
    """A function in flight on an island."""

    tenant: Tenant
    is_proven: bool  # whether a run of it has ended well before


class Offenses:
    """The crashes of one tenant, and its suspension."""

    def __init__(self) -> None:
        self._crashes: deque[tuple[float, float]] = deque()  # (time, count)
        self._suspensions = 0
        self.until = 0.0  # when the suspension ends, by the controller's clock

    def add(self, now: float, count: float = 1.0) -> bool:
        """Count a crash. Return whether a suspension begins."""
        crashes = self._crashes
        crashes.append((now, count))
        while crashes[0][0] < now - SPAN_SECONDS:
            crashes.popleft()
        if now < self.until or sum(each for _, each in crashes) < MAX_CRASHES - _TOLERANCE:
            return False
        crashes.clear()
        if self._suspensions and now > self.until + FORGET_SECONDS:
            self._suspensions = 0
        seconds = min(FIRST_SUSPENSION_SECONDS * 2**self._suspensions, LONGEST_SUSPENSION_SECONDS)
        self.until = now + seconds
        self._suspensions += seconds < LONGEST_SUSPENSION_SECONDS
        return True

    def delay(self, now: float) -> float:
        """Return the seconds left of the wait after the newest crash: 1 s, doubled for each earlier one in the span."""
        recent = [time for time, _ in self._crashes if time >= now - SPAN_SECONDS]
        return max(0.0, recent[-1] + 2.0 ** (len(recent) - 1) - now) if recent else 0.0


class TenantOffenses:
    """The crashes that all tenants caused: of workers, of compiler processes, and of the controller."""

    def __init__(self) -> None:
        self._runs: dict[str, Offenses] = {}
        self._compiles: dict[str, Offenses] = {}
        self._messages: dict[str, Offenses] = {}

    def crashed(self, now: float, running: Iterable[Running], *, is_sure: bool) -> list[Tenant]:
        """Charge the crash of a worker. Return the tenants whose suspension begins.

        Args:
          now: the time, by the controller's clock.
          running: the functions in flight.
          is_sure: whether the crash was certainly caused on this host. If not, it counts half.
        """
        shares = blame(running)
        count = (1.0 if is_sure else 0.5) / max(1, len(shares))
        return [each for each in shares if self._runs.setdefault(each.name, Offenses()).add(now, count)]

    def compiler_crashed(self, tenant: Tenant, now: float) -> bool:
        """Charge the crash of a compiler process. Return whether a suspension of the tenant's compilations begins."""
        return self._compiles.setdefault(tenant.name, Offenses()).add(now)

    def message_failed(self, tenant: Tenant, now: float) -> Status | None:
        """Charge a failure of the controller at a tenant's message. Return the reason if a suspension begins."""
        if not self._messages.setdefault(tenant.name, Offenses()).add(now):
            return None
        return self.client_problem(tenant, now)

    def client_problem(self, tenant: Tenant, now: float) -> Status | None:
        """Return the reason why the tenant may not open sessions or send commands now, or None."""
        if not self._messages:
            return None
        return self._problem(self._messages, tenant, now, "open sessions", "the controller failed at its messages")

    def launch_problem(self, tenant: Tenant, now: float) -> Status | None:
        """Return the reason why the tenant may not launch now, or None."""
        if not self._runs:
            return None
        return self._problem(
            self._runs, tenant, now, "launch programs", "its programs ended workers, or had to be stopped,"
        )

    def compile_problem(self, tenant: Tenant, now: float) -> Status | None:
        """Return the reason why the tenant may not compile now, or None."""
        crashed = "processes that compiled its functions crashed"
        return self.launch_problem(tenant, now) or self._problem(
            self._compiles, tenant, now, "compile functions", crashed
        )

    def compile_delay(self, tenant: Tenant, now: float) -> float:
        """Return the seconds until the tenant's next compilation may begin."""
        if not self._compiles:
            return 0.0
        offenses = self._compiles.get(tenant.name)
        return offenses.delay(now) if offenses is not None else 0.0

    def suspended_seconds(self, tenant: str, now: float) -> float:
        """Return the remaining seconds of the tenant's longest suspension, or 0."""
        some = (
            each.until - now
            for kind in (self._runs, self._compiles, self._messages)
            if (each := kind.get(tenant)) is not None
        )
        return max(0.0, *some, 0.0)

    def _problem(
        self, kind: Mapping[str, Offenses], tenant: Tenant, now: float, action: str, cause: str
    ) -> Status | None:
        offenses = kind.get(tenant.name)
        if offenses is None or now >= offenses.until:
            return None
        return failure(
            Code.RESOURCE_EXHAUSTED,
            f"tenant {tenant.name} cannot {action} for another {math.ceil(offenses.until - now)} s: "
            f"{cause} {MAX_CRASHES} times within {SPAN_SECONDS:.0f} s",
            Details(Kind.REFUSED, retriable=True),
        )


def blame(running: Iterable[Running]) -> list[Tenant]:
    """Return the tenants that may have caused a crash, each once."""
    functions = list(running)
    suspects = [each for each in functions if not each.is_proven] or functions
    return list({each.tenant.name: each.tenant for each in suspects}.values())
