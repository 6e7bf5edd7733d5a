"""Clusters that continue one another, for tests of what outlives a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.end_to_end.standing_cluster import StandingCluster
from tests.scripts import script_environment


class ConsecutiveClusters:
    """Consecutive clusters with the same journal, address and directory for files. `now` is the last one."""

    def __init__(self, directory: Path, program_cache: Path, **settings: Any) -> None:
        self.files = directory / "files"
        directory.mkdir(mode=0o700)
        self._start = partial(
            StandingCluster,
            directory,
            script_environment(directory, program_cache),
            islands="2x1x2",
            suspend_directory=str(self.files),
            journal=str(directory / "journal"),
            **settings,
        )
        self.now = self._start()

    def start_next(self, **settings: Any) -> None:
        self.now = self._start(**settings)
