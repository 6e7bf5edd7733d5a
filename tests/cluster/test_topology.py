"""Tests of topologies: their text form, and the numbers of hosts and devices."""

from __future__ import annotations

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import IslandShape, RankSlot, Topology
from atoll.errors import SettingsError


@pytest.mark.parametrize("text", ["1x1x8", "2x1x4", "1x2x4+1x1x8", "3x2x1+1x1x1+2x4x4"])
def test_a_topology_is_written_as_it_is_read(text: str) -> None:
    assert str(Topology.parse(text)) == text


@pytest.mark.parametrize("text", ["", "1x1", "1x1x0", "1x1x8+", "1x1xa", "1x1x8,1x1x4", "-1x1x1"])
def test_what_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"1x2x4\+1x1x8"):
        _ = ClusterSettings(text).topology


@pytest.mark.parametrize("text", ["65537x1x1", "65536x1x1+1x1x1", "1x65537x1", "1x1x65537", "9" * 5000 + "x1x1"])
def test_what_is_too_large_is_refused_before_it_is_built(text: str) -> None:
    with pytest.raises(SettingsError, match="one to 65536"):
        _ = ClusterSettings(text).topology


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000x1000x1", "one to 65536 hosts, not 1000000"), ("1000x2x1000", "one to 1048576 devices, not 2000000")],
)
def test_a_cluster_has_a_bound_for_all_its_hosts_and_devices(text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        _ = ClusterSettings(text).topology


def test_numbers_may_begin_with_zeros() -> None:
    assert str(Topology.parse("0002x01x" + "0" * 5000 + "4")) == "2x1x4"


def test_hosts_and_devices_count_through_islands_that_differ() -> None:
    topology = Topology.parse("1x2x3+2x1x4")
    assert (topology.islands, topology.host_count) == (3, 4)
    assert [list(topology.hosts_of(island)) for island in range(3)] == [[0, 1], [2], [3]]
    assert [topology.island_of(host) for host in range(4)] == [0, 0, 1, 2]
    assert [topology.number_of(host, 1) for host in range(4)] == [1, 4, 7, 11]
    more = topology.with_island(IslandShape(2, 2))
    assert [more.number_of(host, 0) for host in (3, 4, 5)] == [10, 14, 16]


@pytest.mark.parametrize("host", [-1, 4, 100])
def test_a_host_that_is_none_is_of_no_island(host: int) -> None:
    topology = Topology.parse("1x2x3+2x1x4")
    assert topology.island_of(host) not in range(topology.islands)


@pytest.mark.parametrize(
    ("rank_slot", "fits"),
    [
        (RankSlot(), True),
        (RankSlot(1), True),
        (RankSlot(0), False),
        (RankSlot(1, 1), True),
        (RankSlot(1, 0), False),
        (RankSlot(rank=4), True),
        (RankSlot(rank=1), False),
    ],
)
def test_a_rank_slot_counts_within_an_island_or_through_the_cluster(rank_slot: RankSlot, fits: bool) -> None:
    # Host 4 is host 1 of island 1, after an island of three hosts.
    assert rank_slot.fits(1, 4, 3) is fits


def test_a_mesh_that_an_island_cannot_have_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"an island of 1x8 .* cannot form a mesh of 4x4"):
        _ = ClusterSettings("1x2x8+1x1x8", mesh="4x4").topology
