"""The states of a version of published arrays, and the transitions between them.

    PENDING ──> COMPLETE ──> RETIRED ──> FREED
       │            │           ^
       v            v           │
     FAILED        LOST ────────┘

New readers get only COMPLETE versions. A RETIRED version lives until its last reader has left. A LOST version stays so
that errors can name it, until a newer version replaces it.
"""

from __future__ import annotations

import enum


class VersionState(enum.IntEnum):
    PENDING = 0  # some of its arrays are not computed yet
    COMPLETE = 1  # all of its arrays are on devices, and it is one of the newest
    RETIRED = 2  # newer versions have replaced it, or it was removed
    LOST = 3  # an island with a part of it has failed
    FAILED = 4  # it never became complete
    FREED = 5  # its memory is free


_S = VersionState

# The states that may follow each state. The comments name the methods of `NamedArrays` that cause the transitions.
TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    _S.PENDING: frozenset({_S.COMPLETE, _S.FAILED}),  # `complete`; `fail`, `remove`, `session_closed`
    _S.COMPLETE: frozenset({_S.RETIRED, _S.LOST}),  # `complete` of a newer version, `remove`; `lose`
    _S.RETIRED: frozenset({_S.FREED}),  # `close_reader` of the last reader, or at once without readers
    _S.LOST: frozenset({_S.RETIRED}),  # `complete` of a newer version, `remove`
    _S.FAILED: frozenset(),
    _S.FREED: frozenset(),
}
