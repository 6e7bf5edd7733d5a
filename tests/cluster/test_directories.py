"""Tests of the directories in which a user's processes find each other."""

from __future__ import annotations

import errno
import os
import pwd
import sys
import tempfile
from pathlib import Path

import pytest

from atoll.cluster.directories import (
    default_cache_directory,
    key_file,
    logs_directory,
    make_directory,
    registry_directory,
    remove_tree,
    sockets_bases,
)
from atoll.cluster.tenant_settings import read_tenants
from atoll.errors import AccessError, ClusterError, SettingsError
from atoll.operate.cluster_registry import embedded_clusters, register_embedded
from atoll.security.join_token import read_join


@pytest.fixture(autouse=True)
def no_runtime_directory(monkeypatch: pytest.MonkeyPatch, short_directory: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(short_directory))


def test_clusters_are_found_while_the_disk_of_the_temporary_directory_is_full(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")  # tempfile's choice in this case
    assert sockets_bases() == (short_directory, Path("/var/tmp"))
    assert registry_directory() == short_directory / f"atoll-{os.getuid()}"


def test_a_cluster_that_starts_while_that_disk_is_full_has_its_sockets_elsewhere_and_is_found(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    elsewhere = short_directory / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    directory = make_directory("proxy")
    assert directory.parent == elsewhere
    register_embedded(directory, "unix:/p", "1x1x1", "cpu", os.getpid(), "atoll proxy")
    assert str(directory) in [each.directory for each in embedded_clusters()]


def test_without_space_anywhere_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    def full(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ClusterError, match=r"No space left on device. Free space, or set XDG_RUNTIME_DIR"):
        make_directory("client")


def test_a_temporary_directory_that_does_not_exist_is_left_out(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_directory / "none"))
    monkeypatch.setenv("TEMP", str(short_directory))
    assert sockets_bases()[0] == short_directory


def test_the_runtime_directory_comes_first(monkeypatch: pytest.MonkeyPatch, short_directory: Path) -> None:
    runtime = short_directory / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert sockets_bases() == (runtime,)
    assert make_directory("client").parent == runtime
    assert registry_directory() == runtime / "atoll"


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_directory_whose_path_is_too_long_for_sockets_is_not_used(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path, variable: str
) -> None:
    monkeypatch.setenv("TEMP", str(short_directory))
    long = short_directory / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv(variable, str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)  # found again
    directory = make_directory("client")
    assert directory.parent == short_directory
    assert short_directory in sockets_bases()
    assert registry_directory() == short_directory / f"atoll-{os.getuid()}"


def test_a_user_without_a_home_directory_gets_paths_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "ATOLL_CACHE_DIR", "ATOLL_STATE_DIR", "ATOLL_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache_directory() == "/nonexistent/.cache/atoll/programs"
    assert key_file() == "/nonexistent/.local/state/atoll/key"
    assert logs_directory() == Path("/nonexistent/.local/state/atoll/logs")
    with pytest.raises(SettingsError, match=r"~/tenants\.toml"):
        read_tenants("~/tenants.toml")
    with pytest.raises(AccessError, match="~/join"):
        read_join("~/join")


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(top)
    assert not top.exists()
    remove_tree(top)
