"""How many runs may wait for their clients' Python at a time.

Each of them occupies a device's queue for as long as its client likes. So there is a bound for an island's hosts, which
others' sessions leave room in, and one for a session. A callback may start such runs itself, as many as stock JAX takes
on a device, and wait for them: the bounds are as wide as they can be where a run has a thread of its own on its host
(`worker/future_arrays.py`). Others keep threads of XLA's, which are few. Of a function over several devices one
run is under way at a time: what its callbacks raise is known when the run has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic

from atoll.scheduling.queued_nodes import Dependency, Payload

# On each host of an island. XLA's CPU client takes 32 runs on a device, and lets more wait: the rest is for all others.
MOST_OF_AN_ISLAND = 24
MOST_OF_A_SESSION = 20

# Of these, those that keep threads of XLA's.
MOST_IN_XLA_OF_AN_ISLAND = 8
MOST_IN_XLA_OF_A_SESSION = 4


class Places(Generic[Payload]):
    """How many runs of a session and on an island's hosts may be under way, and how many are."""

    def __init__(self, of_a_session: int, of_an_island: int) -> None:
        self._most_of_a_session = of_a_session
        self._most_of_an_island = of_an_island
        self._of_session: Counter[int] = Counter()
        self._of_island: Counter[int] = Counter()

    def has_room(self, run: Dependency[Payload]) -> bool:
        (node,) = run.nodes
        return self._of_session[node.session] < self._most_of_a_session and all(
            self._of_island[gang.island] < self._most_of_an_island for gang in node.gangs
        )

    def count(self, run: Dependency[Payload], change: int) -> None:
        (node,) = run.nodes
        self._of_session[node.session] += change
        if not self._of_session[node.session]:
            del self._of_session[node.session]
        for gang in node.gangs:
            self._of_island[gang.island] += change


class ClientRunLimits(Generic[Payload]):
    """Those that are in their lines or have started, and those that wait for a place, in order."""

    def __init__(self) -> None:
        self._admitted: set[Dependency[Payload]] = set()
        self._waiting: list[Dependency[Payload]] = []
        self._all: Places[Payload] = Places(MOST_OF_A_SESSION, MOST_OF_AN_ISLAND)
        self._in_xla: Places[Payload] = Places(MOST_IN_XLA_OF_A_SESSION, MOST_IN_XLA_OF_AN_ISLAND)
        self._alone: set[str] = set()  # functions of which one run at a time is under way

    def begin(self, run: Dependency[Payload]) -> bool:
        """Whether it has a place. If not, `end` of another one will return it."""
        if run in self._admitted:
            return True
        if self._has_room(run):
            self._enter(run)
            return True
        self._waiting.append(run)
        return False

    def end(self, run: Dependency[Payload]) -> list[Dependency[Payload]]:
        """It has ended, or will not be; returns those that have a place now."""
        if run not in self._admitted:
            if run in self._waiting:
                self._waiting.remove(run)
            return []
        self._admitted.discard(run)
        self._count(run, -1)
        self._alone -= run.alone
        entered = []
        for each in self._waiting:
            if self._has_room(each):
                self._enter(each)
                entered.append(each)
        self._waiting = [each for each in self._waiting if each not in self._admitted]
        return entered

    def _has_room(self, run: Dependency[Payload]) -> bool:
        return all(places.has_room(run) for places in self._places(run)) and self._alone.isdisjoint(run.alone)

    def _enter(self, run: Dependency[Payload]) -> None:
        self._admitted.add(run)
        self._count(run, 1)
        self._alone |= run.alone

    def _count(self, run: Dependency[Payload], change: int) -> None:
        for places in self._places(run):
            places.count(run, change)

    def _places(self, run: Dependency[Payload]) -> tuple[Places[Payload], ...]:
        return (self._all,) if run.has_thread else (self._all, self._in_xla)
