"""The directories in which a user's processes find each other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from atoll.cluster.directories import registry_directory, sockets_base


@pytest.fixture(autouse=True)
def no_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_clusters_are_found_while_the_disk_of_the_temporary_directory_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")  # what tempfile chooses then
    assert sockets_base() == tmp_path
    assert registry_directory() == tmp_path / f"atoll-{os.getuid()}"


def test_a_temporary_directory_that_does_not_exist_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setenv("TEMP", str(tmp_path))
    assert sockets_base() == tmp_path


def test_the_runtime_directory_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert sockets_base() == runtime
    assert registry_directory() == runtime / "atoll"
