"""Tests of reading the memory of the machine, or of the process's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.cluster.processes.machine_memory import machine_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, PHYSICAL),
        ("0::/\n", {"memory.max": "max\n"}, PHYSICAL),
        ("0::/\n", {"memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "8192\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "4096\n", "a/memory.max": "max\n"}, 4096),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, PHYSICAL),
        ("5:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "4096\n"}, PHYSICAL),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    if groups:
        _write(tmp_path / "proc/self/cgroup", groups)
    for name, text in files.items():
        _write(tmp_path / "sys/fs/cgroup" / name, text)
    assert machine_memory(tmp_path) == expected
