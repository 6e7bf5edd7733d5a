"""The delegated runs of all sessions: a record for each, and an index by session and island. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.errors import Status
from atoll.state.buffer_directory import Entry
from atoll.state.delegated_parts import DelegatedProgram
from atoll.state.dispatch_units import Unit
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Launch


class DelegatedRun(msgspec.Struct, eq=False):
    """A launch that is delegated, or is in line to be delegated.

    Attributes:
      first: the sequence number of the program's first gang, and the number of the run's node.
      gangs: its gang on each island.
      ending: the number of gangs that have not ended.
      limits: after a revocation, the number of segments that its host runs, by island.
      exclusive_ns: device time that it took without competitors, by island, in nanoseconds.
    """

    launch: Launch
    program: DelegatedProgram
    first: int
    gangs: dict[int, Gang[GangRun]]
    ending: int
    limits: dict[int, int] | None = None
    exclusive_ns: dict[int, int] = msgspec.field(default_factory=dict)

    def has_ended(self, island: int) -> bool:
        return not self.gangs[island].run.hosts_left

    def gangs_in(self, state: GangState) -> list[Gang[GangRun]]:
        """Return the gangs in this state, in the order of their islands."""
        return [gang for _, gang in sorted(self.gangs.items()) if gang.state is state]

    def share(self, islands: Iterable[int]) -> None:
        """Note that other sessions want these islands: device time from now on is charged to the run's session."""
        self.exclusive_ns |= {island: self.gangs[island].run.device_ns for island in islands}

    def shared_ns(self, gang: Gang[GangRun]) -> int:
        """Return the device time to charge for a gang that has ended: 0 if it never had competitors."""
        taken = gang.run.device_ns
        return taken - self.exclusive_ns.get(gang.island, taken)

    def make_entries(self) -> None:
        """Make the entries of values between nodes, which a launch needs that is not delegated."""
        program, entries = self.launch.program, self.launch.entries
        for number, made in enumerate(program.values, start=program.arguments):
            if made.result < 0:
                entries[number] = Entry(made.hosts, made.nbytes, producer=program.name)

    def rest(self, limits: dict[int, int]) -> list[tuple[int, Unit]]:
        """Return the nodes beyond the limit of segments on each island, with their first sequence numbers."""
        positions = dict.fromkeys(limits, 0)
        found, number = [], self.first
        for node in self.launch.program.nodes:
            if positions[node[0].island] >= limits[node[0].island]:
                found.append((number, node))
            for spec in node:
                positions[spec.island] += 1
            number += len(node)
        return found


class Revocation(msgspec.Struct, eq=False):
    """The revocation of a session's runs, whose hosts were asked how many segments of each they have started.

    Attributes:
      runs: the runs, in the order in which they were launched.
      asked: hosts that have not answered.
      started: the answers, by sequence number of the gang.
      lost: the reason of each run, by its number, that an island has lost before it was started there.
    """

    runs: list[DelegatedRun]
    asked: set[int]
    started: dict[int, int] = msgspec.field(default_factory=dict)
    lost: dict[int, Status] = msgspec.field(default_factory=dict)


class _SessionRuns(msgspec.Struct):
    """The delegated runs of a session, in the order in which they were launched.

    Attributes:
      all: the runs that have not ended, by number.
      on_island: by island, the runs whose gang there has not ended.
      limited: the numbers of those that a revocation has limited.
    """

    all: dict[int, DelegatedRun] = msgspec.field(default_factory=dict)
    on_island: dict[int, dict[int, DelegatedRun]] = msgspec.field(default_factory=dict)
    limited: set[int] = msgspec.field(default_factory=set)


class DelegatedRunIndex:
    """The delegated runs of each session and island, so that an event of a session does not look at all runs.

    A session's runs are committed in the order in which they were launched. So on each island, those that are committed
    and have not ended are before those that are still in line.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, _SessionRuns] = {}

    def add(self, run: DelegatedRun) -> None:
        """Add a run, which is the session's newest one."""
        session = run.launch.session
        runs = self._sessions.get(session)
        if runs is None:
            runs = self._sessions[session] = _SessionRuns()
        runs.all[run.first] = run
        for island in run.gangs:
            runs.on_island.setdefault(island, {})[run.first] = run
        if run.limits is not None:
            runs.limited.add(run.first)

    def restore(self, run: DelegatedRun) -> None:
        """Add a run of which gangs may have ended."""
        self.add(run)
        for island, gang in run.gangs.items():
            if gang.is_over:
                self.gang_ended(run, island, is_last=False)

    def limit(self, run: DelegatedRun, limits: dict[int, int]) -> None:
        """Note that a revocation has limited the run to these numbers of segments, by island."""
        run.limits = limits
        runs = self._sessions.get(run.launch.session)
        if runs is not None and run.first in runs.all:  # it may have ended before its hosts answered
            runs.limited.add(run.first)

    def gang_ended(self, run: DelegatedRun, island: int, is_last: bool) -> None:
        """Note that the run's gang on the island has ended, or never starts. Remove the run if it was the last one."""
        session = run.launch.session
        runs = self._sessions[session]
        on_island = runs.on_island[island]
        del on_island[run.first]
        if not on_island:
            del runs.on_island[island]
        if is_last:
            del runs.all[run.first]
            runs.limited.discard(run.first)
            if not runs.all:
                del self._sessions[session]

    def of(self, session: int) -> list[DelegatedRun]:
        """Return the session's runs that have not ended."""
        runs = self._sessions.get(session)
        return [] if runs is None else list(runs.all.values())

    def has_limited(self, session: int) -> bool:
        """Return whether a revocation has limited one of the session's runs."""
        runs = self._sessions.get(session)
        return runs is not None and bool(runs.limited)

    def committed(self, session: int, island: int) -> list[DelegatedRun]:
        """Return the session's runs that are committed and have not ended on the island, in order."""
        runs = self._sessions.get(session)
        found: list[DelegatedRun] = []
        for run in () if runs is None else runs.on_island.get(island, {}).values():
            if run.gangs[island].state < GangState.COMMITTED:
                break
            if run.gangs[island].keeps_order and not run.has_ended(island):
                found.append(run)
        return found

    def validate(self, runs: Iterable[DelegatedRun]) -> None:
        """Raise AssertionError if the index differs from that of these runs, which are in order. For tests."""
        expected = DelegatedRunIndex()
        for run in runs:
            expected.restore(run)
        assert self._sessions == expected._sessions
        for each in self._sessions.values():
            for island, on_island in each.on_island.items():
                are_committed = [run.gangs[island].state >= GangState.COMMITTED for run in on_island.values()]
                assert are_committed == sorted(are_committed, reverse=True), "committed runs are first"
