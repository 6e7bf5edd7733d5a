"""The records of named arrays: names with their versions, and the index of the versions on each device.

`NamedArrays` changes the states of versions. A version tells the index when its arrays enter or leave devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.cluster.array_names import SEPARATOR
from atoll.cluster.state_machine import StateMachine
from atoll.errors import Status
from atoll.ir.types import ArraySpec
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_states import TRANSITIONS, VersionState
from atoll.named_arrays.written_versions import ANY_DEVICE, Rank, WrittenVersions
from atoll.protocol.number_ranges import PUBLISHED_DEVICES

_S = VersionState


class PublishedArray(msgspec.Struct, frozen=True):
    """One array of a version: its type, with the devices on which it was published, and its size in bytes."""

    spec: ArraySpec
    nbytes: int


VersionKey = tuple[str, str, int]  # the tenant, the name, and the number of a version


class VersionIndex:
    """The versions that have arrays or copies on each device, by the number of the device in vaults.

    `written` has those of them that are also in files.
    """

    def __init__(self) -> None:
        self._on: dict[int, dict[VersionKey, Version]] = {}
        self.written = WrittenVersions()

    def add(self, version: Version, device: int) -> None:
        self._on.setdefault(device, {})[version.key] = version
        if version.is_written:
            self.written.add(device, version.tenant, version.rank)

    def remove(self, version: Version, device: int) -> None:
        """Remove a version from a device. It may not be there."""
        versions = self._on.get(device, {})
        if versions.pop(version.key, None) is not None and not versions:
            del self._on[device]
        if version.files is not None:
            self.written.remove(device, version.tenant, version.rank)

    def files_written(self, version: Version) -> None:
        """Handle that a version on devices is in files now."""
        for device in (ANY_DEVICE, *version.devices):
            self.written.add(device, version.tenant, version.rank)

    @property
    def content(self) -> set[tuple[int, VersionKey]]:
        """All devices with the versions on them."""
        return {(device, key) for device, versions in self._on.items() for key in versions}

    def has_some(self, devices: Iterable[int]) -> bool:
        """Return whether versions are on some of the devices."""
        return any(device in self._on for device in devices)

    def on(self, devices: Iterable[int]) -> list[Version]:
        """Return the versions on some of the devices, ordered by their keys."""
        found = {key: version for device in devices for key, version in self._on.get(device, {}).items()}
        return [found[key] for key in sorted(found)]


@dataclass(eq=False)
class Version(StateMachine[VersionState]):
    """A version of a name, in the controller. `error` is the reason if it is LOST or FAILED.

    `atoll.pins.Version` is what `subscribe` returns for it in a script.

    Attributes:
      held: handles in the vault of the arrays that it has taken over. Readers get these.
      copies: further handles in the vault, by the position of the array in `held`.
      devices: the number of arrays and copies on each device, by its number in vaults.
      index: the index of all versions by device.
      problem: why copies are missing.
      files: those of a version that was published with `spill="disk"`.
      sent: bytes that its arrays and copies have sent to readers on other islands.
      passed_on: bytes that readers on other islands have received from copies of earlier readers.
    """

    transitions = TRANSITIONS
    tenant: str
    name: str
    number: int
    session: int  # that published it
    handles: tuple[int, ...]  # of its arrays in that session
    paths: tuple[str, ...]  # of its arrays in the published tree
    structure: bytes  # the client's form of the tree, which only clients read
    keep: int  # number of versions that the name keeps from this one on
    seconds: float  # time of its publication, and later of its completion
    state: VersionState = VersionState.PENDING
    held: list[int] = field(default_factory=list)
    arrays: list[PublishedArray] = field(default_factory=list)  # those of `held`
    replicas: int = 1  # copies of each array that share no island, with the published one
    copies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    devices: dict[int, int] = field(default_factory=dict)
    index: VersionIndex = field(default_factory=VersionIndex, repr=False)
    problem: str = ""
    files: VersionFiles | None = None
    readers: set[int] = field(default_factory=set)
    error: Status | None = None
    retired: float = 0.0  # time since which it is RETIRED
    lent: list[tuple[int, int]] = field(default_factory=list)  # arrays of other tenants' sessions that share its memory
    sent: int = 0
    passed_on: int = 0

    def _described(self) -> str:
        return self.title

    @property
    def key(self) -> VersionKey:
        return self.tenant, self.name, self.number

    @property
    def title(self) -> str:
        """Return the version's name for users."""
        return f"version {self.number} of {self.tenant}{SEPARATOR}{self.name}"

    @property
    def nbytes(self) -> int:
        """Return the size of the arrays that are held, without copies of replicated arrays."""
        return sum(each.nbytes for each in self.arrays)

    @property
    def is_on_devices(self) -> bool:
        """Return whether the arrays are on devices. Otherwise they are in files only."""
        return self.files is None or self.files.are_on_devices

    @property
    def is_written(self) -> bool:
        """Return whether the arrays are on devices and in files."""
        return self.files is not None and self.files.state is FileState.WRITTEN

    @property
    def is_being_written(self) -> bool:
        """Return whether the arrays will be in files, and some are not yet."""
        return self.files is not None and self.files.state is FileState.WRITING

    @property
    def has_files(self) -> bool:
        """Return whether all arrays are in files. They may also be on devices."""
        return self.files is not None and self.files.state is not FileState.WRITING

    @property
    def rank(self) -> Rank:
        """Return the place of the version among those of its tenant in `WrittenVersions`."""
        return self.seconds, self.name, self.number

    def join(self, index: VersionIndex) -> None:
        """Let this be the index of all versions, and enter it."""
        self.index = index
        for device in self.devices:
            index.add(self, device)
        if self.is_written:
            index.files_written(self)

    def count(self, spec: ArraySpec, by: int) -> None:
        """Add an array or a copy of this type to `devices`, or remove it. `by` is 1 or -1."""
        for device in spec.sharding.devices:
            number = self.devices.get(device, 0) + by
            if number:
                self.devices[device] = number
                self.index.add(self, device)
            else:
                del self.devices[device]
                self.index.remove(self, device)

    def leave_devices(self) -> None:
        """Handle that no array or copy is left."""
        for device in (ANY_DEVICE, *self.devices):
            self.index.remove(self, device)
        self.devices.clear()

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """Return the devices with arrays or copies, by their numbers in the cluster."""
        return tuple(sorted(device - PUBLISHED_DEVICES.start for device in self.devices))

    @property
    def described(self) -> int:
        """Return the size of what the controller keeps about the tree: characters of paths, and bytes."""
        return described_size(self.paths, self.structure)


