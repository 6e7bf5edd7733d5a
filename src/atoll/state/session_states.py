"""The states of a session, from its opening to its close, and the transitions between them.

    RUNNING ──> QUIESCING ──> DRAINING ──> SPILLING ──> SUSPENDED <──> WAITING
     ^  ^           │            │            │             │             │
     │  └───────────┴────────────┴────────────┘             v             │
     └────────────────────────────────────────────────── RESUMING <───────┘

Until its arrays are spilled, a session that is being suspended can continue. If the resumption fails, the session is
SUSPENDED again. A session that an earlier cluster suspended on disk is SUSPENDED from the start. A session may be
CLOSED in each state.

A RUNNING session may become DETACHED: its script has ended, and its launches continue. It is then CLOSED.
"""

from __future__ import annotations

import enum


class SessionState(enum.IntEnum):
    RUNNING = 0
    QUIESCING = 1  # is being suspended, and its proxy has yet to hold back its client
    DRAINING = 2  # its launches have yet to end
    SPILLING = 3  # its arrays are being copied from devices
    SUSPENDED = 4  # other sessions may use its devices
    WAITING = 5  # is suspended, and is resumed as soon as there is space
    RESUMING = 6  # its arrays are being restored
    CLOSED = 7  # its client has left, or it was ended
    DETACHED = 8  # its client has left, and its submitted work continues


_S = SessionState

# The states that may follow each state. The comments name the methods of `Suspensions` that cause the transitions.
TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    # `suspend`, `add_persisted`; `DetachedSessions.client_left`
    _S.RUNNING: frozenset({_S.QUIESCING, _S.SUSPENDED, _S.DETACHED, _S.CLOSED}),
    # `quiesced`; `_abort` for this state and the next two
    _S.QUIESCING: frozenset({_S.DRAINING, _S.RUNNING, _S.CLOSED}),
    # `proceed`
    _S.DRAINING: frozenset({_S.SPILLING, _S.RUNNING, _S.CLOSED}),
    # `_spilled`
    _S.SPILLING: frozenset({_S.SUSPENDED, _S.RUNNING, _S.CLOSED}),
    # `resume`; `_begin_resume` if the cluster suspended the session by itself
    _S.SUSPENDED: frozenset({_S.WAITING, _S.RESUMING, _S.CLOSED}),
    # `_try_to_resume`
    _S.WAITING: frozenset({_S.SUSPENDED, _S.RESUMING, _S.CLOSED}),
    # `_resumed`
    _S.RESUMING: frozenset({_S.RUNNING, _S.SUSPENDED, _S.CLOSED}),
    _S.DETACHED: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}
