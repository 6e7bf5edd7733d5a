"""The files of a version that was published with `spill="disk"`: their states, and the transitions between them.

    WRITING ──> WRITTEN ──> STORED ──> RESTORING
                   ^           ^          │ │
                   │           └──────────┘ │
                   └────────────────────────┘

A version is readable while its arrays are on devices: in WRITING and WRITTEN.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from atoll.cluster.state_machine import StateMachine
from atoll.errors import Status


class FileState(enum.IntEnum):
    WRITING = 0  # all arrays are on devices, and some are not in files yet
    WRITTEN = 1  # all arrays are on devices and in files
    STORED = 2  # all arrays are in files only
    RESTORING = 3  # launches make the arrays again from the files


_S = FileState

# The states that may follow each state. The comments name the methods of `NamedArrays` that cause the transitions.
FILE_TRANSITIONS: dict[FileState, frozenset[FileState]] = {
    _S.WRITING: frozenset({_S.WRITTEN}),  # `written`
    _S.WRITTEN: frozenset({_S.STORED}),  # `store`
    _S.STORED: frozenset({_S.RESTORING}),  # `restoring`
    _S.RESTORING: frozenset({_S.WRITTEN, _S.STORED}),  # `restored`; `not_restored`
}


@dataclass(eq=False)
class VersionFiles(StateMachine[FileState]):
    """The files of one version.

    Attributes:
      nbytes: size that counts against the tenant's quota `disk`, from the first file on.
      expected: size that follows from the types of the arrays.
      excess: bytes that the files needed beyond `nbytes` at the last attempt, if the quota had no space for them.
      problem: why the next step has not begun, for example that the disk is full or that no island is ready.
      failure: error of the last attempt to restore the arrays, for requests until `RETRY_SECONDS` after `failed`.
    """

    transitions = FILE_TRANSITIONS
    state: FileState = FileState.WRITING
    nbytes: int = 0
    excess: int = 0
    problem: str = ""
    failure: Status | None = None
    failed: float = 0.0
    expected: int = 0

    @property
    def are_on_devices(self) -> bool:
        """Return whether devices have the arrays."""
        return self.state in (FileState.WRITING, FileState.WRITTEN)

    def restoring_text(self) -> str:
        """Return when arrays that are in files only will be on devices again, as text."""
        if self.failure is not None:
            return f"could not be restored: {self.failure.message}"
        if self.problem:
            return f"waits to be restored: {self.problem}"
        return "is being restored" if self.state is FileState.RESTORING else "is restored when it is read"
