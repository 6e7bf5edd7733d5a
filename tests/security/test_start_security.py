"""Tests of the file with a cluster's certificate authority and tokens."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from atoll.cluster.environment_variables import JOIN
from atoll.errors import AccessError
from atoll.security.join_token import host_join_file, join_file, read_join
from atoll.security.start_security import kept_environment, start_security
from atoll.wire.address import parse_address


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


@pytest.mark.parametrize(
    ("standby", "addresses"),
    [("", "tls://two:7000"), ("one:7000", "tls://two:7000,one:7000"), ("one:7000,two:7000", "tls://two:7000,one:7000")],
)
def test_the_join_tokens_of_a_standby_also_lead_to_its_controller(tmp_path: Path, standby: str, addresses: str) -> None:
    with mock.patch.dict(os.environ):
        start_security(str(tmp_path), parse_address("tls://0.0.0.0:7000"), "two", has_agents=True, standby=standby)
        for file in (join_file(tmp_path), host_join_file(tmp_path)):
            assert str(read_join(str(file)).address) == addresses
        assert str(read_join(os.environ[JOIN.variable]).address) == "tls://two:7000"  # its processes need no other one
