"""The state of a standby, in a file of its directory, for the commands of its user.

A standby serves nobody, so commands do not connect to it. It removes the file when it takes over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.state_machine import StateMachine
from atoll.decodable import decodable
from atoll.errors import ClusterError
from atoll.missing import read_if_exists

_log = logging.getLogger(__name__)

_FILE = "standby.json"


class StandbyState(StrEnum):
    """The state of a standby. The values appear in reports."""

    COPYING = "copying"  # the controller's state
    FOLLOWING = "following"  # it takes over if the controller is lost
    LOST = "lost"  # the connection to the controller has ended
    TAKEN_OVER = "taken over"


_S = StandbyState
TRANSITIONS: Mapping[StandbyState, frozenset[StandbyState]] = {
    _S.COPYING: frozenset({_S.FOLLOWING, _S.LOST}),
    _S.FOLLOWING: frozenset({_S.LOST, _S.TAKEN_OVER}),
    _S.LOST: frozenset({_S.COPYING, _S.TAKEN_OVER}),
    _S.TAKEN_OVER: frozenset(),
}


class StandbyStatus(msgspec.Struct, frozen=True):
    """A standby of a controller."""

    controller: str  # address that it follows
    state: StandbyState  # its state
    since: float  # when the state began, in seconds since 1970
    reason: str = ""  # why it lost the controller; empty: it did not
    has_copy: bool = False  # whether it has the controller's whole state, or had it at the loss
    lease: str = ""  # name of the external lease that it needs to take over; empty: none


class StandbyProgress(StateMachine[StandbyState]):
    """The state of this process, a standby of `controller`. Each change is written to a file in `directory`, unless "".

    `lease` is the name of its external lease, or "". `clock()` returns seconds since 1970.
    """

    transitions = TRANSITIONS

    def __init__(
        self, directory: str, controller: str, clock: Callable[[], float] = time.time, lease: str = ""
    ) -> None:
        self.state = StandbyState.COPYING
        self._has_copy = False  # of the controller's whole state, and the controller will not be restarted
        self._file = Path(directory) / _FILE if directory else None
        self._controller = controller
        self._clock = clock
        self._lease = lease
        self._write()

    @property
    def may_take_over(self) -> bool:
        """Whether the controller relied on this process's copy until now, or until it was lost."""
        return self._has_copy

    def copies(self) -> None:
        """Record that the controller is connected again, whose state replaces the earlier copy."""
        if self.state is StandbyState.LOST:
            self.enter(StandbyState.COPYING)
            self._has_copy = False
            self._write()

    def follows(self) -> None:
        """Record that the copy is complete and the controller relies on this process."""
        self.enter(StandbyState.FOLLOWING)
        self._has_copy = True
        self._write()

    def lost(self, reason: str) -> None:
        """Record that the connection to the controller has ended."""
        if self.state is not StandbyState.LOST:
            self.enter(StandbyState.LOST)
            self._write(reason)

    def takes_over(self) -> None:
        """Record that this process serves the cluster from now on, and remove the file."""
        self.enter(StandbyState.TAKEN_OVER)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._file)

    def _write(self, reason: str = "") -> None:
        if self._file is not None:
            status = StandbyStatus(self._controller, self.state, self._clock(), reason, self._has_copy, self._lease)
            try:
                write_atomically(self._file, msgspec.json.encode(status))
            except OSError as error:
                _log.warning("cannot write %s, which `atoll status` reads: %s", self._file, error.strerror)


def standby_status(directory: str) -> StandbyStatus | None:
    """Return the state of the standby with this directory; None if the directory is that of a cluster.

    Raises ClusterError if that is unknown, because the file cannot be read.
    """
    path = Path(directory) / _FILE
    try:
        content = read_if_exists(path)
        return msgspec.json.decode(content, type=decodable(StandbyStatus)) if content else None
    except (OSError, msgspec.MsgspecError) as error:
        raise ClusterError(f"cannot find out whether {directory} is that of a standby: {path.name}: {error}") from None
