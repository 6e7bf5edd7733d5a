"""Failed starts of a session's Python processes, which wait for one another on several hosts.

If a process does not start on one host, the processes on the other hosts would wait until a timeout. So the host stores
the failure in the key-value store of the hosts, and the other hosts end their starting processes.

Starts have numbers from 1. A host advances its number after each failure, its own or another host's, so all hosts use
the same number for processes that wait for one another. A host that starts late may find a failure of an earlier start:
it ignores the failure if the host that failed has started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.errors import StatusError, shortened
from atoll.host_services.python.rendezvous import KeyValues

_GET_SECONDS = 1.0
_PAUSE_SECONDS = 0.1  # between two attempts, also if the store fails at once
_UNKNOWN = (OSError, StatusError)


class ProgramStarts:
    """The starts of a program's processes, as the host with `rank` knows them.

    `key_values` returns the store of the program's hosts.
    """

    def __init__(self, session: int, rank: int, key_values: Callable[[], KeyValues]) -> None:
        self._prefix = f"atoll/python/{session}/start"
        self._rank = rank
        self._key_values = key_values
        self._number = 1

    def begin(self) -> ProgramStart:
        """Return the next start of this host's process."""
        return ProgramStart(self, self._number)

    def publish(self, number: int) -> None:
        """Let other hosts know that this host's process starts. Blocks."""
        try:
            self._key_values().set(self._key_of(self._rank), str(number))
        except _UNKNOWN:
            return  # other hosts then end their processes because of an earlier failure, and start them again

    def fail(self, number: int, reason: str) -> None:
        """Store that this host's process did not start. Blocks."""
        self.advance(number)
        try:
            self._key_values().set(f"{self._prefix}/failed/{number}", f"{self._rank} {shortened(reason)}")
        except _UNKNOWN:
            return  # the hosts have lost one another, and their processes detect that

    def failure(self, number: int) -> tuple[bool, str]:
        """Wait a moment for a failure with this number. Return whether it is of an earlier start, and the reason."""
        try:
            rank, _, reason = self._key_values().get(f"{self._prefix}/failed/{number}", _GET_SECONDS).partition(" ")
        except _UNKNOWN:
            return False, ""
        self.advance(number)
        try:
            return int(self._key_values().get(self._key_of(int(rank)), _GET_SECONDS)) > number, reason
        except (*_UNKNOWN, ValueError):
            return False, reason

    def advance(self, number: int) -> None:
        """Give the next start a number after this one."""
        self._number = max(self._number, number + 1)

    def _key_of(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


class ProgramStart:
    """One start of this host's process. The methods block, and are called on different threads."""

    def __init__(self, starts: ProgramStarts, number: int) -> None:
        self._starts = starts
        self._number = number

    def failed(self, reason: str) -> None:
        """Note that the process has ended before it was ready."""
        self._starts.fail(self._number, reason)

    def wait(self, is_starting: Callable[[], bool]) -> str:
        """Wait until the process on another host has failed to start. Return the reason, or "" if this one has started.

        `is_starting` says whether this host's process is still starting.
        """
        self._starts.publish(self._number)
        while is_starting():
            is_earlier, reason = self._starts.failure(self._number)
            if is_earlier:
                self._number += 1
                self._starts.publish(self._number)
            elif reason:
                return reason
            else:
                time.sleep(_PAUSE_SECONDS)
        return ""
