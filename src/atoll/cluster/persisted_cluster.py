"""Describe a cluster that has persisted suspended sessions, as far as the next one must be like it."""

from __future__ import annotations

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import IslandShape
from atoll.errors import SettingsError


class PersistedCluster(msgspec.Struct, frozen=True):
    """The islands of an ended cluster, and the numbers of the sessions that it has persisted."""

    shapes: tuple[IslandShape, ...]
    sessions: tuple[int, ...]

    def check(self, settings: ClusterSettings, where: str) -> None:
        """Raises SettingsError for a cluster that lacks islands of the sessions, which are persisted in `where`."""
        shapes = settings.topology.shapes
        for island, shape in enumerate(self.shapes):
            has = shapes[island] if island < len(shapes) else None
            if has != shape:
                verb = "are" if len(self.sessions) > 1 else "is"
                raise SettingsError(
                    f"{self} {verb} persisted in {where}, of a cluster whose island {island} has {shape}: in this one "
                    f"it would {f'have {has}' if has else 'not exist'}. Start the same islands to restore "
                    f"{'them' if len(self.sessions) > 1 else 'it'}, or remove {where} to continue without"
                )

    def __str__(self) -> str:
        """Such as "the suspended sessions 3, 7"."""
        many = "s" if len(self.sessions) > 1 else ""
        return f"the suspended session{many} {', '.join(map(str, self.sessions))}"
