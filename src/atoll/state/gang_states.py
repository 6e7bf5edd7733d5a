"""The states of a gang, from its launch to its end, the transitions between them, and the reasons to wait.

The usual way of a gang, and that of a gang that stands for a delegated run:

    NEW ──> READY or WAITING            READY ──> COMMITTED ──> RUNNING ──> DONE or FAILED
     └──> DEFERRED ──> READY or WAITING               └──> HELD ──> GRANTED ──> DONE or FAILED
    READY <──> WAITING                                                  └──> REVOKED ──> DONE or FAILED

All gangs of a node are in the same state until the node is committed. From then on, each gang has its own state. A gang
may be DROPPED until it is RUNNING or HELD. `TRANSITIONS` lists the legal transitions, and `Gang.enter` refuses all
others. `launch_states` has the states of the launch.
"""

from __future__ import annotations

import enum
from enum import StrEnum


class GangState(enum.IntEnum):
    """The state of a gang.

    The numbers are compared: up to READY a gang is not committed, up to COMMITTED it was not sent, from HELD to REVOKED
    it stands for a delegated run, and from DONE on it is over.
    """

    NEW = 0  # not in line yet
    DEFERRED = 1  # not in line yet: its launch depends on other launches, or is large and put in line in steps
    WAITING = 2  # in line, but blocked for the node's `reason`
    READY = 3  # nothing is missing: an island that is not full may commit the node
    COMMITTED = 4  # has its position in the order of its island
    HELD = 5  # delegated, and its island is not full; a revocation that is under way decides whether it is granted
    GRANTED = 6  # delegated: its hosts start the gangs that it stands for
    REVOKED = 7  # delegated: its part on this island has ended or was lost; the rest waits for the run's other islands
    RUNNING = 8  # was sent to its hosts
    DONE = 9  # ended on all of its hosts; or was HELD when its session ended
    FAILED = 10  # was sent or HELD when its launch failed, or when its launch was put in line again with new gangs
    DROPPED = 11  # was not sent, and will not be


_S = GangState

# The states that may follow each state. The comments name the methods or messages that cause the transitions.
TRANSITIONS: dict[GangState, frozenset[GangState]] = {
    # `Scheduler.defer`, `enqueue`
    _S.NEW: frozenset({_S.DEFERRED, _S.WAITING, _S.READY, _S.DROPPED}),
    # `Scheduler.enqueue`, called by `DependencyTracker` and `LargeLaunchSteps`
    _S.DEFERRED: frozenset({_S.WAITING, _S.READY, _S.DROPPED}),
    # `Scheduler.arrived`, `retry`, `offer_again`, `delegated_run_ended`; for nodes further back in line, the
    # commitment or the drop of the node ahead
    _S.WAITING: frozenset({_S.READY, _S.DROPPED}),
    # `Scheduler.start_next` calls `_commit`. The node waits again if memory or its island is missing, if `lacks` was
    # called, or if an older node of its session was put in line.
    _S.READY: frozenset({_S.WAITING, _S.COMMITTED, _S.DROPPED}),
    # `GangStarts.start_ready`, by way of `_start` and, for delegated runs, `DelegatedRuns.start`
    _S.COMMITTED: frozenset({_S.RUNNING, _S.HELD, _S.DROPPED}),
    # `DelegatedRuns.start`, at once or after the last host has answered `RevokeRuns`; or the launch or the island
    # failed
    _S.HELD: frozenset({_S.GRANTED, _S.REVOKED, _S.DONE, _S.FAILED}),
    # `RunProgress` for the last of its gangs: REVOKED if the run was limited by a revocation; or the island failed
    _S.GRANTED: frozenset({_S.REVOKED, _S.DONE, _S.FAILED}),
    # The remaining gangs were put in line (`DelegatedRuns._end_gang`), or the launch failed
    _S.REVOKED: frozenset({_S.DONE, _S.FAILED}),
    # `Done` or `Failed` from each host, or the failure of the island
    _S.RUNNING: frozenset({_S.DONE, _S.FAILED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
    _S.DROPPED: frozenset(),
}


class Reason(StrEnum):
    """The first reason why a node waits."""

    OWN = "own"  # earlier launches of its session
    ORDER = "order"  # its turn: other nodes are ahead, or in flight on full hosts
    ALONE = "alone"  # an exclusive gang: its own, or one that is ahead
    MEMORY = "memory"  # device memory
    QUOTA = "quota"  # its tenant's quota of memory
    RATE = "rate"  # its tenant's limits per second on launches or uploads
    BYTES = "bytes"  # bytes from its client
    PLAN = "plan"  # the transfer of a large plan to the hosts
    PYTHON = "python"  # results of the client's Python, or of Python on the hosts
    FUNCTIONS = "functions"  # functions of its gangs that are compiled again on an island that failed
    ISLAND = "island"  # an island that is not available


# Consecutive reasons, each with its seconds.
Waited = tuple[tuple[Reason, float], ...]
