"""Tests of how commands connect to a cluster, and of the join tokens that they write."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.errors import AccessError, AddressError
from atoll.operate.cluster_registry import ClusterRecord
from atoll.operate.joining import is_at, join_token_with, reach
from atoll.security.join_token import JoinToken, join_file
from atoll.wire.address import parse_address

ADVERTISED = JoinToken(parse_address("head:7000").secured(), "0" * 64, "cluster")


def test_a_tenants_join_token_has_the_advertised_address_of_the_cluster(tmp_path: Path) -> None:
    ADVERTISED.save(join_file(tmp_path))
    record = ClusterRecord("lab", "tls://0.0.0.0:7000", "1x1x1", "cpu", str(tmp_path), 1, 1)
    in_use = replace(ADVERTISED, address=parse_address(record.address))
    assert join_token_with("tenant", record, in_use) == replace(ADVERTISED, token="tenant")


def test_elsewhere_a_tenants_join_token_has_the_address_of_the_join_token_in_use() -> None:
    assert join_token_with("tenant", None, ADVERTISED) == replace(ADVERTISED, token="tenant")


def test_a_cluster_without_tls_has_no_join_tokens() -> None:
    assert join_token_with("tenant", None, None) is None


def test_a_cluster_is_at_the_addresses_that_it_listens_at_and_that_it_advertises(tmp_path: Path) -> None:
    record = ClusterRecord(
        "lab", "tls://0.0.0.0:7000", "1x1x1", "cpu", str(tmp_path), 1, 1, advertised="tls://head:7000"
    )
    for address in ("tls://0.0.0.0:7000", "127.0.0.1:7000", "tls://head:7000", "head:7000", "other:1,head:7000"):
        assert is_at(record, parse_address(address))
    for address in ("head:7001", "other:7000", "unix:/head"):
        assert not is_at(record, parse_address(address))
    assert record.reached_at == "tls://head:7000"
    several = replace(parse_address("head:7000"), others=(parse_address("tail:7000"),))
    record = ClusterRecord("lab", "0.0.0.0:7000", "1x1x1", "cpu", str(tmp_path), 1, 1, advertised=str(several))
    assert is_at(record, parse_address("tail:7000"))


def test_the_name_of_a_cluster_is_an_address_of_it(tmp_path: Path) -> None:
    ADVERTISED.save(join_file(tmp_path))
    records = [
        ClusterRecord("default", "unix:/run/controller.sock", "1x1x1", "cpu", "/run", 1, 1),
        ClusterRecord("lab", "tls://127.0.0.1:7000", "1x1x1", "cpu", str(tmp_path), 1, 1),
    ]
    assert str(reach("default", records=records).address) == "unix:/run/controller.sock"
    found = reach("lab", records=records)
    assert str(found.address) == "tls://127.0.0.1:7000"
    assert found.join == replace(ADVERTISED, address=found.address)
    with pytest.raises(AddressError, match=r"no cluster of yours with the name 'far' .*\(up: default, lab\)"):
        reach("far", records=records)


def test_a_cluster_that_has_not_written_its_join_token_yet_is_said_to_start(tmp_path: Path) -> None:
    records = [ClusterRecord("lab", "tls://127.0.0.1:7000", "1x1x1", "cpu", str(tmp_path), 1, 1)]
    with pytest.raises(AccessError, match=r"cluster lab starts or ends now, .*/join does not exist: try again"):
        reach("lab", records=records)
