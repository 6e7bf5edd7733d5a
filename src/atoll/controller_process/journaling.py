"""A controller that goes on where another process has been killed: from what that one's journal has.

The state machine is the same, and so are the events: what was decided is decided again, message for message. What peers
have got of it they say when they come back, and the rest is sent to them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from atoll.controller.core import Controller
from atoll.errors import JournalError
from atoll.journal.files import Folder
from atoll.journal.journal import Journal
from atoll.journal.recovery import Recovered, recover
from atoll.journal.snapshots import unpickled
from atoll.protocol.events import Restarted

if TYPE_CHECKING:
    from atoll.controller_process.main import ControllerShell, ShellState

_log = logging.getLogger(__name__)


class Predecessor:
    """What a folder has of the controller before this one; nothing where the cluster starts.

    Raises JournalError where there is to be something, and none can be read.
    """

    def __init__(self, path: str, restarts: bool) -> None:
        self.folder = Folder(path)
        self.term = 0
        self.controller: Controller | None = None
        self.state: ShellState | None = None
        self._began = time.monotonic()
        self._found: Recovered | None = None
        if not restarts:
            if self.folder.snapshots():
                _log.warning("%s has the journal of a cluster that has ended: it is not gone on with", path)
            self.folder.clear()
            return
        self._found = found = recover(self.folder)
        if found is None:
            raise JournalError(f"the journal in {path} has nothing to go on from")
        self.controller, self.state = unpickled(found.payload)
        self.term = found.term

    def hand_over(self, shell: ControllerShell) -> None:
        """The shell, which was made of this state, goes on with all that came after it, and writes the journal."""
        found = self._found
        number = found.last_number + 1 if found is not None else 1
        journal = Journal(self.folder, self.term + 1, number, shell.snapshot)
        if found is None:
            shell.start()
            journal.begin()
            shell.journal = journal
            return
        events = 0
        for event in found.events():
            shell.replay(event)
            events += 1
        journal.go_on()
        shell.journal = journal
        shell.resume(Restarted(shell.now(), self.term + 1))
        seconds = time.monotonic() - self._began
        _log.warning(
            "this controller goes on as number %d: %d events of its journal in %.2f s", self.term + 1, events, seconds
        )
