"""The files of spilled arrays of a cluster whose hosts have ended before they could remove them."""

from __future__ import annotations

from collections.abc import Hashable

from atoll.controller.core import Controller
from atoll.journal.persisted_state import decode_persisted
from atoll.protocol import messages as m
from atoll.state.session import Session


class SpilledFiles:
    """The files of sessions and of published arrays of `controller`, as they are before its cluster ends."""

    def __init__(self, controller: Controller) -> None:
        self._pieces: dict[Hashable, list[m.SpilledPiece]] = {  # by number of a session, or by key of a version
            session.number: _pieces_of(session) for session in controller.sessions.values()
        }
        for key, piece in controller.published.files.pieces():
            self._pieces.setdefault(key, []).append(piece)

    def remove_except(self, persisted: bytes) -> int:
        """Remove the files of what is not in the state that the cluster persists. Return their number."""
        cluster = decode_persisted(persisted).cluster if persisted else None
        kept: set[Hashable] = set() if cluster is None else {*cluster.sessions, *cluster.versions}
        lost = [piece for owner, pieces in self._pieces.items() if owner not in kept for piece in pieces]
        if lost:
            from atoll.worker.spill_files import remove  # imports NumPy, which controllers do not need otherwise

            remove(lost)
        return len(lost)


def _pieces_of(session: Session) -> list[m.SpilledPiece]:
    """Return the pieces of the session's arrays that are in files."""
    spilled = (entry.spilled for entry in session.directory.entries.values())
    return [part.piece for each in spilled if each is not None for part in each.parts if part.piece.path]
