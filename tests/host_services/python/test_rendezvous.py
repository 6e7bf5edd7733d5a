"""Tests of the rendezvous of a session's Python processes, and of the keys that they cannot read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import Code, StatusError
from atoll.host_services.python import rendezvous
from atoll.host_services.python.python_options import ProcessWorld, PythonHost, python_options
from atoll.host_services.python.rendezvous import rendezvous_at_first_host
from atoll.protocol.messages.python_messages import ClientSettings
from atoll.wire.address import parse_address
from atoll.wire.sockets import bind

SETTINGS = ClientSettings()
DEVICES = [(0, 10), (1, 11), (0, 12)]


class Island:
    """Key-value store of an island, whose `get` does not wait."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str, seconds: float) -> str:
        if key not in self.values:
            raise OSError("the first host of the island does not say where to meet")
        return self.values[key]


def host(rank: int, data_address: str, island: Island, directory: Path) -> PythonHost:
    return PythonHost(
        4 + rank, rank, "tls://10.0.0.1:7000", data_address, str(directory), ("/run/join",), "127.0.0.1", island
    )


def test_on_several_machines_the_first_host_chooses_and_the_others_are_told(tmp_path: Path) -> None:
    island = Island()
    (first, choose), (second, ask) = (
        python_options(host(rank, "tls://127.0.0.1:7001", island, tmp_path), 3, SETTINGS, DEVICES) for rank in range(2)
    )
    assert (first.rank, second.rank) == (0, 1)
    assert first.devices == second.devices == ((10, 12), (11,))
    with pytest.raises(OSError, match="does not say where to meet"):
        ask()
    assert choose() == ask()
    assert parse_address(ask()).host == "127.0.0.1"


def test_sessions_meet_apart(tmp_path: Path) -> None:
    island = Island()
    meetings = [
        python_options(host(0, "tls://127.0.0.1:7001", island, tmp_path), session, SETTINGS, DEVICES)[1]
        for session in (3, 4)
    ]
    assert len({meet() for meet in meetings}) == 2


def test_on_one_machine_they_meet_in_the_directory_of_the_session(tmp_path: Path) -> None:
    meetings = [
        python_options(host(rank, f"unix:{tmp_path}/data", Island(), tmp_path), 3, SETTINGS, DEVICES)[1]
        for rank in range(2)
    ]
    assert {meet() for meet in meetings} == {f"unix:{tmp_path}/python-3/meet"}


class Worlds:
    """Worlds of a host. World 7 was closed, and the others have a store each."""

    hostname = "127.0.0.1"

    def __init__(self, stores: dict[int, Island]) -> None:
        self._stores = stores

    def key_values(self, world: int) -> Island:
        if world == 7:
            raise StatusError(Code.FAILED_PRECONDITION, "the hosts have lost one another")
        return self._stores.setdefault(world, Island())


def in_world(island_rank: int, first_rank: int, directory: Path, stores: dict[int, Island], data: str) -> PythonHost:
    return PythonHost(first_rank + island_rank, island_rank, "unix:/c", data, str(directory), worlds=Worlds(stores))


def test_hosts_of_several_islands_meet_at_the_first_host_of_their_world(tmp_path: Path) -> None:
    stores: dict[int, Island] = {}
    devices = [(0, 10), (1, 11), (2, 12)]
    world = ProcessWorld(5, 1)
    first = in_world(0, 0, tmp_path, stores, "tls://127.0.0.1:7001")
    last = in_world(1, 1, tmp_path, stores, "tls://127.0.0.1:7001")
    (_, choose), (options, ask) = (
        python_options(first, 3, SETTINGS, devices, world=ProcessWorld(5, 0)),
        python_options(last, 3, SETTINGS, devices, world=world),
    )
    assert (options.rank, options.devices, options.hostname) == (2, ((10,), (11,), (12,)), "127.0.0.1")
    assert choose() == ask()
    assert list(stores) == [5]
    world.number = 6  # another world has replaced it
    with pytest.raises(OSError, match="does not say where to meet"):
        ask()
    world.number = 7
    with pytest.raises(StatusError, match="lost one another"):
        ask()


def test_processes_of_an_island_and_of_its_worlds_have_directories_of_their_own(tmp_path: Path) -> None:
    host = in_world(0, 0, tmp_path, {}, f"unix:{tmp_path}/data")
    alone, _ = python_options(host, 3, SETTINGS, [(0, 10)])
    together, meet = python_options(host, 3, SETTINGS, [(0, 10), (1, 11)], world=ProcessWorld(5, 0))
    assert alone.sandbox.scratch == f"{tmp_path}/python-3/host-0"
    assert together.sandbox.scratch == f"{tmp_path}/python-3-5/host-0"
    assert meet() == f"unix:{tmp_path}/python-3-5/meet"


def test_one_process_meets_nobody(tmp_path: Path) -> None:
    _, meet = python_options(host(0, "tls://127.0.0.1:7001", Island(), tmp_path), 3, SETTINGS, [(0, 10)])
    assert meet() == ""


def test_secrets_and_sockets_of_the_cluster_are_hidden(tmp_path: Path) -> None:
    private = tmp_path / "cluster"
    private.mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    options, _ = python_options(host(0, f"unix:{private}/data", Island(), private), 3, SETTINGS, [(0, 10)])
    assert set(options.sandbox.hidden) == {str(private), "/run/join"}
    options, _ = python_options(host(0, f"unix:{tmp_path}/data", Island(), private), 3, SETTINGS, [(0, 10)])
    assert set(options.sandbox.hidden) == {str(private), "/run/join", f"{tmp_path}/data"}


@pytest.fixture
def taken() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def test_the_port_is_kept_unless_somebody_else_has_it(
    monkeypatch: pytest.MonkeyPatch, taken: list[socket.socket]
) -> None:
    monkeypatch.setattr(rendezvous, "_FREE_SECONDS", 0.1)
    island = Island()
    meet = rendezvous_at_first_host(1, True, "127.0.0.1", lambda: island)
    before = meet()
    assert meet() == before
    taken.append(bind(parse_address(before)))
    after = meet()
    assert after != before
    assert rendezvous_at_first_host(1, False, "127.0.0.2", lambda: island)() == after
