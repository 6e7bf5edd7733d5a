"""Stock results, kept between runs: they change only with JAX, the test file or the settings."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .environments import Environment
from .projects import TestFile
from .results import WHOLE, FileResults, Sample

FORMAT = 1  # of the stored results; part of the key


class Baseline(msgspec.Struct, frozen=True):
    """The stock results of one file, with what they hold for."""

    origin: str
    settings: dict[str, str]
    results: FileResults


def part_of(whole: FileResults, sample: Sample) -> FileResults:
    """The results of a sample, taken from those of the whole file."""
    tests = dict(list(whole.tests.items())[sample.first :: sample.every])
    return FileResults(tests, sum(each.seconds for each in tests.values()), whole.processes, whole.troubles)


class BaselineCache:
    """A directory of stock results. Two runs may share it: files are replaced whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "stock"

    def get(self, file: TestFile, environment: Environment, sample: Sample = WHOLE) -> FileResults | None:
        """The stored results of the file or of the sample, which may be taken from those of the whole file."""
        try:
            stored = self._path(file, environment, sample).read_bytes()
        except FileNotFoundError:
            whole = self.get(file, environment) if sample.every > 1 else None
            return None if whole is None else part_of(whole, sample)
        return msgspec.json.decode(stored, type=Baseline).results

    def get_or_run(
        self,
        file: TestFile,
        environment: Environment,
        run: Callable[[], FileResults],
        *,
        sample: Sample = WHOLE,
        refresh: bool = False,
    ) -> FileResults:
        """The stored results, or those of `run()`, which are then stored. `refresh` runs in any case. Samples are
        stored apart from the results of the whole file.

        Results without any test are not stored: the next run, in a repaired environment, must try again.
        """
        if not refresh and (stored := self.get(file, environment, sample)) is not None:
            return stored
        results = run()
        if not results.tests:
            return results
        path = self._path(file, environment, sample)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}")
        whole.write_bytes(
            msgspec.json.format(
                msgspec.json.encode(Baseline(file.origin, dict(environment.settings), results)), indent=1
            )
        )
        whole.replace(path)
        return results

    def _path(self, file: TestFile, environment: Environment, sample: Sample) -> Path:
        key: dict[str, Any] = {
            "format": FORMAT,
            "file": hashlib.sha256(file.path.read_bytes()).hexdigest(),
            "origin": file.origin,
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "settings": dict(environment.settings),
        }
        if sample.every > 1:
            key["every"] = sample.every
        if sample.first:
            key["first"] = sample.first
        digest = hashlib.sha256(msgspec.json.encode(key, order="deterministic")).hexdigest()
        return self._directory / f"{file.name.replace('/', '.')}-{digest[:16]}.json"
