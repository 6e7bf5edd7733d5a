"""Tests of reading the memory of the machine, or of the process's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.cluster.processes.machine_memory import group_memory, machine_memory

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


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, []),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "1000\n"}, []),
        ("0::/a\n", {"a/memory.max": "4096\n"}, []),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "8192\n",
                "a/b/memory.current": "1000\n",
                "a/b/memory.stat": "anon 300\ninactive_file 500\nactive_file 7\n",
                "a/memory.max": "4096\n",
                "a/memory.current": "4096\n",
            },
            [(8192, 7692), (4096, 0)],
        ),
        (
            "5:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "4096\n",
                "memory/a/memory.usage_in_bytes": "4000\n",
                "memory/a/memory.stat": "inactive_file 10\ntotal_inactive_file 904\n",
            },
            [(4096, 1000)],
        ),
    ],
)
def test_groups_with_a_limit_have_the_memory_that_their_processes_do_not_use(
    tmp_path: Path, groups: str, files: dict[str, str], expected: list[tuple[int, int]]
) -> None:
    if groups:
        _write(tmp_path / "proc/self/cgroup", groups)
    for name, text in files.items():
        _write(tmp_path / "sys/fs/cgroup" / name, text)
    assert group_memory(tmp_path) == expected
