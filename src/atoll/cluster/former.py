"""The cluster that has left suspended sessions, as far as the next one must be like it."""

from __future__ import annotations

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import IslandShape
from atoll.errors import SettingsError


class FormerCluster(msgspec.Struct, frozen=True):
    """Its islands, and the numbers of the sessions that it has left."""

    shapes: tuple[IslandShape, ...]
    sessions: tuple[int, ...]

    def check(self, settings: ClusterSettings, where: str) -> None:
        """Raises SettingsError for a cluster in which the sessions, which are kept in `where`, have no place."""
        shapes = settings.topology.shapes
        for island, shape in enumerate(self.shapes):
            has = shapes[island] if island < len(shapes) else None
            if has != shape:
                raise SettingsError(
                    f"{self} {'are' if len(self.sessions) > 1 else 'is'} kept in {where}, of a cluster whose island "
                    f"{island} has {shape}: in this one it would {f'have {has}' if has else 'not exist'}. Start the "
                    f"same islands to go on, or remove {where} to do without"
                )

    def __str__(self) -> str:
        """Such as "the suspended sessions 3, 7"."""
        many = "s" if len(self.sessions) > 1 else ""
        return f"the suspended session{many} {', '.join(map(str, self.sessions))}"
