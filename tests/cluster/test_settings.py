"""What a cluster is like, as the environment says it."""

from __future__ import annotations

import pytest

from atoll.cluster.settings import VARIABLES, ClusterSettings, Dispatch
from atoll.errors import ClusterError


@pytest.fixture(autouse=True)
def _nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ClusterSettings()),
        (dict.fromkeys(VARIABLES.values(), ""), ClusterSettings()),
        ({"ATOLL_ISLANDS": "2x1x4"}, ClusterSettings(islands="2x1x4")),
        ({"ATOLL_PLATFORM": "cuda"}, ClusterSettings(platform="cuda")),
        ({"ATOLL_DEVICE_MEMORY": "16GiB"}, ClusterSettings(device_memory=16 << 30)),
        ({"ATOLL_TOPOLOGY": "2x4"}, ClusterSettings(mesh="2x4")),
        ({"ATOLL_POLICY": "lifo"}, ClusterSettings(policy="lifo")),
        ({"ATOLL_DISPATCH": "sequential"}, ClusterSettings(dispatch=Dispatch.SEQUENTIAL)),
    ],
)
def test_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: ClusterSettings
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert ClusterSettings.from_environment() == expected


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("ATOLL_DEVICE_MEMORY", "much", "ATOLL_DEVICE_MEMORY: 'much' is not an amount of memory"),
        ("ATOLL_DISPATCH", "serial", "ATOLL_DISPATCH is 'serial': expected parallel or sequential"),
    ],
)
def test_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ClusterError, match=error):
        ClusterSettings.from_environment()
