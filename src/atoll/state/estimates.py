"""Estimate the durations of gangs, shared by all programs and sessions whose gangs do the same.

A gang is known by its function, as its client sent it, by the kind of its devices, and by how many of them it has on
each host; not by which these are. Estimates outlive programs, and by way of the shell clusters: a program whose
functions are known starts with what they took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from atoll.cluster.resources import Host
from atoll.cluster.usage.usage_records import MOST_ESTIMATES, Estimate, Expected
from atoll.ir.steps import Steps
from atoll.state.gangs import FIRST_RUNS, DurationEstimate, GangSpec
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session
from atoll.state.tenants import Tenant

# Runs from which an estimate is worth keeping: the first often takes longer.
_LEAST_RUNS = 2
# Changes by less than a fifth are not worth writing.
_LEAST_CHANGE = 5
_SAVE_SECONDS = 10.0


GangsByKey = dict[str, list[GangSpec]]


class Estimates:
    """Pure. `contents` has the hashes of what clients sent as functions, by the workers' names for these."""

    def __init__(self, contents: Mapping[str, str], hosts: Mapping[int, Host]) -> None:
        self._contents = contents
        self._hosts = hosts
        self._known: dict[str, Estimate] = {}  # the newest last
        self._keys: dict[int, dict[str, int]] = {}  # by program: of how many of its gangs
        self._live: dict[str, DurationEstimate] = {}  # of gangs of programs that are registered
        self._users: Counter[str] = Counter()  # gangs that share it
        self._saved: dict[str, int] = {}
        self._next_save = 0.0

    def load(self, estimates: Iterable[Estimate]) -> None:
        """Set the estimates of earlier clusters."""
        for each in estimates:
            self._store(each)
            self._saved[each.key] = each.nanoseconds

    def keys_of(self, program: RegisteredProgram) -> Steps[GangsByKey]:
        """Return the program's gangs by their keys, for `begin`."""
        found: GangsByKey = {}
        for node in program.nodes:
            for gang in node:
                if not gang.host_call and (key := self._key_of(gang)):
                    found.setdefault(key, []).append(gang)
            yield
        return found

    def begin(self, program: RegisteredProgram, gangs: GangsByKey) -> None:
        """The program was registered: its gangs start with earlier estimates, and share them with others."""
        for key, some in gangs.items():
            duration_estimate = self._live.setdefault(key, self._duration_estimate(key))
            for gang in some:
                gang.duration_estimate = duration_estimate
            self._users[key] += len(some)
        if gangs:
            self._keys[program.number] = {key: len(some) for key, some in gangs.items()}

    def end(self, program: RegisteredProgram) -> None:
        """Nobody launches it any more; what its gangs have taught stays."""
        for key, count in self._keys.pop(program.number, {}).items():
            self._users[key] -= count
            if not self._users[key]:
                self._learn(key)
                del self._live[key], self._users[key]

    def changes(self, now: float) -> tuple[Estimate, ...]:
        """What has changed much since it was taken here last; now and then only, or there is nothing."""
        if now < self._next_save:
            return ()
        self._next_save = now + _SAVE_SECONDS
        for key in self._live:
            self._learn(key)
        changed = []
        for key, each in self._known.items():
            saved = self._saved.get(key)
            if saved is None or abs(each.nanoseconds - saved) * _LEAST_CHANGE > saved:
                changed.append(each)
                self._saved[key] = each.nanoseconds
        return tuple(changed)

    def _key_of(self, gang: GangSpec) -> str:
        return gang.estimate_key(self._contents, self._hosts[gang.hosts[0]].devices[0].kind)

    def _duration_estimate(self, key: str) -> DurationEstimate:
        """What is kept. A first run that takes longer counts for little then."""
        known = self._known.get(key)
        return DurationEstimate() if known is None else DurationEstimate(known.nanoseconds, max(known.runs, FIRST_RUNS))

    def _learn(self, key: str) -> None:
        """Keeps what gangs of that key have taught."""
        known = self._live[key]
        if known.runs >= _LEAST_RUNS:
            self._store(Estimate(key, known.nanoseconds, known.runs))

    def _store(self, estimate: Estimate) -> None:
        known = self._known
        known.pop(estimate.key, None)
        known[estimate.key] = estimate
        if len(known) > MOST_ESTIMATES:
            oldest = next(iter(known))
            del known[oldest]
            self._saved.pop(oldest, None)


def expectations(sessions: Iterable[Session], viewer: Tenant | None) -> tuple[Expected, ...]:
    """What launches of programs that are registered now are expected to take; with a `viewer`, of its own alone."""
    found: dict[tuple[str, str], int] = {}
    for session in sessions:
        if viewer not in (None, session.tenant):
            continue
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram) and (expected := program.expected):
                key = session.tenant.name, program.name
                found[key] = max(expected, found.get(key, 0))
    return tuple(Expected(*key, nanoseconds) for key, nanoseconds in found.items())