class Name(msgspec.Struct, eq=False):
    """A name of a tenant. It outlives its versions, so that the numbers of versions never repeat.

    If it is forgotten, a new name starts at a number that no forgotten name has had.
    """

    tenant: str
    name: str
    keep: int = 1
    next_number: int = 1
    versions: dict[int, Version] = msgspec.field(default_factory=dict)  # that are not FAILED and not FREED, by number
    failure: tuple[int, Status] | None = None  # the last version that failed, and why

    def divided(self) -> tuple[list[Version], list[Version]]:
        """Return the complete versions that the name keeps, and the older ones."""
        complete = self._in(_S.COMPLETE)
        return complete[-self.keep :], complete[: -self.keep]

    def awaited(self) -> list[Version]:
        """Return the older versions that stay, because those that the name keeps will be in files, and none of them is.

        These are the newest one in files, and the first one after it, so that versions become complete in files even if
        the script publishes faster than the hosts write.
        """
        kept, older = self.divided()
        if not any(each.is_being_written for each in kept) or any(each.has_files for each in kept):
            return []
        in_files = [each for each in older if each.has_files][-1:]
        last = in_files[0].number if in_files else 0
        following = [each for each in older if each.is_being_written and each.number > last]
        return in_files + following[:1]

    def newest(self) -> Version | None:
        """Return the newest complete version."""
        return max(self._in(_S.COMPLETE), key=_number, default=None)

    def _in(self, state: VersionState) -> list[Version]:
        """Return the versions in a state, ordered by their numbers."""
        return sorted((each for each in self.versions.values() if each.state is state), key=_number)

    def contents(self) -> str:
        """Return the versions and their states as text."""
        parts = []
        complete = self._in(_S.COMPLETE)
        listed = ", ".join(str(each.number) for each in complete)
        many = f"versions {listed} exist" if len(complete) > 1 else f"version {listed} exists"
        parts.append(many if complete else "no version exists")
        for version in self.versions.values():
            if version.state is _S.PENDING:
                count = f"{len(version.held)} of {len(version.handles)} arrays complete"
                parts.append(f"version {version.number} has {count}, and session {version.session} computes it")
            elif version.state is _S.COMPLETE and version.files is not None and not version.is_on_devices:
                parts.append(f"version {version.number} is in files, and {version.files.restoring_text()}")
            elif version.state is _S.LOST and version.error is not None:
                parts.append(f"version {version.number} is lost: {version.error.message}")
        if self.failure is not None and self.failure[0] > (complete[-1].number if complete else 0):
            parts.append(f"version {self.failure[0]} failed: {self.failure[1].message}")
        return "; ".join(parts)


def described_size(paths: tuple[str, ...], structure: bytes) -> int:
    """Return the size of what the controller keeps about a tree: characters of paths, and bytes."""
    return sum(map(len, paths)) + len(structure)


def _number(version: Version) -> int:
    return version.number
