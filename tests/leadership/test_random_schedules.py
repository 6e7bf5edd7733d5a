"""Tests that processes that are frozen, cut off and restarted at random never hold a lease at the same time."""

from __future__ import annotations

import random

import pytest

from atoll.errors import LeaseError
from atoll.leadership.election import Claim, LeaseState
from atoll.leadership.lease_keeper import LeaseKeeper, release_lease
from atoll.leadership.lease_record import LeaseRecord, StoredRecord
from tests.leadership.lease_in_memory import Clock, LeaseInMemory
from tests.thoroughness import examples, longer

_STEPS = 1000
_MAX_SKEW = 0.05  # of a clock's rate; a lease tolerates a third


class Skewed:
    """Clock with another start and another rate than the test's clock."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rate = 1 + rng.uniform(-_MAX_SKEW, _MAX_SKEW)
        self._offset = rng.uniform(0, 1e6)

    def __call__(self) -> float:
        return self._offset + self._clock.now * self._rate


class Way:
    """Connection of one process to the server, which may lose requests and replies, and takes time."""

    name = LeaseInMemory.name

    def __init__(self, store: LeaseInMemory, clock: Clock, rng: random.Random) -> None:
        self._store, self._clock, self._rng = store, clock, rng
        self.is_cut = False

    def read(self) -> StoredRecord | None:
        self._travel()
        found = self._store.read()
        self._travel()
        return found

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        self._travel()
        found = self._store.write(record, version)
        self._travel()
        return found

    def _travel(self) -> None:
        if self._rng.random() < 0.1:
            self._clock.now += self._rng.uniform(0, 3)
        if self.is_cut or self._rng.random() < 0.05:
            raise LeaseError("lost")


class Process:
    """Controller or standby. A standby knows the number of transitions of the controller that it has followed."""

    def __init__(self, name: str, store: LeaseInMemory, clock: Clock, rng: random.Random, claim: Claim) -> None:
        self.name = name
        self.way = Way(store, clock, rng)
        self.keeper = LeaseKeeper(self.way, name, Skewed(clock, rng))
        self.keeper.claim(claim)
        self.term = -1  # the number of transitions with which it has acquired the lease

    def step(self) -> None:
        self.keeper.step()
        if self.keeper.state is LeaseState.HELD and self.term < 0:
            self.term = self.keeper.transitions


@longer
@pytest.mark.parametrize("seed", range(examples(20)))
def test_at_most_one_process_holds_a_lease_and_each_other_one_has_more_transitions(seed: int) -> None:
    rng = random.Random(seed)
    store, clock = LeaseInMemory(), Clock()
    processes = [Process("0", store, clock, rng, Claim())]
    latest, latest_name = -1, ""
    holders = 0
    for count in range(1, _STEPS):
        process = rng.choice(processes)
        match rng.randrange(60):
            case 0 | 6:
                process.way.is_cut = not process.way.is_cut
            case 1:
                process.keeper.release()
            case 2:
                process.keeper.retake()
            case 3:
                process.keeper.name_standby(rng.choice(["", "standby"]))
            case 4:
                clock.now += rng.uniform(0, 30)
            case 5 if len(processes) < 4:
                processes.append(Process(str(count), store, clock, rng, Claim()))
            case 7 if len(processes) > 1:  # it is killed, and its engine releases the lease
                processes.remove(process)
                release_lease(store, process.name, keep_standby=True)
            case _:
                clock.now += rng.uniform(0, 0.6)
                if store.stored is not None:  # it follows the current holder
                    process.keeper.claim(Claim(store.record.transitions, rng.choice([None, "standby"])))
                process.step()
        holding = [each for each in processes if each.keeper.holds()]
        assert len(holding) <= 1, (seed, count, [each.name for each in holding])
        for each in holding:
            if each.name != latest_name:
                assert each.term > latest, (seed, count)
                latest, latest_name = each.term, each.name
                holders += 1
    assert holders > 1, "the schedule has takeovers"
