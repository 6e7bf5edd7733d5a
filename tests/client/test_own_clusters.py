"""Tests that a script that starts an embedded cluster prints the address of the user's standing cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.client import processes
from atoll.cluster.settings import DEFAULT_ISLANDS
from atoll.operate.cluster_registry import ClusterRegistry


@pytest.fixture
def standing(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a standing cluster. This process acts as its engine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    registry = ClusterRegistry()
    registry.directory("lab").mkdir(mode=0o700)
    with registry.locked():
        return registry.register("lab", "tls://10.77.0.1:7000", "1x2x4", "cpu", os.getpid()).address


def test_a_script_on_a_cluster_of_its_own_is_told_of_the_standing_one(
    standing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.note_standing_clusters(DEFAULT_ISLANDS)
    output = capsys.readouterr().err
    assert "although cluster lab is up" in output
    assert f"ATOLL_ADDRESS={standing};" in output


def test_a_script_that_has_chosen_its_islands_is_told_nothing(
    standing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.note_standing_clusters("2x1x4")
    monkeypatch.setenv("ATOLL_ISLANDS", DEFAULT_ISLANDS)
    processes.note_standing_clusters(DEFAULT_ISLANDS)
    assert capsys.readouterr().err == ""


def test_without_a_standing_cluster_nothing_is_said_or_made(
    short_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    processes.note_standing_clusters(DEFAULT_ISLANDS)
    assert capsys.readouterr().err == ""
    assert list(short_directory.iterdir()) == []


def test_an_address_that_hides_a_join_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_ADDRESS", "unix:/gone")
    monkeypatch.setenv("ATOLL_JOIN", "join")
    assert "ATOLL_JOIN is not used" in str(processes.proxy_error("UnreachableError", "nobody", "unix:/gone"))
    monkeypatch.delenv("ATOLL_JOIN")
    assert "unset ATOLL_ADDRESS" in str(processes.proxy_error("UnreachableError", "nobody", "unix:/gone"))


def test_an_address_that_nobody_answers_is_explained_by_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_ADDRESS", raising=False)
    monkeypatch.setenv("ATOLL_JOIN", "join")
    of_token = str(processes.proxy_error("UnreachableError", "nobody", "tls://one:7000"))
    assert "join token of ATOLL_JOIN" in of_token
    assert "ATOLL_ADDRESS" not in of_token
    monkeypatch.delenv("ATOLL_JOIN")
    of_argument = str(processes.proxy_error("UnreachableError", "nobody", "unix:/gone"))
    assert "start a cluster with `atoll up`" in of_argument
    assert "unset" not in of_argument
