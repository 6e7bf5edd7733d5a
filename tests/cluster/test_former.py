"""A cluster that is to go on with the suspended sessions of another has the same islands."""

from __future__ import annotations

import pytest

from atoll.cluster.former import FormerCluster
from atoll.cluster.settings import ClusterSettings
from atoll.errors import SettingsError


def former(islands: str, *sessions: int) -> FormerCluster:
    return FormerCluster(ClusterSettings(islands).topology.shapes, sessions)


def test_the_same_islands_and_more_will_do():
    former("2x1x2", 3).check(ClusterSettings("2x1x2"), "there")
    former("2x1x2", 3).check(ClusterSettings("2x1x2+1x1x8"), "there")


def test_others_are_refused_with_what_to_do():
    for islands, text in (("1x1x2", "would not exist"), ("2x1x4", "would have 1 host with 4 cpu devices")):
        with pytest.raises(SettingsError, match=text) as caught:
            former("2x1x2", 3, 7).check(ClusterSettings(islands), "/journal/suspended")
        assert "suspended sessions 3, 7 are kept in /journal/suspended" in str(caught.value)
        assert "Start the same islands to go on, or remove /journal/suspended" in str(caught.value)
