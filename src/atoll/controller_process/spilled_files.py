"""The files of spilled arrays of a cluster whose hosts have ended before they could remove them."""

from __future__ import annotations

from atoll.controller.core import Controller
from atoll.journal.persisted_state import decode_persisted
from atoll.protocol import messages as m
from atoll.state.session import Session


class SpilledFiles:
    """The files of the sessions of `controller`, as they are before its cluster ends."""

    def __init__(self, controller: Controller) -> None:
        self._pieces = {session.number: _pieces_of(session) for session in controller.sessions.values()}

    def remove_except(self, persisted: bytes) -> int:
        """Remove the files of sessions that are not in the state that the cluster persists. Return their number."""
        kept = decode_persisted(persisted).cluster.sessions if persisted else ()
        lost = [piece for session, pieces in self._pieces.items() if session not in kept for piece in pieces]
        if lost:
            from atoll.worker.spill_files import remove  # imports NumPy, which controllers do not need otherwise

            remove(lost)
        return len(lost)


def _pieces_of(session: Session) -> list[m.SpilledPiece]:
    """Return the pieces of the session's arrays that are in files."""
    spilled = (entry.spilled for entry in session.directory.entries.values())
    return [part.piece for each in spilled if each is not None for part in each.parts if part.piece.path]
