"""A controller that goes on where another process has been killed: from what that one's journal has.

The state machine is the same, and so are the events: what was decided is decided again, message for message. What peers
have got of it they say when they come back, and the rest is sent to them.
"""

from __future__ import annotations

import logging
import time

from atoll.controller.core import Controller
from atoll.controller_process.shell import ControllerShell
from atoll.controller_process.shell_state import ShellState
from atoll.errors import JournalError
from atoll.journal.files import Directory
from atoll.journal.journal import Journal, Recovered, recover
from atoll.journal.persisted_state import NAME, PersistedState, persisted_in
from atoll.journal.snapshots import unpickled

_log = logging.getLogger(__name__)


class NoRecovery:
    """There is no journal: the controller begins, and nobody goes on after it."""

    term = 0
    controller: Controller | None = None
    state: ShellState | None = None

    def hand_over(self, shell: ControllerShell) -> None:
        """The shell, which was made of this state, begins."""
        shell.start()


NO_RECOVERY = NoRecovery()


class JournalRecovery(NoRecovery):
    """What a directory has of the controller before this one; nothing where it does not go on with anything.

    Raises JournalError where there is to be something, and none can be read.
    """

    def __init__(self, path: str, restarts: bool) -> None:
        self._began = time.monotonic()
        self._directory = Directory(path)
        self._found: Recovered | None = None
        self._persisted: PersistedState | None = None
        if not restarts:
            persisted = persisted_in(self._directory.path)
            if self._directory.snapshots():
                _log.warning("%s has the journal of a cluster that was killed, and is over: it is cleared", path)
            self._directory.clear()
            if persisted is not None:
                self._persisted, self.term = persisted
                self.state = unpickled(self._persisted.shell)
            return
        self._found = recover(self._directory)
        if self._found is None:
            raise JournalError(f"the journal in {path} has nothing to go on from")
        self.term = self._found.term
        try:
            self.controller, self.state = unpickled(self._found.payload)
        except Exception as error:
            raise JournalError(f"the snapshot in {path} cannot be read: {type(error).__name__}: {error}") from None

    def hand_over(self, shell: ControllerShell) -> None:
        """It begins, or goes on with all that came after the snapshot, and keeps the journal from now on."""
        found, term = self._found, self.term + 1
        if found is None:
            shell.journal = Journal(self._directory, term, 1, shell.snapshot)
            shell.journal.begin()
            self._start(shell)
            return
        events = 0
        for turn in found.decoded_turns():
            shell.replay(turn)
            events += len(turn)
        shell.journal = Journal(self._directory, term, found.last_number + 1, shell.snapshot)
        shell.journal.go_on(events)
        shell.resume(term)
        seconds = time.monotonic() - self._began
        _log.warning("the controller goes on, for the %d. time: %d events in %.2f s", self.term, events, seconds)

    def _start(self, shell: ControllerShell) -> None:
        """Start the shell, with persisted sessions if there are any. Raises SettingsError if the islands do not fit."""
        if self._persisted is None:
            shell.start()
            return
        persisted = self._directory.path / NAME
        self._persisted.cluster.check(shell.controller.settings, str(persisted))
        shell.start(self._persisted.sessions, self._persisted.secrets)
        shell.flush_now()
        persisted.unlink(missing_ok=True)  # this cluster's journal has them now
        _log.warning("%s may go on in this cluster", self._persisted.cluster)
