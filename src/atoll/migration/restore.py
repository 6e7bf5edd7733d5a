"""Restore the arrays of a suspended session that is resumed, on the devices where it continues."""

from __future__ import annotations

from atoll.errors import Code, Status, StatusError
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.migration import Migration
from atoll.scheduling.spilled_arrays import SpilledArray


class Restore:
    """The `Mover` of a suspended session. Spilled pieces stay until all arrays are restored."""

    def __init__(self, spiller: ArraySpiller) -> None:
        self._spiller = spiller
        self._kept: dict[int, SpilledArray] = {}
        self._left: set[int] = set()
        self._losses: dict[int, int] = {}
        self._failure: Status | None = None

    def begin(self, migration: Migration) -> None:
        session = migration.session
        self._losses = dict(self._spiller.losses)
        for handle, entry in session.directory.entries.items():
            if entry.spilled is not None and entry.error is None:
                self._kept[handle] = entry.spilled
        self._left = set(self._kept)
        places = {**session.devices.locations, **migration.changes}
        self._spiller.restore(session, tuple(self._kept), self._came, places, keeps=True)

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
        for spilled in self._kept.values():
            self._spiller.drop(migration.session, spilled)
        entries = migration.session.directory.entries.values()
        migration.session.has_spilled = any(entry.spilled is not None for entry in entries)

    def give_up(self, migration: Migration, status: Status) -> None:
        self._spiller.restore_failed(migration.session, self._kept, self._losses, status)
