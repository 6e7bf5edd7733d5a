"""Sessions: how they open and close.

Invariant: when a session has ended, everything that it owned is freed.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes.leases import CLIENT_LEASES, Leases
from atoll.controller.state import ClusterState
from atoll.errors import OK, Code, Details, Kind, Status, StatusError, failure
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.protocol import messages as m
from atoll.state.session import Session
from atoll.state.session_states import SessionState
from atoll.state.tenants import Tenant


class Sessions:
    """Opens and closes sessions. The cluster's state contains the open ones."""

    def __init__(self, state: ClusterState) -> None:
        self._sessions = state.sessions
        self._connections = state.connections
        self._outbox = state.outbox
        self._resources = state.resources
        self._slices = state.slices
        self._history = state.history
        self._settings, self._tenants = state.settings, state.tenants
        self._lease_seconds = state.settings.lease_seconds
        self._at_end: tuple[Callable[[Session], None], ...] = ()
        self.next_number = 1  # of a session
        self.leases = Leases(CLIENT_LEASES * self._lease_seconds)  # of proxies, by session

    def subscribe(self, *at_end: Callable[[Session], None]) -> None:
        """Add functions that are called with each session that has ended, in this order, to free what it owned."""
        self._at_end += at_end

    def open(
        self,
        connection: int,
        secret: str,
        pid: int,
        label: str,
        tenant: Tenant,
        platform: str = "",
        run: NamedRun = UNNAMED,
    ) -> Session:
        """Open a session of the tenant on this connection, whose place the tenant has already reserved.

        All devices of a session have the same platform, because JAX lowers a program for its client's platform.

        Raises NOT_FOUND if no island of the cluster has that platform, and UNAVAILABLE if no island can take a session.
        """
        platform = self._resources.platform_for(platform)
        virtual, locations = self._resources.virtual_devices(platform)
        if not virtual:
            what = f"{platform} devices" if len(self._resources.topology.platforms) > 1 else "devices"
            raise StatusError(
                Code.UNAVAILABLE,
                f"the cluster has no {what} for a new session: {self._resources.states_text()}. "
                "Its operator can start an island with `atoll add-island`",
            )
        open_ones = tuple(each for each in virtual if not self._slices.closed(self.next_number, locations[each.id]))
        if not open_ones:
            raise StatusError(Code.UNAVAILABLE, "all devices of the cluster are in exclusive slices of other sessions")
        virtual, locations = open_ones, {each.id: locations[each.id] for each in open_ones}
        devices = self._slices.open(self.next_number, virtual, locations)
        session = Session(self.next_number, pid, label, secret, devices, platform, tenant, run=run)
        self.next_number += 1
        number = session.number
        self._history.record("session opened", session.label or f"process {pid}", -1, number, tenant.name)
        self._sessions[number] = session
        self._connections.sessions[number] = connection
        for host in self._resources.hosts:
            rules = self._tenants.python_rules(tenant, self._settings)
            self._outbox.to_host(host, m.OpenStore(number, secret, tenant.host_name, rules))
        first = self._resources.hosts[virtual[0].host]
        addresses = self._resources.addresses()
        self._outbox.to_session(
            number,
            m.Welcome(
                number,
                secret,
                virtual,
                addresses,
                first.platform,
                first.platform_version,
                min(LAUNCH_WINDOW, session.tenant.settings.launches or LAUNCH_WINDOW),
                self._lease_seconds,
                m.MAX_CARRIED_BYTES,
            ),
        )
        for island, hosts in self._resources.away().items():
            text = f"island {island} restarts"
            unknown = failure(Code.DATA_LOSS, text, Details(Kind.ISLAND, (island,), retriable=True))
            session.unacknowledged_failures[island] = [self._resources.islands[island].last_failure or unknown]
            self._outbox.to_session(number, m.HostsFailed(hosts))
        return session

    def open_vault(self, tenant: Tenant) -> Session:
        """Open a session without a client, which owns the published arrays of the tenant."""
        number = self.next_number
        self.next_number += 1
        devices = self._slices.open(number, (), {})
        vault = Session(number, 0, "published arrays", "", devices, tenant=tenant, is_vault=True)
        vault.waits_for_islands = False
        self._sessions[number] = vault
        rules = self._tenants.python_rules(tenant, self._settings)
        for host in self._resources.hosts:
            self._outbox.to_host(host, m.OpenStore(number, "", tenant.host_name, rules))
        return vault

    def close(self, number: int, status: Status = OK) -> None:
        """Close a session whose client has left, or which was ended with `status`."""
        session = self._sessions.pop(number, None)
        if session is None:
            return
        if session.has_client:
            session.tenant.left()
        kind = "session closed" if status.ok else "session ended"
        self._history.record(kind, status.message or session.label, -1, number, session.tenant.name)
        self._connections.sessions.pop(number, None)
        self.leases.forget(number)
        self._slices.close(number)
        self._outbox.forget_session(number)
        for forget in self._at_end:
            forget(session)
        session.enter(SessionState.CLOSED)

    def end(self, number: int, status: Status) -> None:
        """End a session that violates a rule: its proxy gets the reason."""
        connection = self._connections.sessions.get(number)
        self._outbox.to_session(number, m.Closing(status))
        self.close(number, status)
        if connection is not None:
            self._outbox.close(connection, f"session {number} ends: {status}")

    def silent(self, now: float) -> tuple[tuple[int, Status], ...]:
        """Return the sessions whose proxies have been silent for too long, with the errors that end them."""
        status = Status(Code.UNAVAILABLE, f"this session's proxy was silent for {self.leases.seconds:.0f} s")
        return tuple((number, status) for number in self.leases.expired(now))

    def tick(self, now: float) -> None:
        """Send heartbeats to proxies. Called once per second."""
        for number, session in self._sessions.items():
            if not session.has_client:
                continue
            if self._connections.sessions.get(number) in self._connections.away:
                continue
            if not self.leases.has(number):
                self.leases.renew(number, now)
            session.pings += 1
            self._outbox.to_session(number, m.Ping(round(self.leases.left(number, now), 1), now))
