"""The states of a logical buffer, and the transitions between them.

    PENDING ──> READY <──> SPILLED
       │          │           │
       └─> DOOMED ┴─> FAILED <┘

A restored buffer is PENDING again until it is on devices. If a migration fails, the buffers that it had restored become
SPILLED again, since their contents still exist in the memory of hosts or in files.
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

# The states that may follow each state. The comments name the methods of `Entry` and `BufferDirectory` that cause the
# changes. `BufferDirectory.make_ready` and `lose_all` assign the state without `Entry.enter`, because a call per buffer
# is too slow for launches with many results and for 10^5 lost buffers. They check the state that they replace.
TRANSITIONS: dict[BufferState, frozenset[BufferState]] = {
    # `BufferDirectory.fail`; `BufferDirectory.make_ready` or `Entry.settle` at the end of the launch; `spill` if its
    # migration gives up
    _S.PENDING: frozenset({_S.DOOMED, _S.READY, _S.FAILED, _S.SPILLED}),
    # `Entry.settle` when the last gang of the launch has ended
    _S.DOOMED: frozenset({_S.FAILED, _S.SPILLED}),
    # `Entry.spill`; `BufferDirectory.lose_all` if its island fails (`controller.islands.island_losses`)
    _S.READY: frozenset({_S.SPILLED, _S.FAILED}),
    # `Entry.restore`; `Entry.lose` if the host with its contents fails (`migration.array_spiller`)
    _S.SPILLED: frozenset({_S.PENDING, _S.FAILED}),
    # `spill` if its migration gives up
    _S.FAILED: frozenset({_S.SPILLED}),
}


class HandleState(enum.IntEnum):
    """Whether a client may still use a handle that it has not released."""

    USABLE = 0
    CONSUMED = 1  # donated: new launches cannot use it
    DELETED = 2  # like CONSUMED; its memory is freed once no gang needs it, even if other buffers share that memory
