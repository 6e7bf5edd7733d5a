"""Tests of the file with a cluster's certificate authority and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import AccessError
from atoll.security.start_security import kept_environment


def test_the_next_cluster_has_the_same_authority_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "authority"
    first = kept_environment(file)
    assert kept_environment(file) == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_environment(tmp_path / "another") != first


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "authority"
    kept_environment(file)
    file.chmod(0o640)
    with pytest.raises(AccessError, match=f"other users can read or write {file}.*chmod 600"):
        kept_environment(file)


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "authority"
    file.write_text("my diary")
    file.chmod(0o600)
    with pytest.raises(AccessError, match=f"{file} was not written by `atoll up --authority`"):
        kept_environment(file)
    assert file.read_text() == "my diary"


def test_a_standby_creates_no_file_but_names_the_missing_one(tmp_path: Path) -> None:
    file = tmp_path / "authority"
    with pytest.raises(AccessError, match=f"{file} does not exist: copy the controller's --authority file"):
        kept_environment(file, must_exist=True)
    assert not file.exists()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"cannot keep the cluster's CA in .*: No such file"):
        kept_environment(tmp_path / "no" / "authority")
