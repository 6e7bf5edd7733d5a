"""A cluster that is to go on with the suspended sessions of another has the same islands."""

from __future__ import annotations

import pytest

from atoll.cluster.persisted_cluster import PersistedCluster
from atoll.cluster.settings import ClusterSettings
from atoll.errors import SettingsError


def cluster(islands: str, *sessions: int) -> PersistedCluster:
    return PersistedCluster(ClusterSettings(islands).topology.shapes, sessions)


def test_the_same_islands_and_more_will_do():
    cluster("2x1x2", 3).check(ClusterSettings("2x1x2"), "there")
    cluster("2x1x2", 3).check(ClusterSettings("2x1x2+1x1x8"), "there")


def test_others_are_refused_with_what_to_do():
    for islands, text in (("1x1x2", "would not exist"), ("2x1x4", "would have 1 host with 4 cpu devices")):
        with pytest.raises(SettingsError, match=text) as caught:
            cluster("2x1x2", 3, 7).check(ClusterSettings(islands), "/journal/suspended")
        assert "suspended sessions 3, 7 are persisted in /journal/suspended" in str(caught.value)
        assert "Start the same islands to restore them, or remove /journal/suspended" in str(caught.value)
