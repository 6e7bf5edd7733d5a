"""Restart a controller from the journal of a process that ended.

Replaying the same events into the same state machine repeats all decisions, message for message. Peers report what they
have received when they reconnect, and the new process sends the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from atoll.controller.core import Controller
from atoll.controller_process.process_state import ProcessState, ShellDump, decode_shell, decode_snapshot
from atoll.controller_process.shell import ControllerShell
from atoll.errors import JournalError
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Recovered, recover
from atoll.journal.persisted_state import NAME, PersistedState, persisted_in

_log = logging.getLogger(__name__)


def load_snapshot(payload: bytes, path: str) -> tuple[Controller, ShellDump]:
    """Return the content of a snapshot in the directory `path`. Raises JournalError if it is unreadable."""
    try:
        return decode_snapshot(payload)
    except JournalError as error:
        raise type(error)(f"cannot read the snapshot in {path}: {error}") from None


class JournalRecovery:
    """The state that a journal's directory has of the previous controller, if this one continues from it.

    `directory` is that of the journal. `last_term` is the term of that controller, or 0. The next one is `term`, unless
    `raise_term` is called first.
    Raises JournalError if the journal is unreadable or, with `restarts`, empty.
    """

    def __init__(self, path: str, *, restarts: bool) -> None:
        self._began = time.monotonic()
        self.directory = JournalDirectory(path)
        self._found: Recovered | None = None
        self._persisted: PersistedState | None = None
        self.last_term = 0
        self._min_term = 0
        self._events = 0
        if restarts:
            try:
                self._found = recover(self.directory)
            except OSError as error:
                raise JournalError(f"the journal in {path} cannot be read: {error}") from None
            if self._found is None:
                raise JournalError(f"the journal in {path} contains no snapshot to restart from")
            self.last_term = self._found.term
            return
        persisted = persisted_in(self.directory.path)
        self.directory.clear()
        if persisted is not None:
            self._persisted, self.last_term = persisted

    @property
    def term(self) -> int:
        """The term that begins."""
        return max(self.last_term + 1, self._min_term)

    def raise_term(self, term: int) -> None:
        """Begin at least this term."""
        self._min_term = term

    def state(self, make: Callable[[], Controller]) -> ProcessState:
        """Return the state of the previous process after all its turns, or of a new controller, which `make` makes."""
        if self._found is None:
            dump = decode_shell(self._persisted.shell) if self._persisted is not None else None
            return ProcessState(make(), dump, self.term)
        state = ProcessState(*load_snapshot(self._found.payload, str(self.directory.path)), self._found.term)
        for turn in self._found.decoded_turns():
            state.replay(turn)
            self._events += len(turn)
        return state

    def begin(self, shell: ControllerShell) -> None:
        """Begin the shell of the state. It keeps the journal from now on."""
        found, term = self._found, self.term
        if found is None:
            shell.keep_journal(self.directory, term).begin()
            self._start(shell)
            return
        shell.keep_journal(self.directory, term, found.last_number + 1).open_segment(self._events)
        shell.resume(term)
        seconds = time.monotonic() - self._began
        _log.warning("the controller continues in term %d: replayed %d events in %.2f s", term, self._events, seconds)

    def _start(self, shell: ControllerShell) -> None:
        """Start the shell, with persisted sessions if there are any. Raises SettingsError if the islands do not fit."""
        if self._persisted is None:
            shell.start()
            return
        persisted = self.directory.path / NAME
        self._persisted.cluster.check(shell.controller.settings, str(persisted))
        shell.start(self._persisted.sessions, self._persisted.secrets)
        shell.flush_now()
        persisted.unlink(missing_ok=True)  # this cluster's journal contains them now
        controller = shell.controller
        restored, removed = self._persisted.cluster.parts(controller.sessions, controller.tenants.by_name)
        if str(restored):
            resume = "; `atoll resume SESSION` continues a session" if restored.sessions else ""
            _log.warning("restored %s of the previous cluster%s", restored, resume)
        if str(removed):
            _log.error("removed %s of the previous cluster: their tenants are not in this one", removed)
