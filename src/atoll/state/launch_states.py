"""The states of a launch, and the transitions between them. The states of its gangs are in `gang_states`.

BEGINNING ──> ACTIVE <── DELEGATED
    │           │            │
    └───> FAILING, ENDED <───┘          FAILING ──> ENDED

`Launcher._launch_program` chooses the first state of a client's launch: BEGINNING for a large launch, DELEGATED for one
that its hosts run without the controller, and otherwise ACTIVE. The launches of `Launcher.launch_to_restore` and
`ControlFlowLaunches` begin ACTIVE. `TRANSITIONS` names the methods that cause each later transition. A message that
`Launcher.launch` refuses makes no launch: only its results become errors.
"""

from __future__ import annotations

import enum


class LaunchState(enum.IntEnum):
    BEGINNING = 0  # is large, and its entries and nodes are being made
    ACTIVE = 1  # its nodes are in line, deferred or in flight
    DELEGATED = 2  # one node stands for the whole launch, and values between its nodes have no entries
    FAILING = 3  # has an error, and gangs that have not ended
    ENDED = 4  # all gangs have ended or were dropped: the results are ready, or stand for `Launch.error`


_S = LaunchState

# The states that may follow each state. The comments name the methods that cause the transitions.
TRANSITIONS: dict[LaunchState, frozenset[LaunchState]] = {
    # `LargeLaunchSteps.proceed`; `FailingLaunches.fail`; ENDED if the session was closed, which drops the nodes that
    # were made
    _S.BEGINNING: frozenset({_S.ACTIVE, _S.FAILING, _S.ENDED}),
    # `FailingLaunches.fail`; `LaunchEnds.count_ended_gang` for the last gang; `LaunchQueue.line_up` without gangs
    _S.ACTIVE: frozenset({_S.FAILING, _S.ENDED}),
    # `DelegatedRuns._launch_rest`, after a revocation or if the run must not be committed; `FailingLaunches.fail`;
    # `LaunchEnds.count_ended_gang` for the last gang
    _S.DELEGATED: frozenset({_S.ACTIVE, _S.FAILING, _S.ENDED}),
    # `LaunchEnds.count_ended_gang` for the last gang
    _S.FAILING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}
