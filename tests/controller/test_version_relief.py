"""Tests of the search for versions that are in files and can leave a device that lacks memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from atoll.cluster.tenant_settings import TenantSettings
from atoll.controller.named_arrays.version_relief import UNWRITTEN_SECONDS, VersionRelief
from atoll.ir.types import ArraySpec, Sharding
from atoll.named_arrays.named_arrays import Action, Free, NamedArrays
from atoll.named_arrays.version_records import Version, VersionKey
from atoll.protocol.number_ranges import PUBLISHED_DEVICES
from atoll.state.tenants import Tenant

DEVICE, OTHER = (0, 0), (1, 0)


class Devices:
    """Two devices with versions of 8 bytes per array.

    The versions in `stuck` cannot leave, and reads wait for `awaited`.
    """

    def __init__(self) -> None:
        self.seconds = 100.0
        self.names = NamedArrays()
        self.stuck: set[VersionKey] = set()
        self.awaited: set[VersionKey] = set()
        self.versions: list[VersionKey] = []
        self.examined: list[VersionKey] = []
        self.stored: list[VersionKey] = []
        self.replaced: list[VersionKey] = []
        self.is_possible = False  # the result of the last search
        self.is_freeing = False  # whether arrays of versions are being freed
        self.tenants = {name: Tenant(TenantSettings(name, "", priority=p)) for name, p in (("low", 1), ("high", 5))}
        state = SimpleNamespace(
            outbox=self,
            tenants=SimpleNamespace(by_name=self.tenants),
            resources=SimpleNamespace(topology=SimpleNamespace(number_of=lambda host, _: host)),
        )
        self.relief = VersionRelief(
            cast(Any, state), self.names, cast(Any, self), cast(Any, self), self.store, self.perform
        )

    def version(
        self,
        tenant: str = "low",
        device: tuple[int, int] = DEVICE,
        arrays: int = 1,
        keep: int = 64,
        is_written: bool = True,
        name: str = "",
    ) -> VersionKey:
        """Publish a complete version, and return its key. By default it is in files, and 64 versions share a name."""
        self.seconds += 1
        handles, paths = tuple(range(arrays)), tuple(map(str, range(arrays)))
        name = name or f"name{len(self.versions) // 64}"
        version = self.names.publish(
            self.seconds, tenant, name, 1, keep=keep, handles=handles, paths=paths, on_disk=True
        )
        version.held.extend(handles)
        version.count(ArraySpec("f32", (2,), Sharding((PUBLISHED_DEVICES.start + device[0],))), 1)
        self.names.complete(self.seconds, version)
        if is_written:
            self.names.written(self.seconds, version)
        self.versions.append(version.key)
        return version.key

    def many(self) -> list[VersionKey]:
        """Publish more versions than one search examines, none of which can leave the device."""
        found = [self.version() for _ in range(2000)]
        self.stuck.update(found)
        return found

    def free(
        self, missing: int, tenant: str = "low", later: float = 0.0, is_last: bool = False, waited: float = 1.0
    ) -> list[VersionKey]:
        """Free memory of the device after `later` seconds. Return the versions that were examined."""
        self.seconds += later
        self.examined.clear()
        self.is_possible = self.relief.free(self.tenants[tenant], DEVICE, missing, waited, is_last)
        return list(self.examined)

    def free_quota(self, device: tuple[int, int] | None, waited: float = 1.0) -> list[VersionKey]:
        """Free 8 bytes of the quota of tenant low, on one device or on all. Return the versions that were examined."""
        self.examined.clear()
        self.is_possible = self.relief.free_quota(self.tenants["low"], device, 8, waited, is_last=False)
        return list(self.examined)

    def many_unwritten(self) -> list[VersionKey]:
        """Publish replaced versions that are still being written, more than one search examines."""
        found = []
        for number in range(1000):
            found.append(self.version(keep=1, is_written=False, name=f"unwritten{number}"))
            self.version(keep=1, is_written=False, name=f"unwritten{number}")
        return found

    # ---- the parts of the controller that the search uses

    def flush_frees(self) -> None:
        pass

    def are_waiting(self, key: VersionKey) -> bool:
        return key in self.awaited

    def freed(self, version: Version, device: tuple[int, int] | None) -> int:
        self.examined.append(version.key)
        return 0 if version.key in self.stuck else 8 * len(version.held)

    def perform(self, actions: Sequence[Action]) -> None:
        self.replaced += [action.version.key for action in actions if isinstance(action, Free)]

    def store(self, version: Version) -> None:
        self.stored.append(version.key)
        version.leave_devices()
        self.names.store(version)


def test_the_first_complete_versions_leave_until_the_memory_is_enough() -> None:
    devices = Devices()
    one, two, _ = devices.version(), devices.version(arrays=2), devices.version()
    devices.free(20)
    assert (devices.stored, devices.is_possible) == ([one, two], True)


def test_versions_of_lower_priorities_leave_first_and_those_of_higher_ones_stay() -> None:
    devices = Devices()
    high, low = devices.version("high"), devices.version("low")
    devices.free(16, "low")
    assert (devices.stored, devices.is_possible) == ([low], False)
    devices.free(8, "high")
    assert devices.stored == [low, high]


def test_versions_on_other_devices_are_not_examined() -> None:
    devices = Devices()
    devices.version(device=OTHER)
    assert devices.free(8) == []


def test_versions_with_readers_or_with_reads_that_wait_stay() -> None:
    devices = Devices()
    read, awaited = devices.version(), devices.version()
    found = devices.names.find(read)
    assert found is not None
    found.readers.add(1)
    devices.awaited.add(awaited)
    assert devices.free(8) == []
    devices.awaited.clear()
    assert devices.free(8, later=1) == [awaited]


def test_a_version_that_cannot_leave_is_examined_once_per_second() -> None:
    devices = Devices()
    stuck = devices.version()
    devices.stuck.add(stuck)
    assert devices.free(8) == [stuck]
    assert [devices.free(8, later=0.125) for _ in range(7)] == [[]] * 7
    assert devices.free(8, later=0.125) == [stuck]


def test_a_higher_priority_does_not_wait_for_the_next_search() -> None:
    devices = Devices()
    high = devices.version("high")
    assert devices.free(8, "low") == []
    assert devices.free(8, "high") == [high]


def test_a_search_examines_some_versions_at_once_and_continues_later() -> None:
    devices = Devices()
    many = devices.many()
    searches = [devices.free(8, later=1) for _ in range(5)]
    assert [key for search in searches for key in search] == many
    assert max(map(len, searches)) <= 512


def test_a_search_that_has_freed_memory_continues_at_once() -> None:
    devices = Devices()
    one, two = devices.version(arrays=1000), devices.version(arrays=1000)
    assert (devices.free(1 << 20), devices.is_possible) == ([one], True)
    assert (devices.free(1 << 20), devices.is_possible) == ([two], True)


def test_searches_of_two_priorities_end() -> None:
    devices = Devices()
    devices.many()
    last = devices.version()
    for _ in range(10):
        devices.free(8, "low", later=1)
        devices.free(8, "high")
    assert devices.stored == [last]


def test_the_last_search_examines_versions_again() -> None:
    devices = Devices()
    stuck = devices.version()
    devices.stuck.add(stuck)
    devices.free(8)
    assert devices.free(8, later=0.1, is_last=True) == [stuck]
    assert not devices.is_possible
    assert devices.free(8, is_last=True) == [], "another launch waits for the same memory"
    assert not devices.is_possible


def test_a_launch_does_not_fail_before_all_versions_were_examined_and_then_it_does() -> None:
    devices = Devices()
    many, examined = devices.many(), list[VersionKey]()
    for _ in range(10):
        examined += devices.free(8, later=1, is_last=True)
        if not devices.is_possible:
            break
    assert examined == many
    devices.free(8, later=0.1, is_last=True)
    assert not devices.is_possible


def test_a_search_is_forgotten_after_a_while() -> None:
    devices = Devices()
    stuck = devices.version()
    devices.stuck.add(stuck)
    devices.free(8)
    devices.relief.tick(devices.seconds + 60)
    assert devices.free(8) == [stuck]


def test_a_tenant_gets_its_quota_of_a_device_from_its_own_versions_there() -> None:
    devices = Devices()
    devices.tenants["other"] = Tenant(TenantSettings("other", ""))
    devices.version("other")
    devices.version(device=OTHER)
    own = devices.version()
    assert devices.free_quota(DEVICE) == [own]
    assert (devices.stored, devices.is_possible) == ([own], True)


def test_a_tenant_gets_its_total_quota_from_its_versions_on_all_devices() -> None:
    devices = Devices()
    devices.version("high")
    own = devices.version(device=OTHER)
    assert devices.free_quota(None) == [own]


def test_searches_for_a_device_and_for_a_quota_are_independent() -> None:
    devices = Devices()
    stuck = devices.version()
    devices.stuck.add(stuck)
    assert devices.free(8) == devices.free_quota(DEVICE) == devices.free_quota(None) == [stuck]
    assert devices.free_quota(DEVICE) == []


def test_a_replaced_version_that_is_being_written_ends_before_a_launch_fails() -> None:
    devices = Devices()
    replaced, newest = (devices.version(keep=1, is_written=False) for _ in range(2))
    devices.free(8)
    assert devices.replaced == []
    assert not devices.is_possible
    devices.free(8, later=1, is_last=True)
    assert (devices.replaced, devices.is_possible) == ([replaced], True)
    devices.free(8, later=1, is_last=True)
    assert not devices.is_possible
    assert devices.names.find(newest) is not None


def test_a_replaced_version_that_is_being_written_ends_after_some_seconds() -> None:
    devices = Devices()
    replaced, _ = (devices.version(keep=1, is_written=False) for _ in range(2))
    devices.free(8, waited=UNWRITTEN_SECONDS - 0.1)
    assert devices.replaced == []
    devices.free(8, later=0.1, waited=UNWRITTEN_SECONDS)
    assert (devices.replaced, devices.is_possible) == ([replaced], True)


def test_a_replaced_version_that_is_being_written_ends_for_a_quota_of_its_tenant_only() -> None:
    devices = Devices()
    for tenant in ("high", "low"):
        for _ in range(2):
            devices.version(tenant, keep=1, is_written=False, name=tenant)
    devices.free_quota(None, UNWRITTEN_SECONDS)
    assert devices.replaced == [("low", "low", 1)]


def test_versions_of_higher_priorities_that_are_being_written_stay() -> None:
    devices = Devices()
    for _ in range(2):
        devices.version("high", keep=1, is_written=False)
    assert devices.free(8, "low", waited=UNWRITTEN_SECONDS) == []


def test_a_search_of_versions_that_are_being_written_examines_some_at_once_and_continues_later() -> None:
    devices = Devices()
    many = devices.many_unwritten()
    devices.stuck.update(many)
    searches = [devices.free(8, later=1, waited=UNWRITTEN_SECONDS) for _ in range(3)]
    assert [key for search in searches for key in search] == many
    assert max(map(len, searches)) <= 512


def test_only_what_versions_in_files_have_not_freed_is_taken_from_those_that_are_being_written() -> None:
    devices = Devices()
    written = devices.version()
    for name in ("one", "two"):
        for _ in range(2):
            devices.version(keep=1, is_written=False, name=name)
    devices.free(16, waited=UNWRITTEN_SECONDS)
    assert (devices.stored, devices.replaced, devices.is_possible) == ([written], [("low", "one", 1)], True)
