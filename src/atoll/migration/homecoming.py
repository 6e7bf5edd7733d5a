"""Arrays of a session that was put aside, as it is resumed: they come back to the places where it goes on."""

from __future__ import annotations

from atoll.errors import Code, Status, StatusError
from atoll.migration.asides import Asides
from atoll.migration.migration import Migration
from atoll.scheduling.asides import Aside


class Homecoming:
    """The `Mover` of a suspended session. What is aside is kept until all of it has come back."""

    def __init__(self, asides: Asides) -> None:
        self._asides = asides
        self._kept: dict[int, Aside] = {}
        self._left: set[int] = set()
        self._losses: dict[int, int] = {}
        self._failure: Status | None = None

    def begin(self, migration: Migration) -> None:
        session = migration.session
        self._losses = dict(self._asides.losses)
        for handle, entry in session.directory.entries.items():
            if entry.aside is not None and entry.error is None:
                self._kept[handle] = entry.aside
        self._left = set(self._kept)
        places = {**session.devices.locations, **migration.changes}
        self._asides.bring_back(session, tuple(self._kept), self._came, places, keeps=True)

    def _came(self, handle: int, status: Status) -> None:
        self._left.discard(handle)
        if not status.ok:
            self._failure = self._failure or status

    def are_there(self, migration: Migration) -> bool:
        if self._failure is not None:
            raise StatusError(Code(self._failure.code), self._failure.message)
        return not self._left and not migration.session.in_flight

    def leave(self, migration: Migration) -> None:
        """Nothing is at the old places."""

    def arrive(self, migration: Migration) -> None:
        for aside in self._kept.values():
            self._asides.drop(migration.session, aside)
        entries = migration.session.directory.entries.values()
        migration.session.has_asides = any(entry.aside is not None for entry in entries)

    def give_up(self, migration: Migration, status: Status) -> None:
        self._asides.take_back(migration.session, self._kept, self._losses, status)
