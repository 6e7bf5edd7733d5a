"""End gangs that were sent to their hosts: hosts end or fail their parts, or are lost.

A gang ends when all of its hosts have ended their parts. If a part fails, the launch of the gang fails, unless the loss
of another host may be the cause: `failures` decides that a little later.

Pure.
"""

from __future__ import annotations

from atoll.errors import Kind, Status
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.launch_ends import LaunchEnds
from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun


class GangEnds:
    """Handles what hosts report about gangs in flight. Reports about other gangs are late, and change nothing."""

    def __init__(
        self,
        shared: SharedState,
        parts: SharedParts,
        *,
        left_out: LeftOutCollectives,
        ends: LaunchEnds,
        failing: FailingLaunches,
        delegated_runs: DelegatedRuns,
    ) -> None:
        self._resources = shared.resources
        self._outbox = shared.outbox
        self._quarantine = shared.quarantine
        self._services = parts.services
        self._scheduler, self._sequential = parts.scheduler, parts.sequential
        self._reservations, self._charges = parts.reservations, parts.charges
        self._dependencies = parts.dependencies
        self._in_flight, self._left_out = parts.in_flight, left_out
        self._ends, self._failing = ends, failing
        self._delegated_runs = delegated_runs

    def enqueued(self, sequence: int) -> None:
        """Handle that a host has enqueued its part of a gang."""
        gang = self._in_flight.get(sequence)
        if self._sequential is not None and gang is not None:
            self._sequential.enqueued(gang)

    def rows_moved(self, host: int, message: m.RowsMoved) -> None:
        """Count the bytes of rows that a host has moved for a gang."""
        gang = self._in_flight.get(message.sequence)
        if gang is not None and host in gang.run.hosts_left:
            gang.run.note_rows(host, message.sent, message.received)

    def parts_ended(self, hosts: tuple[int, ...], sequence: int, times: tuple[int, ...]) -> None:
        """Handle that hosts have ended their parts of a gang.

        `times` has for each host its dispatch there and its end, in nanoseconds of the host's clock.
        """
        gang = self._in_flight.get(sequence)
        if gang is None:
            return
        run = gang.run
        left = run.hosts_left
        if not left.issuperset(hosts):  # some have ended or failed before
            for position, host in enumerate(hosts):
                if host in left:
                    self.parts_ended((host,), sequence, times[2 * position : 2 * position + 2])
            return
        self._charges.parts_ended(gang, hosts, times)
        left.difference_update(hosts)
        if not left:
            self._all_parts_ended(gang)

    def parts_lost(self, gang: Gang[GangRun], hosts: set[int], failure: Status) -> None:
        """Handle that hosts of a gang are lost, with their island. Its launch has failed.

        The hosts of a joint gang on its other islands end their parts.
        """
        run = gang.run
        run.failure = run.failure or failure
        run.hosts_left -= hosts
        if not gang.islands or not run.hosts_left:
            self.end_gang(gang)

    def part_failed(self, host: int, sequence: int, failure: Status) -> None:
        """Handle that a host's part of a gang has failed."""
        gang = self._in_flight.get(sequence)
        if gang is None or host not in gang.run.hosts_left:
            self._outbox.to_host(host, m.CollectiveEnded(sequence))  # the gang may have been a collective
            return
        if gang.run.spec.collective or gang.run.spec.runs_together:  # it starts no later one until all have ended this
            self._left_out.add(gang, host)
        if gang.run.spec.collective:
            cause = self._services.cause_of(gang.node)
            failure = failure if cause is None else cause.within(gang.run.launch.program.name)
        if gang.run.spec.runs_together:
            gang.run.failure = gang.run.failure or failure
        if not gang.node.is_delegated:  # other gangs of a delegated run are in flight on the host
            gang.run.hosts_left.discard(host)
        if self._may_be_of_another_host(gang, failure):
            # The loss of that host is reported soon, and names the cause.
            gang.run.failure = gang.run.failure or failure
        else:
            self._failing.fail(gang.run.launch, failure)
        if not gang.run.hosts_left:
            self._all_parts_ended(gang)

    def device_failed(self, host: int, sequence: int, failure: Status) -> None:
        """Handle that a collective gang failed on a device of a host, and may not end on others.

        This failure is the cause of those that the other devices will report.
        """
        gang = self._in_flight.get(sequence)
        if gang is None or not gang.run.spec.collective or host not in gang.run.hosts_left:
            return
        if gang.run.spec.is_apart and host not in gang.run.left_out:
            self._left_out.add(gang, host)
        for each in (gang,) if gang.run.spec.is_apart else gang.node.gangs:
            each.run.failure = each.run.failure or failure

    def ended_with_others(self, run: GangRun, failure: Status) -> bool:
        """Return whether a gang failed by the end of a Python process, which ends with those on the other hosts."""
        is_ended_process = failure.details.kind is Kind.PYTHON and failure.details.retriable
        return is_ended_process and len(run.spec.hosts) > 1

    def _may_be_of_another_host(self, gang: Gang[GangRun], failure: Status) -> bool:
        """Return whether the loss of another host may have failed a gang on this one."""
        communicates = gang.run.spec.collective or failure.details.kind is Kind.LINK
        if communicates or self.ended_with_others(gang.run, failure):
            return True
        launch = gang.run.launch
        # Its inputs may be made together with other hosts, and fail before the failure of the host is known.
        reads_unready = any(not entry.ready for entry in launch.entries[: len(launch.arguments)])
        may_read_of_collective = reads_unready and any(
            other.run.spec.collective and other.node.session == launch.session for other in self._in_flight.values()
        )
        if may_read_of_collective:
            return True
        has_other_hosts = len(self._resources.hosts_of(gang.island)) > 1
        return has_other_hosts and (reads_unready or len(launch.nodes) > 1)

    def _all_parts_ended(self, gang: Gang[GangRun]) -> None:
        run = gang.run
        self._left_out.ended(gang.node)
        if run.failure is not None and run.launch.error is None:
            return  # `Failures` decides soon whether it has failed by itself, and ends it
        if run.launch.error is None and gang.exclusive:
            for name in run.spec.functions:
                self._quarantine.ended_well(name)
        self.end_gang(gang)

    def end_gang(self, gang: Gang[GangRun]) -> None:
        """End a gang that was started, with or without success. Its session is charged for it."""
        run, node = gang.run, gang.node
        if node.is_delegated:
            self._delegated_runs.end_failed_gang(gang)
            return
        launch, dependency = run.launch, node.dependency
        gang.enter(GangState.DONE if launch.error is None else GangState.FAILED)
        self._in_flight.pop(gang.sequence, None)
        self._left_out.ended(node)
        if self._sequential is not None:
            self._sequential.ended(gang)
        self._charges.ended(gang)
        self._scheduler.finished(gang, run.device_ns)
        self._reservations.ended(gang)
        if dependency is not None and all(other.is_over for other in node.gangs):
            self._dependencies.resolve(dependency)
        self._ends.count_ended_gang(launch)
