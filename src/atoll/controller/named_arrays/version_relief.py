"""Memory of published arrays for launches that wait for it: versions that are also in files leave their devices.

Launches that wait for memory of a device get that of versions of all tenants. Launches that wait for a quota of memory
get that of their own tenant's versions.

A search examines the versions that nobody reads, until enough memory is free. It examines some versions in one flush,
and continues in a later one. Versions that cannot leave, for example because the arrays of a script share their memory,
are examined at most once per `_SEARCH_SECONDS` for all launches of the same priority. So launches that wait cost the
controller little, regardless of the number of versions.

If that is not enough, versions end that newer ones have replaced, and that stay only until they are in files: after
`UNWRITTEN_SECONDS`, or before the launch fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.controller.named_arrays.vaults import Vaults
from atoll.controller.named_arrays.version_reads import VersionReads
from atoll.controller.state import ClusterState
from atoll.named_arrays.named_arrays import Action, NamedArrays
from atoll.named_arrays.version_records import Version
from atoll.named_arrays.written_versions import ANY_DEVICE, Position
from atoll.protocol.number_ranges import PUBLISHED_DEVICES
from atoll.state.tenants import Tenant

# Time between searches of a place that free nothing.
_SEARCH_SECONDS = 1.0
# Time for versions to get into files, before those that newer ones have replaced end without.
UNWRITTEN_SECONDS = 2.0
# Cost of the versions that one call examines, in the cost of an array that is examined (about 0.2 us).
_MAX_EXAMINED = 4096
_COST_OF_VERSION = 8
_COST_OF_FREEING = 16  # per array


class Place(NamedTuple):
    """The memory that launches wait for.

    Each priority has its own searches, since it examines other versions than the others do.

    Attributes:
      device: the device, or None for all devices.
      owner: the tenant whose quota lacks memory, or "".
      priority: that of the tenants whose launches wait.
      is_unwritten: whether replaced versions that are being written are searched, instead of those in files.
    """

    device: HostDevice | None
    owner: str
    priority: int
    is_unwritten: bool = False


class Search(msgspec.Struct, frozen=True):
    """A search for the memory of a place.

    Attributes:
      began: time of the first call.
      seconds: time of the last call.
      after: the last version that was examined, or None if all were examined.
      has_freed: whether the last call freed memory.
    """

    began: float
    seconds: float
    after: Position | None
    has_freed: bool


class VersionRelief:
    """Frees memory of versions that are in files.

    `store` frees the arrays of one. `perform` performs the actions of `names`.
    """

    def __init__(
        self,
        state: ClusterState,
        names: NamedArrays,
        vaults: Vaults,
        reads: VersionReads,
        store: Callable[[Version], None],
        perform: Callable[[Sequence[Action]], None],
    ) -> None:
        self._last: dict[Place, Search] = {}  # in each place
        self._outbox = state.outbox
        self._tenants = state.tenants
        self._resources = state.resources
        self._names = names
        self._vaults = vaults
        self._reads = reads
        self._store = store
        self._perform = perform

    def tick(self, now: float) -> None:
        for place in [each for each, last in self._last.items() if now - last.seconds > 10 * _SEARCH_SECONDS]:
            del self._last[place]

    def free(self, tenant: Tenant, device: HostDevice, missing: int, waited: float, is_last: bool) -> bool:
        """Free `missing` bytes of the device for a launch of the tenant that waits for them.

        Versions of lower priorities leave the device first, then those that were complete first. Versions of higher
        priorities stay.

        Args:
          tenant: the tenant that needs the memory.
          device: the device.
          missing: the number of bytes.
          waited: the seconds for which the launch has waited.
          is_last: whether the launch fails otherwise. The versions are then examined again, even within the time
            between searches.

        Returns:
          whether the bytes are free, or some versions have not been examined or freed yet.
        """
        return self._free(Place(device, "", tenant.settings.priority), missing, waited, is_last)

    def free_quota(self, tenant: Tenant, device: HostDevice | None, missing: int, waited: float, is_last: bool) -> bool:
        """Free `missing` bytes of a tenant's quota of memory on a device, or on all devices.

        The arguments and the result are those of `free`. Versions of other tenants stay.
        """
        return self._free(Place(device, tenant.name, tenant.settings.priority), missing, waited, is_last)

    def _free(self, place: Place, missing: int, waited: float, is_last: bool) -> bool:
        if missing <= 0 or self._vaults.is_freeing:
            return True
        missing, is_possible = self._search(place, missing, is_last)
        if not is_possible and (is_last or waited >= UNWRITTEN_SECONDS):
            unwritten = Place(place.device, place.owner, place.priority, is_unwritten=True)
            _, is_possible = self._search(unwritten, missing, is_last)
        return is_possible

    def _search(self, place: Place, missing: int, is_last: bool) -> tuple[int, bool]:
        """Search some versions, unless that was done just now.

        Return the bytes that are still missing, and whether they are free or some versions have not been examined yet.
        """
        now, last = self._outbox.seconds, self._last.get(place)
        began, after = now, None
        if last is not None:
            is_recent = now - last.seconds < _SEARCH_SECONDS and not last.has_freed
            is_repeated = now == last.seconds or (last.after is None and last.began != last.seconds)
            if is_recent and (is_repeated or not is_last):
                return missing, last.after is not None
            if last.after is not None:
                began, after = last.began, last.after
        position, missing, has_freed = self._examine(place, missing, after)
        if has_freed:
            self._outbox.flush_frees()
        if missing <= 0:
            self._last.pop(place, None)
            return missing, True
        self._last[place] = Search(began, now, position, has_freed)
        return missing, position is not None

    def _examine(self, place: Place, missing: int, after: Position | None) -> tuple[Position | None, int, bool]:
        """Free versions from this position on.

        Return the last version that was examined, or None if all were, the bytes that are still missing, and whether
        some were freed.
        """
        most = _MAX_EXAMINED // _COST_OF_VERSION
        positions = list(islice((self._unwritten if place.is_unwritten else self._written)(place, after), most))
        has_freed, left = False, _MAX_EXAMINED
        for position in positions:
            version = self._names.find(position[2:])
            assert version is not None
            left -= _COST_OF_VERSION
            if not version.readers and not self._reads.are_waiting(version.key):
                left -= len(version.held)
                freed = self._vaults.freed(version, place.device)
                if freed:
                    left -= _COST_OF_FREEING * len(version.held)
                    missing, has_freed = missing - freed, True
                    if place.is_unwritten:
                        self._perform(self._names.make_space(self._outbox.seconds, [version]))
                    else:
                        self._store(version)
            if missing <= 0 or left <= 0:
                return position, missing, has_freed
        return (positions[-1] if len(positions) == most else None), missing, has_freed

    def _written(self, place: Place, after: Position | None) -> Iterator[Position]:
        """Yield the versions that are in files and may leave the place, from this position on."""
        written, number = self._names.index.written, self._number(place.device)
        owners = [place.owner] if place.owner else written.tenants(number)
        priorities = ((each, self._priority(each)) for each in owners)
        return written.after(number, [each for each in priorities if each[1] <= place.priority], after)

    def _unwritten(self, place: Place, after: Position | None) -> Iterator[Position]:
        """Yield the replaced versions that are being written and may leave the place, from this position on."""
        versions = self._names.awaited_on(self._number(place.device))
        found = [(self._priority(each.tenant), each.seconds, *each.key) for each in versions]
        for position in sorted(found):
            is_permitted = place.owner in ("", position[2]) and position[0] <= place.priority
            if is_permitted and (after is None or position > after):
                yield position

    def _priority(self, tenant: str) -> int:
        return self._tenants.by_name[tenant].settings.priority

    def _number(self, device: HostDevice | None) -> int:
        return ANY_DEVICE if device is None else PUBLISHED_DEVICES.start + self._resources.topology.number_of(*device)
