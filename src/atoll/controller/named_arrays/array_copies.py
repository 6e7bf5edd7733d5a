"""Copies of published arrays on other islands: replicas, and arrays that leave an island which is drained.

A version needs copies if its publisher asked for replicas, or if one of its islands is being drained. The vault
launches transfers that make them, at most `MAX_READ` arrays at a time for each version. Copies never wait for memory:
if no island has enough, the version lacks them. Atoll looks again when one has enough, or later. When arrays on another
island exist, those on the island that is drained are freed.

If an island fails, other copies of the arrays take the place of those that are lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.cluster.lifecycle import IslandReady, IslandRestarted, IslandState
from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.controller.named_arrays.vaults import Vaults, spec_of
from atoll.controller.state import ClusterState
from atoll.errors import Code, Details, Kind, Status, StatusError, failed
from atoll.ir import program as ir
from atoll.ir.types import DTYPE_BITS, ArraySpec, shard_shape
from atoll.launch.launches import Launches
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.rules import MemoryLackedError, check_memory, memory_of
from atoll.named_arrays.copy_rules import Islands, independent, type_of_copy, useful_islands
from atoll.named_arrays.named_arrays import NamedArrays
from atoll.named_arrays.version_records import Version, VersionKey
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.state.buffer_directory import Entry
from atoll.state.session import Session

# Versions of a tenant of which arrays are examined or copied at the same time. Copies may wait for a quota.
_MAX_AT_ONCE = 4
# Until Atoll tries again to make a copy. The time doubles with each attempt that changes nothing.
RETRY_SECONDS = 10.0
_LONGEST_RETRY_SECONDS = 320.0
# Devices without enough memory that are remembered for a version.
_MAX_AWAITED = 64
# Versions for which Atoll looks each second whether such a device has enough memory now.
_MAX_LOOKED = 32
# Groups of arrays on different islands that are copied in one flush: each one looks at all islands.
_MAX_PLACES = 4
# Islands for which a transfer is lowered although its scratch memory may not fit there.
_MAX_LOWERED = 2
# Versions that the error of a drain names.
_MAX_NAMED = 8


class CopyRun(msgspec.Struct, eq=False):
    """Arrays of a version that are being copied. `results` has their positions, by the handle of the copy."""

    key: VersionKey
    vault: int
    results: dict[int, int]
    following: int  # the first array that has not been examined


class _Source(NamedTuple):
    """An array to copy: its position in the version, its handle in the vault, and its type there."""

    position: int
    handle: int
    spec: ArraySpec


class _Plan(NamedTuple):
    """Copies on an island: the arrays, the types of the copies, and the bytes that they need on each device.

    Devices are numbered by their position on the island, so a plan serves all islands with as many devices.
    """

    sources: tuple[_Source, ...]
    targets: tuple[ArraySpec, ...]
    nbytes: Mapping[int, int]
    reshards: bool


# The platform of an array, and the islands of each of its copies.
_Place = tuple[str, tuple[Islands, ...]]


class ArrayCopies:
    """Makes copies of published arrays, and frees those that nothing needs."""

    def __init__(
        self,
        state: ClusterState,
        names: NamedArrays,
        vaults: Vaults,
        launches: Launches,
        internal: InternalPrograms,
    ) -> None:
        self.due: dict[VersionKey, int] = {}  # versions to examine now, with the first array
        self.leaving: set[int] = set()  # islands that are being drained
        self._queues: dict[str, dict[VersionKey, None]] = {}  # versions to examine after others, by tenant
        self._runs: dict[VersionKey, CopyRun] = {}
        self._retries: dict[VersionKey, float] = {}  # versions that lack copies, with the time to try again
        self._delays: dict[VersionKey, float] = {}  # seconds between the attempts, after the first
        # Devices that lack memory for copies of these versions, with the bytes that must be free there.
        self._awaited: dict[VersionKey, dict[HostDevice, int]] = {}
        self._open = state.sessions
        self._outbox = state.outbox
        self._resources = state.resources
        self._names = names
        self._vaults = vaults
        self._launcher = launches.launcher
        self._ledger, self._buffers = launches.reservations.ledger, launches.buffers
        self._internal = internal

    @property
    def running(self) -> Mapping[VersionKey, CopyRun]:
        """The runs that make copies, by version."""
        return self._runs

    @property
    def work(self) -> tuple[Collection[Any], ...]:
        """Return the containers of work for `proceed`. All are empty if there is no such work."""
        return self._runs, self.due, self._queues

    # ---- events

    def examine(self, version: Version) -> None:
        """Examine a version whose copies may be too few."""
        self._enqueue(version)
        self._admit()

    def _enqueue(self, version: Version) -> None:
        for table in (self._retries, self._delays, self._awaited):
            table.pop(version.key, None)
        self._queues.setdefault(version.tenant, {})[version.key] = None

    def _admit(self) -> None:
        """Examine as many of the waiting versions of each tenant as may be examined at once."""
        busy = Counter(key[0] for key in (*self._runs, *self.due))
        for tenant, waiting in list(self._queues.items()):
            while waiting and busy[tenant] < _MAX_AT_ONCE:
                key = next(iter(waiting))
                del waiting[key]
                if key in self._runs:
                    self._runs[key].following = 0
                else:
                    busy[tenant] += key not in self.due
                    self.due[key] = 0
            if not waiting:
                del self._queues[tenant]

    def leave(self, island: int) -> None:
        """Begin to copy the arrays on an island to others. `stay` follows when the island has been drained, or not."""
        self.leaving.add(island)
        for version in self._on(island):
            self._enqueue(version)
        self._admit()

    def stay(self, island: int) -> None:
        self.leaving.discard(island)

    def is_on(self, island: int) -> bool:
        """Return whether versions have arrays or copies on the island."""
        return self._names.index.has_some(self._vaults.numbers_on(island))

    def obstacles(self, island: int) -> list[str] | None:
        """Return why versions stay on an island that is being drained; None if arrays are still being copied."""
        there = self._vaults.numbers_on(island)
        for key in chain(self._runs, self.due, *self._queues.values()):
            version = self._names.find(key)
            if version is not None and not there.isdisjoint(version.devices):
                return None
        found = self._on(island)
        unexamined = [each for each in found if not each.problem]
        for version in unexamined:
            self._enqueue(version)
        if unexamined:
            self._admit()
            return None
        named = [f"{each.title}: {each.problem}" for each in found[:_MAX_NAMED]]
        more = len(found) - _MAX_NAMED
        return named if more <= 0 else [*named, f"and {counted(more, 'more version')}"]

    def _on(self, island: int) -> list[Version]:
        """Return the versions with arrays or copies on the island."""
        return self._names.index.on(self._vaults.numbers_on(island))

    def island_lost(self, island: int) -> list[Version]:
        """Let copies elsewhere take the place of arrays on the island. Return the versions that lack some of these."""
        self.leaving.discard(island)
        lost = []
        for version in self._on(island):
            if self._survives(version, island):
                self.examine(version)
            else:
                lost.append(version)
        return lost

    def _survives(self, version: Version, island: int) -> bool:
        if not version.copies:
            return False
        entries, lost = self._vaults.of(version).directory.entries, self._vaults.numbers_on(island)
        chosen: dict[int, list[int]] = {}
        for position, held in enumerate(version.held):
            copies = (held, *version.copies.get(position, ()))
            found = [(handle, entries[handle]) for handle in copies if handle in entries]
            kept = [each for each, entry in found if entry.error is None and lost.isdisjoint(_devices(entry))]
            if not kept:
                return False
            if len(kept) < len(copies):
                chosen[position] = kept
        self._vaults.keep_copies(version, chosen)
        return True

    def forget(self, version: Version) -> None:
        """Forget the copies of a version that are being made, since its arrays are in files only."""
        run = self._runs.pop(version.key, None)
        vault = None if run is None else self._open.get(run.vault)
        if run is not None and vault is not None:
            self._buffers.release(vault, tuple(run.results), delete=False)
        for table in (self.due, self._retries, self._delays, self._awaited):
            table.pop(version.key, None)
        version.problem = ""

    def island_ready(self, ready: IslandReady | IslandRestarted) -> None:
        """Try again to make the copies that are missing: the island may have memory for them."""
        self._delays.clear()
        for key in list(self._retries):
            self._retries[key] = 0.0

    def _look_for_memory(self) -> None:
        """Try again now to make copies that lacked memory which is free. Each second, other versions are looked at."""
        free = self._ledger.free
        for key in list(islice(self._awaited, _MAX_LOOKED)):
            awaited = self._awaited.pop(key)
            if key in self._retries:
                if any(nbytes <= free(device) for device, nbytes in awaited.items()):
                    self._retries[key] = 0.0
                else:
                    self._awaited[key] = awaited

    def tick(self, now: float) -> None:
        self._look_for_memory()
        for key in [key for key, seconds in self._retries.items() if seconds <= now]:
            if self._retries.pop(key) > 0.0:
                self._delays[key] = min(2 * self._delays.get(key, RETRY_SECONDS), _LONGEST_RETRY_SECONDS)
            self._queues.setdefault(key[0], {})[key] = None
        self._admit()

    def proceed(self) -> None:
        """Record the copies that are complete, and examine more versions."""
        if not any(self.work):
            return
        for run in [each for each in self._runs.values() if self._has_ended(each)]:
            self._ended(run)
        if self.due:
            key = next(iter(self.due))
            self._examine(key, self.due.pop(key))
        self._admit()

    # ---- examining

    def _examine(self, key: VersionKey, first: int) -> None:
        version = self._find(key)
        vault = None if version is None else self._vaults.find(version.tenant)
        if version is None or vault is None:
            self._delays.pop(key, None)
            return
        if not first:
            version.problem = ""
            self._awaited.pop(key, None)
        stop = min(first + m.MAX_READ, len(version.held))
        results, stop = self._launch(vault, version, range(first, stop))
        if results:
            self._runs[key] = CopyRun(key, vault.number, results, stop)
        elif stop < len(version.held):
            self.due[key] = stop
        elif not version.problem:
            self._delays.pop(key, None)

    def _find(self, key: VersionKey) -> Version | None:
        """Return a version, or None if its arrays do not exist any more.

        A version that was lost while it has readers may be RETIRED. Then only its error says that it was lost.
        """
        version = self._names.find(key)
        return None if version is None or version.error is not None else version

    def _lacks(self, version: Version, problem: str, lacking: Mapping[HostDevice, int] = MappingProxyType({})) -> None:
        """Note why a version lacks copies. `lacking` are devices, with the bytes that must be free there."""
        version.problem = problem
        awaited = self._awaited.setdefault(version.key, {}) if lacking else {}
        for device, nbytes in lacking.items():
            if device in awaited or len(awaited) < _MAX_AWAITED:
                awaited[device] = min(nbytes, awaited.get(device, nbytes))
        self._retries[version.key] = self._outbox.seconds + self._delays.get(version.key, RETRY_SECONDS)

    def _copies(self, vault: Session, version: Version, position: int) -> dict[int, Islands]:
        """Return the islands of each copy of an array that has not failed, by its handle. The read one is the first."""
        found = {}
        for handle in (version.held[position], *version.copies.get(position, ())):
            entry = vault.directory.entries.get(handle)
            if entry is not None and entry.error is None:
                found[handle] = self._vaults.islands(vault, spec_of(entry))
        return found

    def _launch(self, vault: Session, version: Version, positions: range) -> tuple[dict[int, int], int]:
        """Launch copies of those of these arrays that need one.

        Return their positions by the handles of the copies, and the first position that was not examined.
        """
        wanted = version.replicas if version.state is VersionState.COMPLETE else 1
        lacking: dict[_Place, list[_Source]] = {}
        settled: list[int] = []
        stop = positions.stop
        for position in positions:
            copies = self._copies(vault, version, position)
            staying = self._staying(copies)
            if not copies or independent(staying.values()) >= wanted:
                settled.append(position)
                continue
            handle = next(iter(staying or copies))
            spec = spec_of(vault.directory.entries[handle])
            place = self._vaults.platform(vault, spec), tuple(staying.values())
            if place not in lacking and len(lacking) == _MAX_PLACES:
                stop = position
                break
            lacking.setdefault(place, []).append(_Source(position, handle, spec))
        self._settle(vault, version, settled)
        results: dict[int, int] = {}
        for (platform, copies_of), sources in lacking.items():
            shapes = self._resources.topology.shapes
            among = [
                each for each in self._resources.islands if self._is_open(each) and shapes[each].platform == platform
            ]
            ranked = self._ranked(useful_islands(copies_of, wanted, among), copies_of)
            for reshards in (True, False):
                awaited: dict[HostDevice, int] = {}
                try:
                    results |= self._copy(vault, platform, ranked, sources, reshards, awaited)
                except StatusError as error:
                    self._lacks(version, error.status.message, awaited)
                    self._settle(vault, version, [each.position for each in sources])
        return results, stop

    def _copy(
        self,
        vault: Session,
        platform: str,
        ranked: Sequence[int],
        sources: Sequence[_Source],
        reshards: bool,
        awaited: dict[HostDevice, int],
    ) -> dict[int, int]:
        """Copy those of these arrays whose transfer reshards, or does not, to the first island with enough memory.

        Return the positions of the arrays, by the handles of the copies. Raise StatusError if no island can take them;
        `awaited` then gets the devices that lack memory, with the bytes that must be free there.
        """
        if not ranked:
            raise failed(
                Code.RESOURCE_EXHAUSTED,
                f"no other island with {platform} devices is ready",
                Details(Kind.LIMIT, limit="islands", retriable=True),
            )
        problem: StatusError | None = None
        plans: dict[int, _Plan | None] = {}  # by the number of devices
        lowered = 0
        for island in ranked:
            locations = self.open_devices(vault, island)
            count = len(locations)
            if count not in plans:
                plans[count] = _plan(sources, count, reshards)
            plan = plans[count]
            if plan is None:
                text = f"island {island} has too few devices for a copy"
                problem = problem or StatusError(Code.FAILED_PRECONDITION, text)
                continue
            if not plan.sources:
                return {}
            lacking = self._lacking(plan, locations)
            if lacking is not None:
                problem = problem or lacking
                awaited.setdefault(lacking.device, lacking.nbytes)
                continue
            try:
                return self._launch_copy(vault, plan, [self._vaults.number(vault, each) for each in locations])
            except StatusError as error:
                problem = problem or error
                if isinstance(error, MemoryLackedError):
                    awaited.setdefault(error.device, error.nbytes)
                lowered += 1
                if lowered == _MAX_LOWERED:
                    break
        assert problem is not None
        raise problem

    def _lacking(self, plan: _Plan, locations: Sequence[DeviceLocation]) -> MemoryLackedError | None:
        """Return an error if the copies do not fit on the devices of an island."""
        ledger = self._ledger
        for position, nbytes in plan.nbytes.items():
            device = locations[position].host, locations[position].ordinal
            if nbytes > ledger.free(device):
                return MemoryLackedError(device, nbytes, ledger)
        return None

    def _launch_copy(self, vault: Session, plan: _Plan, devices: Sequence[int]) -> dict[int, int]:
        sources, targets = plan.sources, tuple(_moved_to(devices, each) for each in plan.targets)
        specs, count = tuple(each.spec for each in sources), len(sources)
        node = ir.Transfer(tuple(range(count)), targets, reshard=plan.reshards)
        definition = ir.Program("copy published arrays", specs, (node,), tuple(range(count, 2 * count)))
        program = self._internal.make(vault, definition, vault.devices.locations)
        try:
            check_memory(memory_of(vault, program), self._ledger)
            results = {self._vaults.new_handle(): each.position for each in sources}
            self._internal.take_credit(vault)
            self._launcher.launch(vault, m.Launch(program, tuple(each.handle for each in sources), tuple(results), ()))
        finally:
            self._internal.drop(vault, program)
        return results

    # ---- islands

    def _is_open(self, island: int) -> bool:
        """Return whether the island is ready, and is not being drained."""
        return self._resources.islands[island].state is IslandState.READY and island not in self.leaving

    def open_devices(self, vault: Session, island: int) -> list[DeviceLocation]:
        """Return the devices of an island on which arrays can be made now: those that are in no exclusive slices."""
        if not self._is_open(island):
            return []
        return [each for each in self._resources.devices(island).locations if not vault.devices.closed(each)]

    def _ranked(self, islands: Sequence[int], copies: Sequence[Islands]) -> list[int]:
        """Return the islands, the best one first: on other machines than the copies, and with the most free memory."""
        used = {machine for some in copies for island in some for machine in self._machines(island)}
        return sorted(
            islands,
            key=lambda island: (not used.isdisjoint(self._machines(island)), -self.free_bytes(island), island),
        )

    def _machines(self, island: int) -> set[str]:
        return {self._resources.hosts[host].machine for host in self._resources.hosts_of(island)}

    def free_bytes(self, island: int) -> int:
        """Return the free memory of the device of the island that has the least."""
        free = self._ledger.free
        devices = self._resources.devices(island).locations
        return min((free((each.host, each.ordinal)) for each in devices), default=0)

    # ---- the end of copies

    def _has_ended(self, run: CopyRun) -> bool:
        vault = self._open.get(run.vault)
        entries = {} if vault is None else vault.directory.entries
        return all(handle not in entries or entries[handle].ready for handle in run.results)

    def _ended(self, run: CopyRun) -> None:
        """Record the copies that are complete. Free them if the version was freed or lost."""
        del self._runs[run.key]
        vault, version = self._open.get(run.vault), self._find(run.key)
        if vault is None:
            return
        problem: Status | None = None
        for handle, position in run.results.items():
            entry = vault.directory.entries.get(handle)
            error = None if entry is None else entry.error
            if version is None or error is not None:
                self._buffers.release(vault, (handle,), delete=False)
                problem = problem or error
            elif entry is not None:
                self._vaults.add_copy(version, position, handle)
        if version is None:
            self._delays.pop(run.key, None)
            return
        self._settle(vault, version, run.results.values())
        if problem is not None:
            self._lacks(version, problem.message)
        self.due[run.key] = run.following

    def _staying(self, copies: Mapping[int, Islands]) -> dict[int, Islands]:
        """Return the copies that are on no island that is being drained."""
        return {handle: islands for handle, islands in copies.items() if self.leaving.isdisjoint(islands)}

    def _settle(self, vault: Session, version: Version, positions: Iterable[int]) -> None:
        """Free the copies of arrays that failed, those on islands that are being drained, and those beyond `replicas`.

        The last copies of an array stay, wherever they are.
        """
        chosen: dict[int, list[int]] = {}
        for position in positions:
            kept: dict[int, Islands] = {}
            for handle, islands in self._staying(self._copies(vault, version, position)).items():
                if independent(kept.values()) >= version.replicas:
                    break
                kept[handle] = islands
            if kept and len(kept) < 1 + len(version.copies.get(position, ())):
                chosen[position] = list(kept)
        self._vaults.keep_copies(version, chosen)


def _devices(entry: Entry) -> tuple[int, ...]:
    return spec_of(entry).sharding.devices


def _plan(sources: Sequence[_Source], count: int, reshards: bool) -> _Plan | None:
    """Plan copies of those arrays whose transfer reshards, or does not, on an island with `count` devices.

    Return None if one of the arrays cannot be there.
    """
    chosen: list[_Source] = []
    targets: list[ArraySpec] = []
    nbytes: Counter[int] = Counter()
    for each in sources:
        made = type_of_copy(each.spec, range(count), each.position) if count else None
        if made is None:
            return None
        target = made[0]
        if made[1] is reshards:
            chosen.append(each)
            targets.append(target)
            for shard, device in enumerate(target.sharding.devices):
                items = math.prod(shard_shape(target.sharding, target.shape, shard))
                nbytes[device] += items * DTYPE_BITS[target.dtype] // 8
    return _Plan(tuple(chosen), tuple(targets), nbytes, reshards)


def _moved_to(devices: Sequence[int], spec: ArraySpec) -> ArraySpec:
    """Return the type of an array whose devices are positions in `devices`, on these devices."""
    chosen = tuple([devices[position] for position in spec.sharding.devices])
    return replace(spec, sharding=replace(spec.sharding, devices=chosen))
