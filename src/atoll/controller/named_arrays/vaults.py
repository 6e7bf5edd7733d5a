"""Vaults: sessions without a client that own the published arrays of a tenant.

A vault has one number for each physical device, `PUBLISHED_DEVICES` and the number of the device in the cluster. It
never changes, so the type of an array in a vault says where the array is, and moving an array changes its type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.ir.types import ArraySpec
from atoll.launch.launches import Launches
from atoll.named_arrays.copy_rules import Islands
from atoll.named_arrays.version_records import PublishedArray, Version
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import PUBLISHED_DEVICES, SHARED_HANDLES
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from atoll.state.stepped_work import Turns
from atoll.state.tenants import Tenant

# Arrays that launches of other tenants read from a version, until those that have ended are forgotten.
_MANY_LENT = 1024
# Arrays that one flush frees. The controller needs about a millisecond for them.
_MAX_FREED = 256


class Vaults:
    """The vaults of all tenants, and what enters and leaves them. Arrays are freed in steps, some in each flush."""

    def __init__(self, state: ClusterState, sessions: Sessions, launches: Launches) -> None:
        # Arrays to free, by session: vaults, and sessions whose versions have failed. With them, what is lent of these
        # arrays. Sessions take turns.
        self.leaving: Turns[tuple[list[int], list[tuple[int, int]]]] = Turns()
        self._freed = 0  # arrays since the last flush
        self.by_tenant: dict[str, int] = {}  # sessions, by the name of their tenant
        self._next_handle = 1  # in vaults
        self._next_shared = SHARED_HANDLES.start
        self._open = state.sessions
        self._outbox = state.outbox
        self._resources = state.resources
        self._sessions = sessions
        self._reservations, self._buffers = launches.reservations, launches.buffers

    # ---- vaults

    def find(self, tenant: str) -> Session | None:
        """Return the vault of a tenant, or None if it has none, or none any more."""
        number = self.by_tenant.get(tenant)
        return None if number is None else self._open.get(number)

    def of(self, version: Version) -> Session:
        """Return the vault with the arrays of a version."""
        return self._open[self.by_tenant[version.tenant]]

    def get(self, tenant: Tenant) -> Session:
        """Return the vault of a tenant, which is opened if necessary."""
        vault = self.find(tenant.name)
        if vault is None:
            vault = self._sessions.open_vault(tenant)
            self.by_tenant[tenant.name] = vault.number
        return vault

    def session_closed(self, session: Session) -> None:
        self.leaving.remove(session.number)
        if session.is_vault:
            del self.by_tenant[session.tenant.name]

    def number(self, vault: Session, location: DeviceLocation) -> int:
        """Return the number of a physical device in the vault."""
        number = self.number_of(location)
        vault.devices.locations[number] = location
        return number

    def number_of(self, location: DeviceLocation) -> int:
        """Return the number that a physical device has in all vaults."""
        return PUBLISHED_DEVICES.start + self._resources.number_of(location)

    def new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1

    def new_shared_handle(self) -> int:
        """Return a new handle in a session that reads a version."""
        self._next_shared += 1
        return self._next_shared - 1

    def islands(self, vault: Session, spec: ArraySpec) -> Islands:
        """Return the islands with shards of an array in the vault."""
        locations = vault.devices.locations
        return frozenset([locations[device].island for device in spec.sharding.devices])

    def platform(self, vault: Session, spec: ArraySpec) -> str:
        """Return the platform of the devices of an array in the vault."""
        location = vault.devices.locations[spec.sharding.devices[0]]
        return self._resources.topology.shapes[location.island].platform

    def numbers_on(self, island: int) -> frozenset[int]:
        """Return the numbers in vaults of the devices of an island."""
        topology = self._resources.topology
        shape, first = (
            topology.shapes[island],
            PUBLISHED_DEVICES.start + topology.number_of(topology.first_host(island), 0),
        )
        return frozenset(range(first, first + shape.hosts * shape.devices))

    # ---- arrays come

    def take(self, session: Session, version: Version, handles: Sequence[int]) -> None:
        """Take arrays of the session over, for the version. Hosts share their memory with the vault."""
        vault = self.get(session.tenant)
        shares: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for handle in handles:
            entry = session.directory.take(handle)
            held = self.new_handle()
            spec = entry.spec = self._renumbered(session, vault, entry)
            version.held.append(held)
            version.arrays.append(PublishedArray(spec, entry.nbytes))
            version.count(spec, 1)
            entry.producer, entry.traceback_id, entry.dependency, entry.readers = version.title, 0, None, None
            vault.directory.add(held, entry)
            shares[entry.hosts].append((handle, held))
        self._share(session.number, vault.number, shares)
        for hosts, pairs in shares.items():
            self._outbox.free(hosts, session.number, [handle for handle, _ in pairs])

    def _renumbered(self, session: Session, vault: Session, entry: Entry) -> ArraySpec:
        spec, locations = entry.spec, session.devices.locations
        assert spec is not None
        devices = tuple([self.number(vault, locations[device]) for device in spec.sharding.devices])
        return replace(spec, sharding=replace(spec.sharding, devices=devices))

    def _share(self, source: int, target: int, shares: dict[tuple[int, ...], list[tuple[int, int]]]) -> None:
        for hosts, pairs in shares.items():
            self._outbox.to_hosts(hosts, m.ShareBuffers(source, target, tuple(pairs)))

    # ---- arrays are read

    def originals(self, version: Version, positions: range) -> list[Islands]:
        """Return the islands of the first, second, ... copies of these arrays. All of them have so many copies."""
        vault = self.of(version)
        entries, found = vault.directory.entries, list[Islands]()
        for count in range(1 + min([len(version.copies.get(each, ())) for each in positions])):
            handles = [version.copies[each][count - 1] if count else version.held[each] for each in positions]
            found.append(frozenset().union(*(self.islands(vault, spec_of(entries[handle])) for handle in handles)))
        return found

    def copies_of(
        self, version: Version, positions: range, number: int, islands: Islands
    ) -> list[tuple[int, ArraySpec]]:
        """Return a copy of each of these arrays, as its handle and its type.

        That is a copy on these `islands` if there is one, and otherwise the one with this number.
        """
        vault = self.of(version)
        entries, found = vault.directory.entries, []
        for position in positions:
            copies = (version.held[position], *version.copies.get(position, ()))
            specs = [spec_of(entries[handle]) for handle in copies]
            near = (each for each, spec in enumerate(specs) if self.islands(vault, spec) <= islands)
            chosen = next(near, number) if len(copies) > 1 else 0
            found.append((copies[chosen], specs[chosen]))
        return found

    def lend(
        self, session: Session, owner: Session, arrays: Sequence[tuple[int, ArraySpec]], version: Version
    ) -> tuple[int, ...]:
        """Share arrays of `owner` with the session: of the vault, or a copy that another session has received.

        The types name the devices by their numbers in vaults. Return the handles of the arrays in the session.
        """
        shares: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        lent = []
        for each, spec in arrays:
            entry = owner.directory.entries[each]
            handle = self.new_shared_handle()
            shared = Entry(entry.hosts, entry.nbytes, BufferState.READY, producer=version.title, spec=spec)
            self._reservations.lend(entry, shared)
            session.directory.add(handle, shared)
            shares[entry.hosts].append((each, handle))
            lent.append(handle)
        self._share(owner.number, session.number, shares)
        if session.tenant is not owner.tenant:
            if len(version.lent) >= _MANY_LENT:
                version.lent = [each for each in version.lent if self._lent(each) is not None]
            version.lent += [(session.number, handle) for handle in lent]
        return tuple(lent)

    def _lent(self, lent: tuple[int, int]) -> Entry | None:
        """Return an array that shares the memory of a version until a launch has read it, or None if that has ended."""
        session = self._open.get(lent[0])
        return None if session is None else session.directory.entries.get(lent[1])

    # ---- copies

    def add_copy(self, version: Version, position: int, handle: int) -> None:
        """Record that a copy of an array is complete."""
        entry = self.of(version).directory.entries[handle]
        entry.producer = version.title
        self._reservations.publish(entry)
        version.copies[position] = (*version.copies.get(position, ()), handle)
        version.count(spec_of(entry), 1)

    def keep_copies(self, version: Version, chosen: Mapping[int, Sequence[int]]) -> None:
        """Free the copies of arrays except the `chosen` ones, by the positions of the arrays.

        The first chosen one is in the place of the published array. Memory that other tenants still read is theirs.
        """
        vault = self.of(version)
        freed = []
        for position, kept in chosen.items():
            for handle in (version.held[position], *version.copies.get(position, ())):
                entry = vault.directory.entries.get(handle)
                if handle not in kept and entry is not None:
                    version.count(spec_of(entry), -1)
                    freed.append(handle)
            version.held[position] = kept[0]
            version.copies.pop(position, None)
            if len(kept) > 1:
                version.copies[position] = tuple(kept[1:])
        if chosen:
            self.release(vault, freed, version.lent)

    # ---- files

    def put_back(self, version: Version, held: Sequence[int]) -> None:
        """Record that the arrays of a version that were in files only have these handles now."""
        entries = self.of(version).directory.entries
        version.held[:] = held
        for handle in held:
            self._reservations.publish(entries[handle])
            version.count(spec_of(entries[handle]), 1)

    def freed(self, version: Version, device: HostDevice | None) -> int:
        """Return the bytes of a device, or of all devices, that become free if the version's arrays are freed.

        Return 0 if a launch is still to read one of them.
        """
        entries = self.of(version).directory.entries
        copies = (handle for some in version.copies.values() for handle in some)
        own = [entries[handle] for handle in (*version.held, *copies)]
        if not all(entry.is_idle for entry in own) or any(self._lent(each) is not None for each in version.lent):
            return 0
        blocks = [block for entry in own for block in entry.blocks if block.users == 1]
        return sum(size for block in blocks for where, size in block.requirement if device in (None, where))

    def store(self, version: Version) -> None:
        """Free the arrays of a version that is in files."""
        self.free(version)
        version.held.clear()

    # ---- arrays go

    def free(self, version: Version) -> None:
        """Free the arrays of the version and their copies, unless its vault was closed.

        Tenants whose launches still read them are charged for them from now on, unless other arrays of the version's
        tenant share their memory.
        """
        vault = self.find(version.tenant)
        if vault is None:
            return
        copies = [handle for some in version.copies.values() for handle in some]
        handles = [*version.held, *copies]
        version.copies.clear()
        version.leave_devices()
        lent, version.lent = version.lent, []
        self.release(vault, handles, lent)

    def release(self, session: Session, handles: Sequence[int], lent: Sequence[tuple[int, int]] = ()) -> None:
        """Free arrays of the session, and then charge the tenants that still read what is `lent` of them.

        Flushes free the rest if `_MAX_FREED` arrays have been freed since the last one.
        """
        self._freed += len(handles)
        if self._freed > _MAX_FREED:
            self.leaving.add(session.number, session.tenant.name, (list(handles), list(lent)))
            return
        self._buffers.release(session, tuple(handles), delete=False)
        self._hand_over(session, lent)

    @property
    def is_freeing(self) -> bool:
        """Return whether memory of versions will be free soon."""
        return any(number in self.leaving.waiting for number in self.by_tenant.values())

    def proceed(self) -> None:
        """Free more of the arrays that were released."""
        self._freed, left = 0, _MAX_FREED
        if not self.leaving.waiting:
            return
        while left > 0 and (number := self.leaving.next()) is not None:
            session, (handles, lent) = self._open[number], self.leaving.waiting[number][0]
            some = tuple(handles[:left])
            del handles[:left]
            left -= max(1, len(some))
            self._buffers.release(session, some, delete=False)
            if not handles:
                self.leaving.take(number)
                self._hand_over(session, lent)

    def _hand_over(self, vault: Session, lent: Iterable[tuple[int, int]]) -> None:
        """Charge the tenants that still read these arrays for memory that the tenant of the vault has released."""
        guests = [(entry, self._open[each[0]].tenant) for each in lent if (entry := self._lent(each)) is not None]
        if guests:
            self._reservations.hand_over(guests, vault.tenant)


def spec_of(entry: Entry) -> ArraySpec:
    """Return the type of an array in a vault."""
    assert entry.spec is not None
    return entry.spec
