"""The states of a gang, from its launch to its end, the transitions between them, and the reasons to wait.

    NEW ──> DEFERRED ──> WAITING <──> READY ──> COMMITTED ──> RUNNING ──> DONE or FAILED
                                                    │
                                                    └──> HELD ──> GRANTED ──> REVOKED ──> DONE or FAILED

All gangs of a node are in the same state until the node is committed; from then on each has its own. A gang that has
not started may be DROPPED at any time. `TRANSITIONS` lists what is legal, and `Gang.enter` refuses anything else.
"""

from __future__ import annotations

import enum
from enum import StrEnum


class GangState(enum.IntEnum):
    """The state of a gang. The order of the members is that of a gang's life, so states can be compared."""

    NEW = 0  # in no line yet
    DEFERRED = 1  # in no line, until the launches on which its launch depends have made progress
    WAITING = 2  # in line, and lacks something: the node's `reason` says what
    READY = 3  # its node lacks nothing; an island with room may commit it
    COMMITTED = 4  # has its place in the order of its island
    HELD = 5  # delegated, and its island has room; the revocation of its session's runs decides whether it is granted
    GRANTED = 6  # delegated: its host starts the gangs for which it stands
    REVOKED = 7  # delegated, and its host will start no more; what is left waits for the run's other islands
    RUNNING = 8  # was sent to its hosts
    DONE = 9  # has ended on all of its hosts
    FAILED = 10  # was sent to its hosts, and its launch failed or joined the lines again
    DROPPED = 11  # was never sent, and will not be


_S = GangState

# By state, those that may follow. Each event that causes a transition is a method of the component that is named.
TRANSITIONS: dict[GangState, frozenset[GangState]] = {
    # `Scheduler.defer`, `enqueue`
    _S.NEW: frozenset({_S.DEFERRED, _S.WAITING, _S.READY, _S.DROPPED}),
    # `Scheduler.enqueue`, called by `DependencyTracker` and `LargeLaunches`
    _S.DEFERRED: frozenset({_S.WAITING, _S.READY, _S.DROPPED}),
    # `Scheduler.arrived`, `retry`, `resume`, `admit`; for what follows in line, the commitment of the node ahead
    _S.WAITING: frozenset({_S.READY, _S.DROPPED}),
    # `Scheduler.next` commits a node. It waits again if memory is lacking, or if `lacks` was called meanwhile.
    _S.READY: frozenset({_S.WAITING, _S.COMMITTED, _S.DROPPED}),
    # `Launcher.start_ready` and, for delegated runs, `DelegatedRuns.start`
    _S.COMMITTED: frozenset({_S.RUNNING, _S.HELD, _S.DROPPED}),
    # At once, or when the last host has answered `RevokeRuns`; or the run's launch or island has failed
    _S.HELD: frozenset({_S.GRANTED, _S.REVOKED, _S.DONE, _S.FAILED}),
    # `RunProgress`; REVOKED if other sessions want the island, or if it failed before it had begun
    _S.GRANTED: frozenset({_S.REVOKED, _S.DONE, _S.FAILED}),
    # The gangs that are left have joined the lines; or the launch has failed
    _S.REVOKED: frozenset({_S.DONE, _S.FAILED}),
    # `Done` or `Failed` from each host; or the island has failed
    _S.RUNNING: frozenset({_S.DONE, _S.FAILED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
    _S.DROPPED: frozenset(),
}

# The same, by number, as a bit mask of the states that may follow: `Gang.enter` is on the path of every launch.
LEGAL = tuple(sum(1 << after for after in TRANSITIONS[state]) for state in GangState)


class Reason(StrEnum):
    """One at a time: what stands first in the way."""

    OWN = "own"  # what its session has launched before it, which goes first
    ORDER = "order"  # its turn, or room for it: others are before it, or in flight
    ALONE = "alone"  # a gang that runs alone is before it, or is it
    MEMORY = "memory"  # of its devices
    QUOTA = "quota"  # of its tenant's memory
    RATE = "rate"  # of its tenant's launches or uploads: they are limited per second
    BYTES = "bytes"  # that its client sends
    PLAN = "plan"  # a large one, on its way to the hosts
    PYTHON = "python"  # what the client's Python, or Python on the hosts, is about to make
    FUNCTIONS = "functions"  # that are compiled again, on an island that failed
    ISLAND = "island"  # which is not there


# Reasons one after another, each with its seconds.
Waited = tuple[tuple[Reason, float], ...]
