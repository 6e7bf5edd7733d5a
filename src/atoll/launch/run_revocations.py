"""Revoke delegated runs, because another session wants one of their islands or an island has failed.

A revocation concerns all committed runs of a session. The hosts of these runs start no more segments by themselves, and
report how many segments of each run they have started. When all hosts have answered, each run is limited to the
segments that its hosts continue to start by themselves, and the rest of its launch is put in line.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import Status
from atoll.launch.delegated_run_records import DelegatedRun, Revocation
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.gang_states import GangState
from atoll.state.session import Launch


class RunRevocations:
    """Decides how far revoked runs continue."""

    def __init__(
        self, shared: SharedState, parts: SharedParts, *, delegated_runs: DelegatedRuns, failing: FailingLaunches
    ) -> None:
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._scheduler, self._builder = parts.scheduler, parts.builder
        self._delegated_runs, self._failing = delegated_runs, failing
        self._revocations = delegated_runs.revocations

    def revoke_contended(self) -> None:
        """Revoke the runs on islands for which another session has a ready node."""
        contended = self._scheduler.contended
        for session in sorted(contended):
            if session not in self._revocations and session in self._sessions:
                self._decide(session, self._revoke(session))
        contended.clear()

    def revoke_unstarted(self, island: int, launches: Sequence[Launch], status: Status) -> None:
        """Revoke runs that had not started on an island that failed.

        If no other island has begun such a run, all of its launch joins the lines. Otherwise the launch fails.
        """
        for launch in launches:
            run = self._delegated_runs.run_of(launch)
            assert run is not None
            if run.limits is None:
                revocation = self._revocations.get(launch.session) or self._revoke(launch.session)
                revocation.lost[run.first] = status
            self._delegated_runs.island_lost(run, island)

    def runs_revoked(self, host: int, message: m.RunsRevoked) -> None:
        """Handle the answer of a host, which starts no more segments by itself."""
        revocation = self._revocations.get(message.session)
        if revocation is not None and host in revocation.asked:
            revocation.asked.discard(host)
            island = self._resources.topology.island_of(host)
            for run in revocation.runs:
                run.share({island} & run.gangs.keys())
            revocation.started.update(message.runs)
            self._decide(message.session, revocation)

    def hosts_failed(self, hosts: set[int]) -> None:
        """Stop waiting for the answers of failed hosts."""
        for session, revocation in list(self._revocations.items()):
            revocation.asked -= hosts
            self._decide(session, revocation)

    def _revoke(self, session: int) -> Revocation:
        runs = self._delegated_runs.committed(session)
        for run in runs:
            run.share(run.gangs)
        gangs = [gang for run in runs for gang in run.gangs.values()]
        asked = {host for gang in gangs for host in self._delegated_runs.under_way(gang)}
        revocation = self._revocations[session] = Revocation(runs, asked)
        for host in sorted(asked):
            self._outbox.to_host(host, m.RevokeRuns(session))
        return revocation

    def _decide(self, session: int, revocation: Revocation) -> None:
        """Limit the runs after all hosts have answered, and fail those that were lost after other hosts had begun."""
        if revocation.asked:
            return
        while True:
            runs = [run for run in revocation.runs if run.launch.error is None]
            limits = self._limits_of(runs, revocation)
            lost = (run for run in runs if run.first in revocation.lost)
            begun = next((run for run in lost if any(limits[run.first].values())), None)
            if begun is None:
                break
            why = revocation.lost[begun.first]
            text = f"{why.message} (hosts of other islands had begun it)"
            self._failing.fail(begun.launch, why.reworded(text).within(begun.launch.program.name))
        del self._revocations[session]
        self._delegated_runs.limit(session, [(run, limits[run.first]) for run in runs])
        for run in runs:
            if run.first in revocation.lost:
                self._renew_feeds(run, revocation.lost[run.first])
            self._delegated_runs.continue_limited(run)

    def _limits_of(self, runs: Sequence[DelegatedRun], revocation: Revocation) -> dict[int, dict[int, int]]:
        """Return how many segments the host of each island runs by itself, for each run by its number."""
        found = {}
        begun: set[int] = set()  # islands on which a later run has begun: earlier runs continue to their ends
        for run in reversed(runs):
            limits = found[run.first] = dict[int, int]()
            for island, gang in run.gangs.items():
                is_all = (run.has_ended(island) and gang.state is not GangState.REVOKED) or island in begun
                count, started = len(run.program.parts[island].gangs), revocation.started.get(gang.sequence, 0)
                limits[island] = count if is_all else min(max(0, started), count)
            run.program.close(limits)
            begun |= {island for island, limit in limits.items() if limit}
        return found

    def _renew_feeds(self, run: DelegatedRun, status: Status) -> None:
        """Fail the feeds of the run, which a failed island may have sent in part. It sends all of them again."""
        for gang in run.gangs.values():
            for host, feeds in gang.run.incoming():
                self._outbox.to_host(host, m.FailFeeds(run.launch.session, feeds, status))
        run.launch.host_feeds = self._builder.reserve_feeds(run.launch.program)
