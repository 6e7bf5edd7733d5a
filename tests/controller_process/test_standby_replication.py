"""A snapshot on its way to a standby: what is queued for it is bounded, and what is damaged does not arrive whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec

from atoll._version import __version__
from atoll.controller_process import standby_replication
from atoll.controller_process.standby_replication import StandbyReplication
from atoll.journal import files
from atoll.journal.files import Directory
from atoll.journal.journal import Journal
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import SnapshotChunk
from atoll.security.tokens import Tokens
from atoll.wire.framing import HEADER_BYTES
from atoll.wire.resumption.link_messages import Acknowledge

PART = 1 << 10
# Of a controller without peers.
CONTROLLER: Any = SimpleNamespace(tokens=Tokens(), connections=SimpleNamespace(deciders=()))
CONNECTIONS: Any = SimpleNamespace(all=tuple)


class Standby:
    """The controller's connection to one that reads when it is told to."""

    def __init__(self) -> None:
        self.queued: list[SnapshotChunk] = []
        self.taken: list[SnapshotChunk] = []
        self.most = 0
        self.is_aborted = False

    def send_in_pieces(self, frame: bytes) -> None:
        self.queued.append(msgspec.msgpack.decode(frame[HEADER_BYTES:], type=SnapshotChunk))
        self.most = max(self.most, self._unsent())

    def statistics(self) -> Any:
        return SimpleNamespace(unsent_bytes=self._unsent())

    def _unsent(self) -> int:
        return sum(len(each.content) for each in self.queued)

    def take(self) -> None:
        self.taken += self.queued
        self.queued = []

    def abort(self) -> None:
        self.is_aborted = True


def follow(
    path: Path, payload: bytes, scene: Callable[[StandbyReplication, Standby, Journal], Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", PART)
    monkeypatch.setattr(standby_replication, "MOST_QUEUED", 8 * PART)
    monkeypatch.setattr(standby_replication, "_FULL_SECONDS", 0.001)

    async def main() -> None:
        directory = Directory(path)
        directory.write_snapshot(1, 5, payload)
        journal = Journal(directory, 5, 1, dict)
        made = StandbyReplication(CONTROLLER, lambda: journal, lambda what: None, lambda addresses: None, CONNECTIONS)
        standby: Any = Standby()
        made._standby, made._snapshot_number = standby, 1
        await asyncio.wait_for(scene(made, standby, journal), 10)

    asyncio.run(main())


def test_little_of_a_snapshot_is_in_memory_however_slowly_it_is_read(tmp_path, monkeypatch):
    payload = bytes(i % 251 for i in range(100 * PART + 7))

    async def scene(made: StandbyReplication, standby: Any, journal: Journal) -> None:
        assert made._begin_snapshot(standby, journal)
        await asyncio.sleep(0.05)
        assert standby.most == 8 * PART, "it reads nothing"
        while not standby.taken or not standby.taken[-1].is_last:
            standby.take()
            await asyncio.sleep(0.001)
        assert standby.most <= 8 * PART
        assert b"".join(each.content for each in standby.taken) == payload
        assert [each.is_last for each in standby.taken].count(True) == 1
        assert {each.term for each in standby.taken} == {5}

    follow(tmp_path / "journal", payload, scene, monkeypatch)


def test_the_controller_has_other_things_to_do_between_two_parts(tmp_path, monkeypatch):
    async def scene(made: StandbyReplication, standby: Any, journal: Journal) -> None:
        made._begin_snapshot(standby, journal)
        parts = []
        for _ in range(4):
            parts.append(len(standby.queued))
            await asyncio.sleep(0)
        assert parts[-1] < 4
        assert parts == sorted(parts)

    follow(tmp_path / "journal", bytes(20 * PART), scene, monkeypatch)


def test_a_snapshot_that_is_damaged_on_the_disk_does_not_arrive_whole(tmp_path, monkeypatch):
    async def scene(made: StandbyReplication, standby: Any, journal: Journal) -> None:
        path = journal._directory.snapshot(1)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        assert made._begin_snapshot(standby, journal)
        while not standby.is_aborted:
            standby.take()
            await asyncio.sleep(0.001)
        assert not any(each.is_last for each in standby.taken)

    follow(tmp_path / "journal", bytes(4 * PART), scene, monkeypatch)


def test_one_that_is_not_there_yet_is_waited_for_while_it_is_written(tmp_path, monkeypatch):
    async def scene(made: StandbyReplication, standby: Any, journal: Journal) -> None:
        made._snapshot_number = 2
        assert not made._begin_snapshot(standby, journal)
        journal._child = 1
        assert made._begin_snapshot(standby, journal)
        assert standby.queued == []

    follow(tmp_path / "journal", b"x", scene, monkeypatch)


def test_peers_know_of_a_lost_standby_for_as_long_as_it_may_have_taken_over(monkeypatch: Any) -> None:
    monkeypatch.setattr(standby_replication, "_SUSPICION_SECONDS", 0.2)
    told: list[tuple[str, ...]] = []

    async def main() -> None:
        made = StandbyReplication(CONTROLLER, lambda: None, lambda what: None, told.append, CONNECTIONS)
        hello = m.Hello(m.PROTOCOL, "standby", "", 1, __version__, "tls://there:1")
        monkeypatch.setattr(made, "_refusal", lambda connection, hello: None)
        connection = Mock()
        made.serve(connection, hello)
        made._rely_on(connection)
        made._rely_on(connection)
        assert told == [("tls://there:1",)]
        _, on_lost, _ = connection.set_handlers.call_args.args
        on_lost("it was frozen")
        assert made.takeover_suspicion()
        await asyncio.sleep(0)
        assert told == [("tls://there:1",)]
        await asyncio.sleep(0.3)
        assert told == [("tls://there:1",), ()]
        assert not made.takeover_suspicion()

    asyncio.run(main())


def test_a_standby_that_is_behind_is_relied_on_by_nobody_and_may_catch_up(monkeypatch: Any) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(standby_replication, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(standby_replication, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(standby_replication, "LEASE_SECONDS", 0.2)

    async def main() -> None:
        made = StandbyReplication(CONTROLLER, lambda: None, lambda what: None, told.append, CONNECTIONS)
        monkeypatch.setattr(made, "_refusal", lambda connection, hello: None)
        connection = Mock()
        made.serve(connection, m.Hello(m.PROTOCOL, "standby", "", 1, __version__, "tls://there:1"))
        await asyncio.sleep(0.3)
        _, _, on_link = connection.set_handlers.call_args.args
        on_link(Acknowledge(1, 0))  # it stands by, and is busy with what came meanwhile
        await asyncio.sleep(0.3)
        assert not connection.abort.called
        assert told == []
        on_link(Acknowledge(2, len(made._heartbeats) + 1))
        await asyncio.sleep(0.15)
        assert told == [("tls://there:1",)]
        assert made._is_followed

    asyncio.run(main())
