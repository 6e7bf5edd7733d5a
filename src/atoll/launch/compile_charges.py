"""The charges of compilations, for the tenants of the sessions that wait: usage, limits, device time, and offenses.

The first session that waits for a function on a host pays for its compilation there.
"""

from __future__ import annotations

from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.compiled_functions import FunctionRegistry, hosts_of
from atoll.state.session import GangRun, Session
from atoll.state.tenants import Tenant
from atoll.state.usage import Meter


class CompileCharges:
    """Charges compilations, and delays those of tenants that have used too much."""

    def __init__(
        self, shared: SharedState, functions: FunctionRegistry, scheduler: Scheduler[GangRun], meter: Meter
    ) -> None:
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._offenses = shared.offenses
        self._rates = shared.rates
        self._functions = functions
        self._scheduler = scheduler
        self._meter = meter

    def delay(self, tenant: Tenant) -> float:
        """Return the seconds for which a compilation of the tenant waits: others crashed, or took long."""
        now = self._outbox.seconds
        rates = self._rates.of(tenant)
        wait = rates.compile_wait(now) if rates is not None else 0.0
        return max(wait, self._offenses.compile_delay(tenant, now))

    def compiled(self, host: int, message: m.Compiled) -> None:
        """Charge a compilation that has succeeded."""
        session = self._payer(message.function, host)
        if session is None:
            return
        account = self._meter.account(session.tenant.name, session.number, session.label, message.name)
        account.compiled(message.seconds)
        if not message.cached:
            self._charge_seconds(session, host, message)

    def _charge_seconds(self, session: Session, host: int, message: m.Compiled) -> None:
        """Charge a compilation to its tenant's limit, and to its device time if the host's devices are its CPUs.

        An island's hosts compile the same function at the same time: only the first of them counts for the limit.
        """
        rates, locations = self._rates.of(session.tenant), self._functions.locations.get(message.function)
        if rates is not None and locations is not None and host == min(hosts_of(locations)):
            rates.compiles.take(message.seconds, self._outbox.seconds)
        record = self._resources.hosts.get(host)
        if record is not None and record.has_cpu_devices:
            self._scheduler.compiled(record.island, session.number, session.tenant, round(message.seconds * 1e9))

    def crashed(self, host: int, message: m.Compiled) -> None:
        """Charge the crash of a compiler process, if the cluster has several tenants."""
        session = self._payer(message.function, host)
        if session is not None and session.tenant.memory is not None:
            self._offenses.compiler_crashed(session.tenant, self._outbox.seconds)

    def _payer(self, name: str, host: int) -> Session | None:
        """Return the session that pays for a compilation, or None if it has ended."""
        waiting = self._functions.waiting.get((name, host), ())
        return self._sessions.get(waiting[0].session) if waiting else None
