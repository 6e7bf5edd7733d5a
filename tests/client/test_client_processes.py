"""Where a client puts large arrays for its proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.client.processes import place_with_room

SHM, TMP = Path("/dev/shm"), Path("/tmp")


@pytest.mark.parametrize(
    ("free", "chosen"),
    [({SHM: 2 << 30, TMP: 9 << 30}, SHM), ({SHM: 64 << 20, TMP: 9 << 30}, TMP), ({SHM: 64 << 20, TMP: 8 << 20}, SHM)],
)
def test_shared_memory_is_used_if_it_has_room(free: dict[Path, int], chosen: Path) -> None:
    """A container has 64 MiB of it by default, and jaxlib's client aborts its process when it cannot write there."""
    assert place_with_room([SHM, TMP], free) == chosen
