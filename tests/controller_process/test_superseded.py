"""Tests of a controller that learns that another one has taken over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.topology import Topology
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.process_state import ProcessState, ShellDump
from atoll.controller_process.shell import ControllerShell, ShellState, new_controller
from atoll.journal.successor import Successor
from atoll.leadership.election import Claim
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.leadership.lease_record import LeaseRecord, StoredRecord
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import listen
from atoll.wire.resumption.dialed_connection import DialedConnection
from tests.controller.play import ready
from tests.controller_process.test_resumption import SETTINGS, WELCOME, Peer, Process
from tests.leadership.lease_in_memory import Clock, LeaseInMemory
from tests.waiting import until_async


def claim_later_term(peer: Peer, term: int) -> None:
    """Let the peer report at its next resumption that it has seen a later term."""
    assert isinstance(peer.connection, DialedConnection)
    token = peer.connection.link.token
    assert token is not None
    peer.connection.link.receive(msgspec.structs.replace(token, term=term))
    peer.connection.drop("the test")


def test_a_controller_that_learns_of_a_later_term_ends_and_writes_nothing_any_more(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))

    async def main() -> None:
        process = Process(address)
        shell = process.shell
        del shell.controller.handle  # type: ignore[attr-defined]
        JournalRecovery(str(tmp_path / "journal"), restarts=False).begin(shell)
        await process.listen()
        peer = await Peer.open(address, "worker")
        peer.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        await until_async(lambda: peer.connection.can_resume)  # type: ignore[union-attr]
        claim_later_term(peer, 8)
        await asyncio.wait_for(process.stop.wait(), 10)
        assert (shell.state, shell.superseded_by) == (ShellState.SUPERSEDED, 8)
        segment = tmp_path / "journal" / "00000001.events"
        size = segment.stat().st_size
        late = await Peer.open(address, "proxy")
        await until_async(lambda: bool(late.lost))
        shell.stop()
        await asyncio.sleep(0.05)
        assert segment.stat().st_size == size
        process.server.close()
        peer.connection.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_controller_that_starts_after_two_takeovers_is_told_of_the_controller_that_serves(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))

    async def main() -> None:
        process = Process(address)
        del process.shell.controller.handle  # type: ignore[attr-defined]
        recovery = JournalRecovery(str(tmp_path / "journal"), restarts=False)
        recovery.begin(process.shell)
        dump = ShellDump(key=process.shell.resumable.key, earlier=(str(address), "unix:/second"))
        options = ControllerOptions("unix:/third", SETTINGS, 0, standby="unix:/second", directory=str(tmp_path))
        third = ControllerShell(options, ProcessState(new_controller(options), dump, 1000), asyncio.Event())
        third.resume(2000)
        await asyncio.sleep(0.5)  # nobody listens yet
        await process.listen()
        await asyncio.wait_for(process.stop.wait(), 10)
        assert (process.shell.state, process.shell.superseded_by) == (ShellState.SUPERSEDED, 2000)
        assert recovery.directory.successor() == Successor("unix:/third", 2000)
        third.stop()
        process.server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_client_that_claims_a_later_term_does_not_end_the_controller(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))

    async def main() -> None:
        process = Process(address)
        process.shell.start()
        await process.listen()
        worker = await Peer.open(address, "worker")
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        client = await Peer.open(address, "proxy")
        await client.next_of(WELCOME)
        claim_later_term(client, 8)
        assert isinstance(client.connection, DialedConnection)
        refused = process.unauthenticated.statistics().refused
        while process.unauthenticated.statistics().refused < refused + 2:  # its retries fail
            await asyncio.sleep(0.01)
        assert client.connection.is_away
        assert process.shell.state is ShellState.RUNNING
        other = await Peer.open(address, "proxy")
        await other.next_of(WELCOME)
        for peer in (worker, client, other):
            peer.connection.close()
        process.shell.stop()
        process.server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_controller_whose_lease_another_one_has_acquired_before_it_begins_ends(tmp_path: Path) -> None:
    async def main() -> None:
        store = LeaseInMemory()
        lease = LeaseKeeper(store, "one", Clock())
        lease.acquire(Claim())
        store.stored = StoredRecord(LeaseRecord("two", 1), "2")
        lease.step()
        assert lease.is_lost
        options = ControllerOptions(f"unix:{tmp_path / 'socket'}", SETTINGS, 0)
        stop = asyncio.Event()
        shell = ControllerShell(options, ProcessState(new_controller(options)), stop, lease=lease)
        await asyncio.wait_for(stop.wait(), 10)
        assert shell.superseded_by == 1000

    asyncio.run(main())


def test_a_peer_that_is_refused_at_the_moment_at_which_the_lease_is_held_again_gets_the_reason(tmp_path: Path) -> None:
    class HeldFromTheNextCall(LeaseKeeper):
        is_late = False

        def holds(self) -> bool:
            is_late, self.is_late = self.is_late, False
            return super().holds() and not is_late

    async def main() -> None:
        lease = HeldFromTheNextCall(LeaseInMemory(), "one", Clock())
        lease.acquire(Claim())
        address = Address(path=str(tmp_path / "socket"))
        options = ControllerOptions(str(address), SETTINGS, 0)
        shell = ControllerShell(options, ProcessState(new_controller(options)), asyncio.Event(), lease=lease)

        def accept() -> Connection:
            connection = shell.accept()
            on_first = connection._on_message

            def late(message: Any) -> None:
                lease.is_late = True
                on_first(message)

            connection._on_message = late
            return connection

        server, _ = await listen(address, accept)
        peer = await Peer.open(address, "proxy")
        refused = await peer.next_of(2)
        assert "does not hold the lease of a test" in refused[1][1]
        peer.connection.close()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 30))
