"""Files of published arrays: versions that outlive the islands that have them, and their cluster.

After a version with `spill="disk"` is complete, the hosts write its arrays to files, at most `MAX_READ` arrays at a
time. A file counts from the moment in which the controller knows its size and checksum, so a host that is killed while
it writes leaves nothing that is read.

If the arrays are lost with an island, or leave their devices for lack of memory, the version stays, and a request for
it makes Atoll restore the arrays: at their places, or on another island with enough devices. The request is answered
when all arrays are on devices again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.cluster.lifecycle import IslandDrained, IslandFailed, IslandReady, IslandRestarted
from atoll.controller.named_arrays.array_copies import ArrayCopies
from atoll.controller.named_arrays.vaults import Vaults, spec_of
from atoll.controller.state import ClusterState
from atoll.errors import Code, Kind, Status, StatusError
from atoll.ir.types import DTYPE_BITS, ArraySpec, Even, Uneven, shard_shape
from atoll.launch.launches import Launches
from atoll.migration.array_spiller import MAX_TOGETHER, ArraySpiller
from atoll.migration.persisted_arrays import PersistedArrays, PersistedVersion, StoredArray
from atoll.named_arrays.named_arrays import RETRY_SECONDS, Action, NamedArrays
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_records import Version, VersionKey
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import PUBLISHED_DEVICES
from atoll.quantities import counted, human_bytes
from atoll.state.buffer_directory import Entry, SpilledArray
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from atoll.state.tenants import Tenant

# Versions whose arrays are written at the same time, one per tenant.
_MAX_WRITTEN = 4
# Versions of a tenant that could not be written and are put in line again in one tick.
_MAX_RETRIED = 64
# Size of an empty string in a file.
_MIN_STRING_BYTES = 2


class ArrayWrite(msgspec.Struct, eq=False):
    """Arrays of a version that hosts are writing to a directory with this number: their handles and types, in order."""

    key: VersionKey
    number: int
    handles: tuple[int, ...]
    stored: tuple[tuple[ArraySpec, str], ...]  # type and platform


class Restoration(msgspec.Struct, eq=False):
    """A version whose arrays are being restored.

    Attributes:
      places: the new number of each device.
      islands: those that must not fail meanwhile.
      order: the positions of the arrays in the version, in the order in which they are restored: arrays of one type
        follow each other, so that they share a program.
      held: handles of the arrays that have been launched, in this order.
      left: those of `held` that are not there yet.
    """

    key: VersionKey
    vault: int
    places: dict[int, int]
    islands: set[int]
    order: list[int]
    held: list[int] = msgspec.field(default_factory=list)
    left: set[int] = msgspec.field(default_factory=set)


class ArrayFiles:
    """Writes published arrays to files, and restores them.

    `perform` performs the actions of `names`. `after` is called when the restoration of a version has ended.
    """

    def __init__(
        self,
        state: ClusterState,
        names: NamedArrays,
        copies: ArrayCopies,
        vaults: Vaults,
        launches: Launches,
        spiller: ArraySpiller,
        perform: Callable[[Sequence[Action]], None],
        after: Callable[[Version], None],
    ) -> None:
        self.due: dict[VersionKey, None] = {}  # versions with arrays to write or to restore now
        self.lineage = ""  # of the directories of this cluster, which no other has
        self._stored: dict[VersionKey, list[StoredArray]] = {}
        self._directories: dict[VersionKey, list[int]] = {}  # numbers of those with files of a version
        self._bytes: dict[str, int] = {}  # of the files of each tenant
        self._queues: dict[str, dict[VersionKey, None]] = {}  # versions to write after others, by tenant
        self._writing: dict[str, VersionKey] = {}  # the version of each tenant that is being written now
        self._writes: dict[VersionKey, ArrayWrite] = {}
        # Versions of each tenant that could not be written, with the time to try again, in this order.
        self._lacking: dict[str, dict[VersionKey, float]] = {}
        self._relieved: set[str] = set()  # tenants of these whose files were removed since the last tick
        self._waiting: dict[VersionKey, None] = {}  # versions to restore that wait for an island
        self._restorations: dict[VersionKey, Restoration] = {}
        self._open = state.sessions
        self._tenants = state.tenants
        self._outbox = state.outbox
        self._resources = state.resources
        self._history = state.history
        self._directory = state.settings.suspend_directory
        self._names = names
        self._copies = copies
        self._vaults = vaults
        self._buffers = launches.buffers
        self._spiller = spiller
        self._perform = perform
        self._after = after

    # ---- events

    def published(self, session: Session) -> None:
        """Note that a session publishes a version that will be written to files."""
        self.lineage = self.lineage or hashlib.sha256(session.secret.encode()).hexdigest()[:12]

    def check_quota(self, tenant: Tenant, nbytes: int) -> None:
        """Raise RESOURCE_EXHAUSTED if the tenant's quota `disk` can never hold a version of this size."""
        exceeded = tenant.exceeded("disk", nbytes, 0, "this version is larger")
        if exceeded is not None:
            exceeded.raise_if_error()

    def write(self, version: Version) -> None:
        """Write a version that is complete to files."""
        self._enqueue(version.key)
        self._admit()

    def restore(self, version: Version) -> None:
        """Restore a version whose arrays are in files only."""
        self.due[version.key] = None

    def forget(self, version: Version) -> None:
        """Remove the files of a version that was freed or lost."""
        key = version.key
        for table in (self.due, self._waiting, self._writes):
            table.pop(key, None)
        for tables in (self._queues, self._lacking):
            _remove(tables, key)
        if self._writing.get(key[0]) == key:
            del self._writing[key[0]]
        restoration = self._restorations.pop(key, None)
        if restoration is not None:
            self._release(restoration)
        self._spiller.drop_files([each.spilled for each in self._stored.pop(key, ())])
        self._directories.pop(key, None)
        if version.files is not None:
            self._count(version.files, version.tenant, 0)
        if version.tenant in self._lacking:
            self._relieved.add(version.tenant)  # others may fit now
        self._admit()

    def island_lost(self, lost: IslandFailed) -> None:
        """Try again to restore the versions that need the island."""
        for restoration in list(self._restorations.values()):
            if lost.island in restoration.islands:
                self._abort(restoration, lost.status, is_final=False)

    def island_drained(self, drained: IslandDrained) -> None:
        """Try again to restore the versions that need the island, which its operator has drained."""
        status = Status(Code.UNAVAILABLE, f"island {drained.island} was drained")
        for restoration in list(self._restorations.values()):
            if drained.island in restoration.islands:
                self._abort(restoration, status, is_final=False)

    def island_ready(self, ready: IslandReady | IslandRestarted) -> None:
        """Let versions that wait for the island be restored, and its hosts remove what killed hosts have left."""
        self._try_again()
        if self.lineage:
            numbers = tuple(number for some in self._directories.values() for number in some)
            keep = m.KeepFiles(self._path(), self._spiller.next_piece, numbers)
            for host in self._resources.hosts_of(ready.island):
                self._outbox.to_host(host, keep)

    def tick(self, now: float) -> None:
        for tenant, lacking in list(self._lacking.items()):
            first = list(islice(lacking.items(), _MAX_RETRIED))
            for key in [key for key, seconds in first if seconds <= now or tenant in self._relieved]:
                _remove(self._lacking, key)
                self._enqueue(key)
        self._relieved.clear()
        self._try_again()
        self._admit()

    def _try_again(self) -> None:
        self.due.update(self._waiting)
        self._waiting.clear()

    def proceed(self) -> None:
        """Write or restore arrays of one version."""
        if not self.due:
            return
        key = next(iter(self.due))
        del self.due[key]
        version = self._names.find(key)
        files = None if version is None else version.files
        if version is None or files is None or version.error is not None:
            return
        match files.state:
            case FileState.WRITING:
                self._write(version, files)
            case FileState.STORED:
                self._begin(version, files)
            case FileState.RESTORING:
                self._proceed(version, self._restorations[key])
            case FileState.WRITTEN:
                pass

    # ---- writing

    def _enqueue(self, key: VersionKey) -> None:
        self._queues.setdefault(key[0], {})[key] = None

    def _admit(self) -> None:
        """Let as many versions be written as may be at once, of the tenants that have waited longest."""
        free = _MAX_WRITTEN - len(self._writing)
        others = (tenant for tenant in self._queues if tenant not in self._writing)
        for tenant in list(islice(others, free)):
            waiting = self._queues.pop(tenant)
            key = next(iter(waiting))
            del waiting[key]
            if waiting:
                self._queues[tenant] = waiting  # behind those of other tenants
            self._writing[tenant] = key
            self.due[key] = None

    def _write(self, version: Version, files: VersionFiles) -> None:
        """Have hosts write the next arrays of a version."""
        vault = self._vaults.of(version)
        first = len(self._stored.setdefault(version.key, []))
        size = files.nbytes or files.expected
        more = size - files.nbytes + files.excess
        exceeded = self._make_space(version, more) if more else None
        if exceeded is not None:
            self._lacks(version, files, exceeded)
            return
        self._count(files, version.tenant, size)
        handles = tuple(version.held[first : first + m.MAX_READ])
        specs = [spec_of(vault.directory.entries[handle]) for handle in handles]
        stored = tuple((spec, self._vaults.platform(vault, spec)) for spec in specs)
        files.problem = ""
        number = self._spiller.next_piece  # of the first file, and of the directory
        write = ArrayWrite(version.key, number, handles, stored)
        self._writes[version.key] = write
        self._directories.setdefault(version.key, []).append(number)
        try:
            self._spiller.save(vault, handles, f"{self._path()}{number}", partial(self._written, write))
        except StatusError as error:
            del self._writes[version.key]
            self._directories[version.key].remove(number)
            self._lacks(version, files, error.status)

    def _make_space(self, version: Version, nbytes: int) -> Status | None:
        """Let the tenant's quota `disk` allow so many bytes more, for this version. Return an error if it does not.

        Older versions end for that if they stay only until this one is in files, but none ends if this does not help.
        """
        exceeded = self._exceeded(version, nbytes)
        freed, ended = 0, []
        for older in self._names.replaceable(version) if exceeded is not None else ():
            if older.files is None or not older.files.nbytes:
                continue
            ended.append(older)
            freed += older.files.nbytes
            if self._exceeded(version, nbytes - freed) is None:
                self._perform(self._names.make_space(self._outbox.seconds, ended))
                return None
        return exceeded

    def _exceeded(self, version: Version, nbytes: int) -> Status | None:
        """Return an error if the tenant's quota `disk` does not allow so many bytes more, for this version."""
        used = self._bytes.get(version.tenant, 0)
        text = f"its versions have {human_bytes(used)} in files, and {version.title} needs {human_bytes(nbytes)}"
        return self._tenants.by_name[version.tenant].exceeded("disk", nbytes, used, text)

    def _path(self) -> str:
        """Return the beginning of the paths of all directories of this cluster, which a number follows."""
        name = f"published-{self.lineage}-"
        return f"{self._directory}/{name}" if self._directory else name

    def _count(self, files: VersionFiles, tenant: str, nbytes: int) -> None:
        """Count this size for the version's files, instead of the former one."""
        total = self._bytes.get(tenant, 0) + nbytes - files.nbytes
        files.nbytes = nbytes
        self._bytes[tenant] = total
        if not total:
            del self._bytes[tenant]

    def _lacks(self, version: Version, files: VersionFiles, status: Status) -> None:
        del self._writing[version.tenant]
        files.problem = status.message
        self._lacking.setdefault(version.tenant, {})[version.key] = self._outbox.seconds + RETRY_SECONDS

    def _written(self, write: ArrayWrite, status: Status, arrays: dict[int, SpilledArray]) -> None:
        """Record the files of arrays, or remove them if the version does not exist any more."""
        version = self._names.find(write.key)
        if self._writes.get(write.key) is not write or version is None or version.files is None:
            self._spiller.drop_files(arrays.values())
            return
        del self._writes[write.key]
        found = [
            StoredArray(spec, platform, arrays[handle])
            for handle, (spec, platform) in zip(write.handles if status.ok else (), write.stored, strict=status.ok)
        ]
        larger = sum(max(0, each.spilled.nbytes - file_bytes(each.spec)) for each in found)
        exceeded = self._make_space(version, larger) if larger else None
        if status.ok:
            version.files.excess = larger if exceeded is not None else 0
            status = exceeded or status
        if status.ok:
            self._count(version.files, version.tenant, version.files.nbytes + larger)
            stored = self._stored[write.key]
            stored += found
            del self._writing[version.tenant]
            if len(stored) < len(version.held):
                self._enqueue(write.key)
            else:
                self._perform(self._names.written(self._outbox.seconds, version))
        else:
            self._spiller.drop_files(arrays.values())
            self._directories[write.key].remove(write.number)
            self._lacks(version, version.files, status)
        self._admit()

    # ---- restoring

    def _begin(self, version: Version, files: VersionFiles) -> None:
        """Begin to restore a version, or let it wait until an island can take it."""
        stored = self._stored[version.key]
        tenant = self._tenants.by_name[version.tenant]
        vault = self._vaults.get(tenant)
        try:
            places = self._places(vault, stored)
            islands = self._islands(vault, places, stored)
        except StatusError as error:
            files.problem = error.status.message
            self._waiting[version.key] = None
            return
        files.problem = ""
        self._names.restoring(version)
        self._restorations[version.key] = Restoration(version.key, vault.number, places, islands, _by_type(stored))
        self.due[version.key] = None

    def _places(self, vault: Session, stored: Sequence[StoredArray]) -> dict[int, int]:
        """Return the new number of each device of these arrays: the same ones, or those of another island.

        Raise UNAVAILABLE if no island can take the arrays now.
        """
        groups = {frozenset(each.spec.sharding.devices) for each in stored}
        devices = sorted(frozenset().union(*groups))
        if all(self._is_open(vault, device) for device in devices):
            return {device: device for device in devices}
        platforms = {each.platform for each in stored}
        for island in sorted(self._resources.islands, key=self._copies.free_bytes, reverse=True):
            if {self._resources.topology.shapes[island].platform} != platforms:
                continue
            locations = self._copies.open_devices(vault, island)
            chosen = {device: locations[i % len(locations)] for i, device in enumerate(devices)} if locations else {}
            if chosen and all(len({chosen[device] for device in group}) == len(group) for group in groups):
                return {device: self._vaults.number(vault, location) for device, location in chosen.items()}
        most = max(map(len, groups))
        kinds = " or ".join(sorted(platforms))
        text = f"no island with {counted(most, f'{kinds} device')} is ready"
        raise StatusError(Code.UNAVAILABLE, text)

    def _is_open(self, vault: Session, device: int) -> bool:
        """Return whether a device of the vault exists, and arrays can be restored there now."""
        location, topology = vault.devices.locations.get(device), self._resources.topology
        if location is None or location.island not in self._resources.islands:
            return False
        exists = location.host in topology.hosts_of(location.island)
        if not exists or PUBLISHED_DEVICES.start + self._resources.number_of(location) != device:
            return False
        return location in self._copies.open_devices(vault, location.island)

    def _islands(self, vault: Session, places: Mapping[int, int], stored: Iterable[StoredArray]) -> set[int]:
        """Return the islands that arrays are restored to, and those whose hosts read the files.

        Raise UNAVAILABLE if a host with files is not ready, and no other one on its machine can read them.
        """
        locations = [vault.devices.locations[device] for device in places.values()]
        islands = {each.island for each in locations}
        machines = {self._resources.hosts[each.host].machine for each in locations}
        for host in sorted({part.host for each in stored for part in each.spilled.parts}):
            if host >= self._resources.topology.host_count:
                continue
            island = self._resources.topology.island_of(host)
            record = self._resources.islands[island]
            if record.works:
                islands.add(island)
                continue
            known = self._resources.hosts.get(host)
            if not record.is_over and (known is None or known.machine not in machines):
                raise StatusError(Code.UNAVAILABLE, f"host {host}, which has the files, is not ready")
        return islands

    def _proceed(self, version: Version, restoration: Restoration) -> None:
        """Launch the restoration of the next arrays."""
        vault = self._open[restoration.vault]
        stored, first = self._stored[version.key], len(restoration.held)
        for position in restoration.order[first : first + MAX_TOGETHER]:
            each = stored[position]
            devices = tuple(restoration.places[device] for device in each.spec.sharding.devices)
            spec = replace(each.spec, sharding=replace(each.spec.sharding, devices=devices))
            handle, nbytes = self._vaults.new_handle(), version.arrays[position].nbytes
            entry = Entry((), nbytes, BufferState.SPILLED, producer=version.title, spec=spec, spilled=each.spilled)
            vault.directory.add(handle, entry)
            restoration.held.append(handle)
            restoration.left.add(handle)
        if len(restoration.held) < len(stored):
            self.due[version.key] = None
        try:
            self._spiller.restore(vault, restoration.held[first:], partial(self._restored, restoration), keeps=True)
        except StatusError as error:
            self._abort(restoration, error.status, is_final=True)

    def _restored(self, restoration: Restoration, handle: int, status: Status) -> None:
        if self._restorations.get(restoration.key) is not restoration:
            return
        if not status.ok:
            self._abort(restoration, status, is_final=status.details.kind is not Kind.ISLAND)
            return
        restoration.left.discard(handle)
        version = self._find(restoration.key)
        if restoration.left or len(restoration.held) < len(self._stored[restoration.key]):
            return
        del self._restorations[restoration.key]
        handles = dict(zip(restoration.order, restoration.held, strict=True))
        self._vaults.put_back(version, [handles[position] for position in range(len(handles))])
        self._history.record("arrays restored", version.title, -1, 0, version.tenant)
        self._perform(self._names.restored(version))
        self._after(version)

    def _find(self, key: VersionKey) -> Version:
        version = self._names.find(key)
        assert version is not None
        return version

    def _abort(self, restoration: Restoration, status: Status, is_final: bool) -> None:
        """End the restoration of a version. If that `is_final`, refuse its requests. Otherwise Atoll tries again."""
        del self._restorations[restoration.key]
        self._release(restoration)
        self._spiller.fail_restores(self._open[restoration.vault], restoration.held, status)
        version = self._find(restoration.key)
        now = self._outbox.seconds
        self._perform(self._names.not_restored(now, version, status if is_final else None))
        self._after(version)

    def _release(self, restoration: Restoration) -> None:
        """Release the arrays of a restoration, and keep the files."""
        vault = self._open.get(restoration.vault)
        if vault is None:
            return
        for handle in restoration.held:
            entry = vault.directory.entries.get(handle)
            if entry is not None and entry.spilled is not None:
                vault.directory.take(handle)  # its launch was not made
            elif entry is not None:
                self._buffers.release(vault, (handle,), delete=False)

    # ---- two clusters

    def pieces(self) -> Iterator[tuple[VersionKey, m.SpilledPiece]]:
        """Yield the files of all versions."""
        for key, stored in self._stored.items():
            for each in stored:
                yield from ((key, part.piece) for part in each.spilled.parts)

    def stopping(self, persist: bool) -> PersistedArrays | None:
        """Return the versions that the next cluster restores, and remove the files of all others."""
        kept = []
        is_writing = bool(self._writes)  # hosts that are killed now leave files, which those of the next cluster remove
        for key in list(self._stored):
            version = self._find(key)
            is_whole = version.files is not None and version.files.state is not FileState.WRITING
            if persist and is_whole and version.state is VersionState.COMPLETE:
                kept.append(self._persisted(version))
            else:
                self.forget(version)
        if not (kept or (persist and is_writing)):
            return None
        vaults = {each.tenant: self._vaults.find(each.tenant) for each in kept}
        places = {tenant: dict(vault.devices.locations) for tenant, vault in vaults.items() if vault is not None}
        return PersistedArrays(tuple(kept), places, self._names.first_number, self.lineage)

    def _persisted(self, version: Version) -> PersistedVersion:
        name = self._names.names[version.tenant, version.name]
        return PersistedVersion(
            version.tenant,
            version.name,
            version.number,
            version.session,
            version.handles,
            version.paths,
            version.structure,
            name.keep,
            name.next_number,
            version.replicas,
            tuple(version.arrays),
            tuple(self._stored[version.key]),
            tuple(self._directories[version.key]),
        )

    def restore_persisted(self, persisted: PersistedArrays) -> None:
        """Add the versions of an ended cluster, whose arrays are in files only."""
        self.lineage = persisted.lineage
        self._names.first_number = persisted.first_number
        for each in persisted.versions:
            tenant = self._tenants.by_name.get(each.tenant)
            if tenant is None:
                continue
            version = Version(
                each.tenant,
                each.name,
                each.number,
                each.session,
                each.handles,
                each.paths,
                each.structure,
                each.keep,
                0.0,
                VersionState.COMPLETE,
                arrays=list(each.arrays),
                replicas=each.replicas,
                files=VersionFiles(FileState.STORED),
            )
            self._vaults.get(tenant).devices.locations.update(persisted.places.get(each.tenant, {}))
            self._names.add_stored(self._outbox.seconds, version, each.keep, each.next_number)
            self._stored[version.key] = list(each.stored)
            self._directories[version.key] = list(each.directories)
            assert version.files is not None
            self._count(version.files, each.tenant, sum(stored.spilled.nbytes for stored in each.stored))


def _remove(tables: dict[str, dict[VersionKey, Any]], key: VersionKey) -> None:
    """Remove a version from the table of its tenant. It may not be there."""
    table = tables.get(key[0])
    if table is None:
        return
    table.pop(key, None)
    if not table:
        del tables[key[0]]


def _by_type(stored: Sequence[StoredArray]) -> list[int]:
    """Return the positions of arrays so that those of one type follow each other."""
    groups: dict[ArraySpec, list[int]] = {}
    for position, each in enumerate(stored):
        groups.setdefault(each.spec, []).append(position)
    return list(chain.from_iterable(groups.values()))


def file_bytes(spec: ArraySpec) -> int:
    """Return the size of an array in files, where equal shards are stored once; the least possible one for strings.

    In files, numbers of less than 8 bits have a byte each.
    """
    match spec.sharding.tiling:
        case Even() | Uneven():
            shapes = [shard_shape(spec.sharding, spec.shape, i) for i in range(len(spec.sharding.devices))]
        case _:
            shapes = [spec.shape]
    item = _MIN_STRING_BYTES if spec.dtype == "string" else -(-DTYPE_BITS.get(spec.dtype, 0) // 8)
    return item * sum(map(math.prod, shapes))
