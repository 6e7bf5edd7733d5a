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

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from atoll.cluster.locations import HostDevice
from atoll.controller.sessions.vaults import Vaults
from atoll.controller.sessions.version_reads import VersionReads
from atoll.controller.state import ClusterState
from atoll.named_arrays.named_arrays import Action, NamedArrays, Version
from atoll.named_arrays.written_versions import ANY_DEVICE, Position
from atoll.protocol.number_ranges import PUBLISHED_DEVICES
from atoll.state.tenants import Tenant

# Time between searches of a place that free nothing.
_SEARCH_SECONDS = 1.0
# Cost of the versions that one call examines, in the cost of an array that is examined (about 0.2 us).
_MOST_EXAMINED = 4096
_COST_OF_VERSION = 8
_COST_OF_FREEING = 16  # per array


class Place(NamedTuple):
    """The memory that launches wait for.

    Each priority has its own searches, since it examines other versions than the others do.

    Attributes:
      device: the device, or None for all devices.
      owner: the tenant whose quota lacks memory, or "".
      priority: that of the tenants whose launches wait.
    """

    device: HostDevice | None
    owner: str
    priority: int


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

    def free(self, tenant: Tenant, device: HostDevice, missing: int, is_last: bool) -> bool:
        """Free `missing` bytes of the device for a launch of the tenant that waits for them.

        Versions of lower priorities leave the device first, then those that were complete first. Versions of higher
        priorities stay.

        Args:
          tenant: the tenant that needs the memory.
          device: the device.
          missing: the number of bytes.
          is_last: whether the launch fails otherwise. The versions are then examined again, even within the time
            between searches.

        Returns:
          whether the bytes are free, or some versions have not been examined yet.
        """
        return self._free(tenant, None, device, missing, is_last)

    def free_quota(self, tenant: Tenant, device: HostDevice | None, missing: int, is_last: bool) -> bool:
        """Free `missing` bytes of a tenant's quota of memory on a device, or on all devices.

        The arguments and the result are those of `free`. Versions of other tenants stay.
        """
        return self._free(tenant, tenant, device, missing, is_last)

    def _free(
        self, tenant: Tenant, owner: Tenant | None, device: HostDevice | None, missing: int, is_last: bool
    ) -> bool:
        if missing <= 0 or self._search(tenant, owner, device, missing, is_last):
            return True
        return is_last and self._replace_unwritten(tenant, owner, device, missing)

    def _replace_unwritten(self, tenant: Tenant, owner: Tenant | None, device: HostDevice | None, missing: int) -> bool:
        """Free versions that newer ones have replaced, and that stay only until they are in files."""
        for version in self._names.awaited_on(self._number(device)):
            its = self._tenants.by_name[version.tenant]
            is_permitted = its.settings.priority <= tenant.settings.priority if owner is None else its is owner
            freed = self._vaults.freed(version, device) if is_permitted and not version.readers else 0
            if freed:
                missing -= freed
                self._perform(self._names.make_space(self._outbox.seconds, [version]))
                if missing <= 0:
                    break
        self._outbox.flush_frees()
        return missing <= 0

    def _number(self, device: HostDevice | None) -> int:
        return ANY_DEVICE if device is None else PUBLISHED_DEVICES.start + self._resources.topology.number_of(*device)

    def _search(
        self, tenant: Tenant, owner: Tenant | None, device: HostDevice | None, missing: int, is_last: bool
    ) -> bool:
        now, priority = self._outbox.seconds, tenant.settings.priority
        place = Place(device, "" if owner is None else owner.name, priority)
        last = self._last.get(place)
        began, after = now, None
        if last is not None:
            is_recent = now - last.seconds < _SEARCH_SECONDS and not last.has_freed
            is_repeated = now == last.seconds or (last.after is None and last.began != last.seconds)
            if is_recent and (is_repeated or not is_last):
                return last.after is not None
            if last.after is not None:
                began, after = last.began, last.after
        position, missing, has_freed = self._examine(owner, priority, device, missing, after)
        if has_freed:
            self._outbox.flush_frees()
        if missing <= 0:
            self._last.pop(place, None)
            return True
        self._last[place] = Search(began, now, position, has_freed)
        return position is not None

    def _examine(
        self, owner: Tenant | None, priority: int, device: HostDevice | None, missing: int, after: Position | None
    ) -> tuple[Position | None, int, bool]:
        """Free versions of the owner, or of all tenants, on the device, or on any device, from this position on.

        Return the last version that was examined, or None if all were, the bytes that are still missing, and whether
        some were freed.
        """
        written, number = self._names.index.written, self._number(device)
        owners = written.tenants(number) if owner is None else [owner.name]
        priorities = {each: self._tenants.by_name[each].settings.priority for each in owners}
        lower = [(each, its) for each, its in priorities.items() if its <= priority]
        most = _MOST_EXAMINED // _COST_OF_VERSION
        positions = list(islice(written.after(number, lower, after), most))
        has_freed, left = False, _MOST_EXAMINED
        for position in positions:
            version = self._names.find(position[2:])
            assert version is not None
            left -= _COST_OF_VERSION
            if not version.readers and not self._reads.are_waiting(version.key):
                left -= len(version.held)
                freed = self._vaults.freed(version, device)
                if freed:
                    left -= _COST_OF_FREEING * len(version.held)
                    missing, has_freed = missing - freed, True
                    self._store(version)
            if missing <= 0 or left <= 0:
                return position, missing, has_freed
        return (positions[-1] if len(positions) == most else None), missing, has_freed
