"""Tests of compiled programs on disk: the cache only returns programs that it has written for the same tenant
and key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.devices.xla.compiled_programs import open_programs
from atoll.devices.xla.program_cache import ProgramCache

KEY = b"k" * 32


@pytest.fixture
def programs(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path, KEY)


def entries(directory: Path) -> list[Path]:
    return sorted((path for path in directory.glob("atoll-*/*/*")), key=lambda path: path.stat().st_mtime)


def test_a_content_is_found_by_its_tenant_and_key_only(programs: ProgramCache, tmp_path: Path) -> None:
    programs.put("step", b"ana's", "ana")
    programs.put("step", b"everybody's")
    assert programs.get("step", "ana") == b"ana's"
    assert programs.get("step") == b"everybody's"
    assert programs.get("step", "ben") is None
    assert programs.get("other", "ana") is None
    assert ProgramCache(tmp_path, KEY).get("step", "ana") == b"ana's", "as after a restart"
    assert ProgramCache(tmp_path, b"o" * 32).get("step", "ana") is None, "another cluster's key"
    assert programs.statistics() == {"hits": 2, "misses": 2, "refused": 0, "failed": 0}


def test_a_name_is_never_part_of_a_path(programs: ProgramCache, tmp_path: Path) -> None:
    programs.put("../../../key", b"content", "../../tenant")
    assert programs.get("../../../key", "../../tenant") == b"content"
    assert len(entries(tmp_path)) == 1


def copied(theirs: Path, ours: Path) -> None:
    ours.write_bytes(theirs.read_bytes())


def changed(theirs: Path, ours: Path) -> None:
    content = bytearray(ours.read_bytes())
    content[-1] ^= 1
    ours.write_bytes(content)


def cut_off(theirs: Path, ours: Path) -> None:
    os.truncate(ours, ours.stat().st_size - 1)


def emptied(theirs: Path, ours: Path) -> None:
    os.truncate(ours, 0)


def link(theirs: Path, ours: Path) -> None:
    ours.unlink()
    ours.symlink_to(theirs)


def pipe(theirs: Path, ours: Path) -> None:
    ours.unlink()
    os.mkfifo(ours)


@pytest.mark.parametrize("tamper", [copied, changed, cut_off, emptied, link, pipe], ids=lambda each: each.__name__)
@pytest.mark.parametrize("tenant", ["ana", "ben"])
def test_an_entry_that_someone_else_has_written_is_a_miss_and_is_replaced(
    tamper: Callable[[Path, Path], None],
    tenant: str,
    programs: ProgramCache,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs.put("evil", b"evil", tenant)
    (evil,) = entries(tmp_path)
    programs.put("step", b"step", "ben")
    (step,) = (each for each in entries(tmp_path) if each != evil)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tamper(evil, step)
            assert programs.get("step", "ben") is None
            programs.put("step", b"step", "ben")
            assert programs.get("step", "ben") == b"step"
    assert programs.statistics()["refused"] == 2
    assert len(caplog.records) == 1, "anyone who can write there could fill the log"


def test_the_entries_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    programs = ProgramCache(tmp_path, KEY, max_tenant_bytes=10_000)
    for number in range(8):
        programs.put(str(number), bytes(1000), "ana")
        for age, path in enumerate(reversed(entries(tmp_path))):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert programs.get("0", "ana") is not None, "it is the newest now"
    for number in range(8, 40):
        programs.put(str(number), bytes(1000), "ana")
        assert sum(path.stat().st_size for path in entries(tmp_path)) <= 10_000
    assert programs.get("39", "ana") is not None
    assert programs.get("1", "ana") is None


def test_a_tenant_removes_its_own_entries_only_until_the_disk_is_full_of_all_tenants(tmp_path: Path) -> None:
    programs = ProgramCache(tmp_path, KEY, max_bytes=12_000, max_tenant_bytes=6_000)
    programs.put("step", bytes(1000), "ben")
    for number in range(30):
        programs.put(str(number), bytes(1000), "ana")
    assert programs.get("step", "ben") is not None
    for tenant in range(30):
        programs.put("step", bytes(1000), str(tenant))
        assert sum(path.stat().st_size for path in entries(tmp_path)) <= 12_000


def test_a_cache_without_a_directory_to_write_to_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    programs = ProgramCache(tmp_path / "file", KEY)
    programs.put("step", b"step")
    assert programs.get("step") is None
    assert len(caplog.records) == 1


def test_variables_bound_the_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("ATOLL_TENANT_CACHE_BYTES", "1KiB")
    programs = open_programs(str(tmp_path / "programs"))
    assert programs is not None
    programs.put("small", b"x" * 500)
    programs.put("large", b"x" * 2000)
    assert programs.get("small") == b"x" * 500
    assert programs.get("large") is None
