"""Admission of hosts: which workers and relays may join, and how hosts learn of each other."""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.lifecycle import HostState, IslandFailed
from atoll.cluster.sandbox.mechanisms import why_not_confined
from atoll.controller.islands.island_hosts import HostMessages
from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.islands.relay_groups import Relays
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status, StatusError
from atoll.launch.connections import Peer, PeerHandlers
from atoll.protocol import messages as m
from atoll.protocol.events import Received


class HostAdmission:
    """Admits the workers of hosts and the relays of processes, and handles their loss.

    A worker is *joining* from its Hello to its WorkerReady.

    Args:
      refuse: Refuses a peer that has not joined.
      expel: Disconnects a relay that has sent a forbidden message.
      worker_lost: Called when the connection of a worker is lost, with the reason.
      relay_lost: Called when the connection of a relay is lost, with the reason.
      complete: Called when the last host of the cluster has joined.
    """

    def __init__(
        self,
        state: ClusterState,
        hosts: HostMessages,
        recovery: IslandRecovery,
        relays: Relays,
        *,
        refuse: Callable[[Peer, Status], None],
        expel: Callable[[Peer, Status], None],
        worker_lost: Callable[[Peer, str], None],
        relay_lost: Callable[[Peer, str], None],
        complete: Callable[[], None],
    ) -> None:
        self._connections = state.connections
        self._outbox = state.outbox
        self._resources = state.resources
        self._leases = state.leases
        self._settings = state.settings
        self._tenants = state.tenants
        self._hosts = hosts
        self._recovery = recovery
        self._relays = relays
        self._refuse = refuse
        self._complete = complete
        self.joining_worker = PeerHandlers("joining worker", self._worker_ready, refuse)
        self.worker = PeerHandlers("worker", self._from_worker, self._expel_worker, worker_lost)
        self.relay = PeerHandlers("relay", self._from_relay, expel, relay_lost)

    # ---- joining

    def admit_worker(self, peer: Peer, hello: m.Hello) -> None:
        peer.handlers = self.joining_worker

    def admit_relay(self, peer: Peer, hello: m.Hello) -> None:
        """Admit the relay of a process. Raises StatusError if the process has one."""
        if not hello.process or hello.process in self._connections.relays:
            raise StatusError(Code.ALREADY_EXISTS, f"process {hello.process!r} cannot have one more relay")
        self._outbox.name(peer.connection, f"the relay of process {hello.pid}")
        peer.handlers = self.relay
        self._connections.relays[hello.process] = peer.connection
        for host in sorted(self._connections.hosts):
            self._relays.join_process(host)

    def _worker_ready(self, peer: Peer, event: Received) -> None:
        ready = event.message
        assert isinstance(ready, m.WorkerReady)  # the permission table allows nothing else
        assert peer.hello is not None
        resources = self._resources
        problem = self._not_expected(ready, peer.hello.incarnation)
        if problem:
            self._refuse(peer, Status(Code.ALREADY_EXISTS, problem))
            return
        peer.number = ready.host
        peer.handlers, peer.leases = self.worker, self._leases
        self._connections.hosts[ready.host] = peer.connection
        self._outbox.name(peer.connection, f"the worker of host {ready.host}")
        was_complete = resources.is_complete
        self._leases.renew(ready.host, event.seconds)
        self._hosts.join(ready, peer.hello)
        self._relays.join_process(ready.host)
        self._introduce_hosts()
        if resources.is_complete and not was_complete:
            self._complete()

    def _not_expected(self, ready: m.WorkerReady, incarnation: int) -> str:
        """Return why the host is not admitted, or ""."""
        topology = self._resources.topology
        known = self._resources.hosts.get(ready.host)
        is_there = known is not None and known.state is HostState.READY
        if is_there or not 0 <= ready.host < topology.host_count or topology.island_of(ready.host) != ready.island:
            return f"host {ready.host} of {topology} is not expected"
        island = self._resources.islands[ready.island]
        if incarnation < island.incarnation:
            return f"host {ready.host} is not expected: a later incarnation of island {ready.island} has been started"
        if island.is_over:
            return f"host {ready.host} is not expected: island {ready.island} is {island.state}"
        if self._tenants.are_told_apart and not self._settings.insecure_sandbox and ready.sandbox is not None:
            return why_not_confined(ready.sandbox)
        return ""

    # ---- introductions

    def introduce_remaining_hosts(self, lost: IslandFailed) -> None:
        self._introduce_hosts()

    def _introduce_hosts(self) -> None:
        """Tell all hosts which other hosts have joined. A host's secret is that of its worker's connection."""
        if not self._resources.is_complete:
            return
        hosts, peers = self._connections.hosts, self._connections.peers
        there = {host: self._resources.hosts[host].data_address for host in hosts}
        secrets = tuple((host, there[host], peers[hosts[host]].secret) for host in sorted(there))
        everyone = m.Peers(secrets, self._leases.seconds)
        for host in hosts:
            self._outbox.to_host(host, everyone)
        self._relays.form()

    # ---- messages

    def _from_worker(self, peer: Peer, event: Received) -> None:
        self._leases.renew(peer.number, event.seconds)
        try:
            self._hosts.handle(peer.number, event.message)
        except StatusError as error:
            self._expel_worker(peer, error.status)

    def _from_relay(self, peer: Peer, event: Received) -> None:
        assert isinstance(event.message, m.MembersDone | m.MemberFailed)  # the permission table allows nothing else
        self._relays.handle(peer.connection, event.message)

    def _expel_worker(self, peer: Peer, status: Status) -> None:
        """Disconnect a worker that has sent a message that no worker of this version sends."""
        self._outbox.close(peer.connection, f"host {peer.number}: {status}")
        self._recovery.fail_worker(peer.number, str(status))

    # ---- losses

    def fail_absent_worker(self, host: int, reason: str) -> None:
        """Handle the loss, unless the engine has reported it or a new worker has joined meanwhile."""
        if host not in self._connections.hosts and not self._resources.has_failed(host):
            self._recovery.fail_worker(host, reason)

    def fail_without_relay(self, connection: int, reason: str) -> None:
        """Restart the islands whose hosts have lost their relay, and the messages that it should have forwarded.

        Usually the process has ended, and the hosts have lost their connections as well.
        """
        for island in self._relays.islands_behind(connection):
            self._recovery.relay_lost(island, reason)
