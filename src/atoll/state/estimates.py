"""Duration estimates of gangs, shared by all programs and sessions whose gangs do the same.

The key of an estimate consists of the gang's functions, as their clients sent them, the kind of the devices, and their
number per host. Estimates outlive programs, and also clusters, since the controller's process saves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from atoll.cluster.resources import Host
from atoll.cluster.usage.usage_records import MAX_ESTIMATES, Estimate, Expected
from atoll.ir.steps import Steps
from atoll.state.gang_specs import FIRST_RUNS, DurationEstimate, GangSpec
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session
from atoll.state.tenants import Tenant

# Runs from which an estimate is kept. The first run often takes longer.
_MIN_RUNS = 2
# An estimate is saved again if it has changed by more than a fifth.
_MIN_CHANGE = 5
_SAVE_SECONDS = 10.0

GangsByKey = dict[str, list[GangSpec]]


class Estimates:
    """The duration estimates of a cluster.

    `contents` maps the workers' names of functions to the hashes of the sources that clients sent.
    """

    def __init__(self, contents: Mapping[str, str], hosts: Mapping[int, Host]) -> None:
        self._contents = contents
        self._hosts = hosts
        self._known: dict[str, Estimate] = {}  # the newest last
        self._keys: dict[int, dict[str, int]] = {}  # number of gangs per key, by program
        self._live: dict[str, DurationEstimate] = {}  # of gangs of registered programs
        self._users: Counter[str] = Counter()  # number of gangs that share each of these
        self._saved: dict[str, int] = {}  # nanoseconds
        self._next_save = 0.0

    def load(self, estimates: Iterable[Estimate]) -> None:
        """Load the estimates of earlier clusters."""
        for each in estimates:
            self._store(each)
            self._saved[each.key] = each.nanoseconds

    def keys_of(self, program: RegisteredProgram) -> Steps[GangsByKey]:
        """Return the program's gangs by key, for `begin`."""
        found: GangsByKey = {}
        for node in program.nodes:
            for gang in node:
                if not gang.host_call and (key := self._key_of(gang)):
                    found.setdefault(key, []).append(gang)
            yield
        for gang, *_ in program.units.nodes:
            if gang.parts and (key := self._key_of(gang.parts[0])):
                found[key].append(gang)
            yield
        return found

    def begin(self, program: RegisteredProgram, gangs: GangsByKey) -> None:
        """Give the gangs of a program that was registered the estimates that gangs with the same keys share."""
        for key, some in gangs.items():
            duration_estimate = self._live.setdefault(key, self._duration_estimate(key))
            for gang in some:
                gang.duration_estimate = duration_estimate
            self._users[key] += len(some)
        if gangs:
            self._keys[program.number] = {key: len(some) for key, some in gangs.items()}

    def end(self, program: RegisteredProgram) -> None:
        """Note that the program was released. Keep the estimates of its gangs."""
        for key, count in self._keys.pop(program.number, {}).items():
            self._users[key] -= count
            if not self._users[key]:
                self._keep(key)
                del self._live[key], self._users[key]

    def changes(self, now: float) -> tuple[Estimate, ...]:
        """Return the estimates to save, which have changed by more than a fifth. Check every `_SAVE_SECONDS` only."""
        if now < self._next_save:
            return ()
        self._next_save = now + _SAVE_SECONDS
        for key in self._live:
            self._keep(key)
        changed = []
        for key, each in self._known.items():
            saved = self._saved.get(key)
            if saved is None or abs(each.nanoseconds - saved) * _MIN_CHANGE > saved:
                changed.append(each)
                self._saved[key] = each.nanoseconds
        return tuple(changed)

    def _key_of(self, gang: GangSpec) -> str:
        return gang.estimate_key(self._contents, self._hosts[gang.hosts[0]].devices[0].kind)

    def _duration_estimate(self, key: str) -> DurationEstimate:
        """Return a copy of the known estimate. It has enough runs so that a slow first run does not replace it."""
        known = self._known.get(key)
        return DurationEstimate() if known is None else DurationEstimate(known.nanoseconds, max(known.runs, FIRST_RUNS))

    def _keep(self, key: str) -> None:
        """Copy the live estimate of a key to the known ones, if it is based on enough runs."""
        known = self._live[key]
        if known.runs >= _MIN_RUNS:
            self._store(Estimate(key, known.nanoseconds, known.runs))

    def _store(self, estimate: Estimate) -> None:
        known = self._known
        known.pop(estimate.key, None)
        known[estimate.key] = estimate
        if len(known) > MAX_ESTIMATES:
            oldest = next(iter(known))
            del known[oldest]
            self._saved.pop(oldest, None)


def expectations(sessions: Iterable[Session], viewer: Tenant | None) -> tuple[Expected, ...]:
    """Return the expected durations of launches, per tenant and program name. A `viewer` sees only its own."""
    found: dict[tuple[str, str], int] = {}
    for session in sessions:
        if viewer not in (None, session.tenant):
            continue
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram) and (expected := program.expected):
                key = session.tenant.name, program.name
                found[key] = max(expected, found.get(key, 0))
    return tuple(Expected(*key, nanoseconds) for key, nanoseconds in found.items())
