"""The losses of sessions when an island fails: launches, arrays, and bytes that were on their way to its hosts.

`island_recovery` decides that an island has failed. `launch.failures` decides which launches survive.
"""

from __future__ import annotations

from itertools import compress
from operator import attrgetter

from atoll.cluster.lifecycle import IslandDrained, IslandFailed, IslandRemoved, IslandRestarted
from atoll.controller.sessions.queries import Queries
from atoll.controller.state import ClusterState
from atoll.errors import Status
from atoll.launch.compilation import Compilation
from atoll.launch.failures import Failures
from atoll.launch.launches import ENTRIES_PER_STEP, Launches
from atoll.launch.survivors import Survivors
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session

_HOSTS = attrgetter("hosts")


class IslandLosses:
    """Fails what sessions have on an island that has failed, and lets them continue after its restart."""

    def __init__(
        self,
        state: ClusterState,
        *,
        launches: Launches,
        failures: Failures,
        compilation: Compilation,
        queries: Queries,
    ) -> None:
        self._resources = state.resources
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._remains = state.remains
        self._launches = launches
        self._reservations, self._buffers = launches.reservations, launches.buffers
        self._failures = failures
        self._compilation = compilation
        self._queries = queries

    def island_failed(self, lost: IslandFailed) -> None:
        """Fail what was on the island or would have run there. Later work that needs the island waits for it."""
        island, status = lost.island, lost.status
        hosts = set(self._resources.hosts_of(island))
        for session in self._sessions.values():
            session.feeds.forget_unawaited(hosts)
        survivors = self._failures.fail_launches_of_island(island, status)
        for session in self._sessions.values():
            if session.has_client:
                session.unacknowledged_failures.setdefault(island, []).append(status)
            self._outbox.to_session(session.number, m.HostsFailed(tuple(sorted(hosts))))
            self._lose_arrays(session, hosts, survivors, status)
        impatient = {session.number for session in self._sessions.values() if not session.waits_for_islands}
        self._compilation.fail_on(hosts, status, impatient)
        self._queries.fail_on(hosts, status, impatient)
        self._failures.fail_without_inputs()

    def island_drained(self, drained: IslandDrained) -> None:
        """Fail what is still on the island, or waits for it, such as work of sessions that leave it by themselves.

        The proxies of all sessions are notified when the workers of the island end (`operators.drains`).
        """
        island, status = drained.island, drained.status
        hosts = set(self._resources.hosts_of(island))
        survivors = self._failures.fail_launches_of_island(island, status)
        for session in self._sessions.values():
            session.feeds.forget_unawaited(hosts)
            self._lose_arrays(session, hosts, survivors, status)
        self._fail_waiting(island, status)
        self._failures.fail_without_inputs()

    def _lose_arrays(self, session: Session, hosts: set[int], survivors: Survivors, status: Status) -> None:
        """Have the session's arrays on these hosts stand for an error, unless a surviving launch makes them again.

        A session may have 10^5 arrays, which few programs have made on few sets of hosts. All become errors at once, so
        nothing uses one of them, and flushes release their memory in steps.
        """
        entries = session.directory.entries
        # By identity, since Python computes the hash of a tuple at each use. Arrays of one program share a tuple.
        placed = list(map(_HOSTS, entries.values()))
        by_identity = dict(zip(map(id, placed), placed, strict=True))
        lost_on = {number for number, each in by_identity.items() if not hosts.isdisjoint(each)}
        if not lost_on:
            return
        also_elsewhere = {number for number in lost_on if not hosts.issuperset(by_identity[number])}
        ready: dict[str, list[Entry]] = {}  # by producer
        others: list[tuple[int, Entry]] = []
        parts_left: list[tuple[int, Entry]] = []  # arrays of which other hosts have parts
        for handle, entry in compress(entries.items(), map(lost_on.__contains__, map(id, placed))):
            if survivors.will_make(entry):
                continue
            if entry.state is BufferState.READY:
                ready.setdefault(entry.producer, []).append(entry)
                if id(entry.hosts) in also_elsewhere:
                    parts_left.append((handle, entry))
            elif entry.state is not BufferState.FAILED or entry.blocks:
                others.append((handle, entry))
        for handle, entry in others:
            error = status.within(entry.producer)
            if not entry.ready:
                self._reservations.release_on(hosts, entry)
                self._buffers.settle(session, handle, error)
            else:
                self._reservations.release(entry)
                session.directory.lose(entry, error)
        # If the arrays of a session are being restored, those that are lost may become spilled ones again.
        is_moving = session.is_suspended or session.has_spilled
        for producer, lost in ready.items():
            session.directory.lose_all(lost, status.within(producer))
            if is_moving:
                for entry in lost:
                    self._reservations.release(entry)
            else:
                self._remains.release_in_steps(session, lost, self._reservations.release, ENTRIES_PER_STEP)
        if parts_left:
            self._buffers.free_errors(session, parts_left, hosts)
            self._outbox.flush_frees()  # before an array is restored under the same handle
        if ready or others:
            session.note_error(status)

    def failure_acknowledged(self, session: Session, message: m.FailureAcknowledged) -> None:
        """Handle that a proxy knows of a loss. The message names the uploads that its client will send again."""
        topology = self._resources.topology  # hosts may not have joined yet in the cluster after the lost one
        for island in {topology.island_of(host) for host in message.hosts if host < topology.host_count}:
            losses = session.unacknowledged_failures.get(island)
            if losses is None:
                continue
            status = losses.pop(0)
            if not losses:
                del session.unacknowledged_failures[island]
            hosts = set(self._resources.hosts_of(island))
            lost = session.feeds.lost_on(hosts, message.resent, message.unsent)
            if lost:
                self._failures.feeds_lost(lost, status)
                self._failures.fail_without_inputs()

    def island_restarted(self, back: IslandRestarted) -> None:
        """Let all sessions continue on the island."""
        island = back.island
        for session in self._sessions.values():
            self._outbox.to_session(session.number, m.HostsRestarted(self._resources.addresses_of(island)))
            self._compilation.recompilations.invalidate_island(session, island)
        self._launches.island_restarted(island)
        self._queries.ask_again(set(self._resources.hosts_of(island)))

    def island_removed(self, removed: IslandRemoved) -> None:
        """Fail everything that waits for the island."""
        self._fail_waiting(removed.island, removed.status)

    def _fail_waiting(self, island: int, status: Status) -> None:
        self._failures.fail_waiting(island, status)
        hosts = set(self._resources.hosts_of(island))
        self._compilation.fail_on(hosts, status)
        self._queries.fail_on(hosts, status)
