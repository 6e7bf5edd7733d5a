"""The versions that are on devices and also in files, in the order in which they are to leave each device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import merge

# In place of the number of a device: any device.
ANY_DEVICE = -1

# A version of a tenant: the time of its completion, its name and its number.
Rank = tuple[float, str, int]
# A version of all tenants: the priority of its tenant, the time of its completion, its tenant, its name and its number.
Position = tuple[int, float, str, str, int]


class WrittenVersions:
    """The versions on each device that are also in files, by tenant, the first complete one first.

    All of them are also on `ANY_DEVICE`.

    All operations find a version in logarithmic time, so that a search of some versions costs nothing for the others.
    """

    def __init__(self) -> None:
        self._on: dict[int, dict[str, list[Rank]]] = {}

    def add(self, device: int, tenant: str, rank: Rank) -> None:
        """Add a version on a device. It may be there already."""
        ranks = self._on.setdefault(device, {}).setdefault(tenant, [])
        if _place(ranks, rank) is None:
            insort(ranks, rank)

    def remove(self, device: int, tenant: str, rank: Rank) -> None:
        """Remove a version from a device. It may not be there."""
        tenants = self._on.get(device, {})
        ranks = tenants.get(tenant, [])
        place = _place(ranks, rank)
        if place is None:
            return
        del ranks[place]
        if not ranks:
            del tenants[tenant]
        if not tenants:
            del self._on[device]

    def tenants(self, device: int) -> list[str]:
        """Return the tenants with versions on the device."""
        return list(self._on.get(device, {}))

    def after(
        self, device: int, priorities: Iterable[tuple[str, int]], position: Position | None
    ) -> Iterator[Position]:
        """Yield the versions of these tenants on the device, lower priorities first, then those complete first.

        Args:
          device: the number of the device in vaults, or `ANY_DEVICE`.
          priorities: the tenants with their priorities.
          position: the version after which to begin, or None to begin with the first one.
        """
        return merge(*(self._of(device, tenant, priority, position) for tenant, priority in priorities))

    def _of(self, device: int, tenant: str, priority: int, position: Position | None) -> Iterator[Position]:
        ranks = self._on.get(device, {}).get(tenant, [])
        key = partial(_position, priority, tenant)
        first = 0 if position is None else bisect_right(ranks, position, key=key)
        for number in range(first, len(ranks)):
            yield _position(priority, tenant, ranks[number])

    @property
    def content(self) -> set[tuple[int, str, Rank]]:
        """All devices with the versions on them."""
        return {
            (device, tenant, rank)
            for device, tenants in self._on.items()
            for tenant, ranks in tenants.items()
            for rank in ranks
        }


def _place(ranks: list[Rank], rank: Rank) -> int | None:
    """Return where a version is among others, or None."""
    place = bisect_left(ranks, rank)
    return place if place < len(ranks) and ranks[place] == rank else None


def _position(priority: int, tenant: str, rank: Rank) -> Position:
    seconds, name, number = rank
    return priority, seconds, tenant, name, number
