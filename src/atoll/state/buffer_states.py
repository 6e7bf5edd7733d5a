"""The states of a logical buffer, and the transitions between them.

    PENDING ──> READY <──> SPILLED
       │          │           │
       └─> DOOMED ┴─> FAILED <┘

A restored buffer is PENDING again until it is on devices. If a migration gives up, the buffers that it had restored
are SPILLED again, as they still exist in the memory of hosts or in files.
"""

from __future__ import annotations

import enum


class BufferState(enum.IntEnum):
    PENDING = 0  # its launch has not ended
    DOOMED = 1  # its launch has failed, and has gangs that have not ended
    READY = 2  # on devices
    SPILLED = 3  # in the memory of hosts or in files
    FAILED = 4  # stands for an error


_S = BufferState

TRANSITIONS: dict[BufferState, frozenset[BufferState]] = {
    _S.PENDING: frozenset({_S.DOOMED, _S.READY, _S.FAILED, _S.SPILLED}),
    _S.DOOMED: frozenset({_S.FAILED, _S.SPILLED}),
    _S.READY: frozenset({_S.SPILLED, _S.FAILED}),
    _S.SPILLED: frozenset({_S.PENDING, _S.FAILED}),
    _S.FAILED: frozenset({_S.SPILLED}),
}

# The same as bit masks, by state.
LEGAL = tuple(sum(1 << after for after in TRANSITIONS[state]) for state in BufferState)


class HandleState(enum.IntEnum):
    """What a client may still do with a handle that it has not released."""

    USABLE = 0
    CONSUMED = 1  # donated: nothing new may use it
    DELETED = 2  # the same, and its memory is freed even if other buffers share it, once no gang needs it
