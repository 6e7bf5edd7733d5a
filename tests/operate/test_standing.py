"""Tests of the end of a cluster: what is examined, removed and reported."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from atoll.errors import ClusterError, ConnectError
from atoll.operate import standing
from atoll.operate.cluster_queries import Target
from atoll.operate.cluster_registry import ClusterRecord, ClusterRegistry
from atoll.operate.standing import Ended, stop
from atoll.protocol.messages import StopReply
from atoll.wire.address import parse_address
from tests.file_limits import no_more_files


@pytest.fixture
def on_ray(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRecord:
    """Register a cluster on a Ray cluster that cannot be reached."""

    def fail(ray_address: str, name: str) -> NoReturn:
        raise ClusterError("there is no Ray cluster")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    monkeypatch.setattr(standing, "end_cluster", fail)
    registry = ClusterRegistry()
    registry.directory("far").mkdir()
    with registry.locked(), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        return registry.register("far", address, "1x1x1", "cpu", os.getpid(), ray="auto")


def test_the_sessions_that_stay_are_named_with_how_they_go_on() -> None:
    reply = StopReply(((3, "session 3 (train.py)"), (7, "session 7 (41)")), 86_400.0)
    assert Ended(5, reply=reply).persisted == [
        "suspended on disk, 24 h at most: session 3 (train.py), session 7 (41)",
        "  to resume: `atoll up` with the same --journal, then `atoll resume 3` and `atoll resume 7`",
        "  to end them: `atoll up` with the same --journal, then `atoll down --all`",
    ]
    assert Ended(5).persisted == []


def test_a_cluster_on_ray_is_removed_if_neither_its_controller_nor_ray_is_there(on_ray: ClusterRecord) -> None:
    address = parse_address(on_ray.address)
    with socket.create_server((address.host, address.port)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()  # as one that restarts
        with pytest.raises(ClusterError, match="there is no Ray cluster"):
            stop(Target(address, on_ray), "")
        assert Path(on_ray.directory).exists()
    assert stop(Target(address, on_ray), "") == Ended(-1, controller_replied=False)
    assert not Path(on_ray.directory).exists()


def test_a_new_cluster_may_have_the_name_of_one_on_the_same_ray(on_ray: ClusterRecord) -> None:
    registry = ClusterRegistry()
    standing.check_is_free(registry, "far", on_ray="auto")
    for where in ("", "10.0.0.1:6379"):
        with pytest.raises(ClusterError, match="a cluster named far is up already"):
            standing.check_is_free(registry, "far", on_ray=where)


def test_a_command_that_cannot_open_a_socket_does_not_say_that_a_cluster_has_ended() -> None:
    address = parse_address("unix:/nowhere/controller.sock")
    assert not standing.listens(address)
    with no_more_files(), pytest.raises(ConnectError, match="Too many open files"):
        standing.listens(address)


def test_the_error_for_a_name_that_is_taken_ends_the_cluster_with_that_name(on_ray: ClusterRecord) -> None:
    with pytest.raises(ClusterError, match=r"use it with ATOLL_ADDRESS=far, end it with `atoll down --name far`, or"):
        standing.check_is_free(ClusterRegistry(), "far")
