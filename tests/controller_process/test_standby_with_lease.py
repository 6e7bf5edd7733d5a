"""Tests of a controller and its standby with an external lease, in one process: which peers each one serves, and which
one ends.

The lease's server is in memory, and its clock is simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.controller_process import takeover
from atoll.controller_process.shell import ShellTimes
from atoll.controller_process.standby_status import StandbyState, standby_status
from atoll.errors import LeaseError
from atoll.leadership.election import Claim
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.leadership.lease_record import LEASE_SECONDS, RENEW_SECONDS, LeaseRecord, StoredRecord
from atoll.operate.operator_requests import request_operation
from atoll.protocol import messages as m
from atoll.wire.address import Address
from atoll.wire.endpoints import connect
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from tests.controller_process.test_standby import READY, Pair, Peer, asked
from tests.leadership.lease_in_memory import Clock, LeaseInMemory
from tests.waiting import until_async

REFUSED, WELCOME, STATUS, AGENT_SAYS = 2, 60, 82, 110


class CutStore:
    """Lease in memory that one process may not be able to reach."""

    def __init__(self, store: LeaseInMemory) -> None:
        self._store = store
        self.name = store.name
        self.is_cut = False
        self.is_read_only = False

    def read(self) -> StoredRecord | None:
        self._check()
        return self._store.read()

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        self._check()
        if self.is_read_only:
            raise LeaseError("no reply")
        return self._store.write(record, version)

    def _check(self) -> None:
        if self.is_cut:
            raise LeaseError("it cannot be reached")


class Leases:
    """The lease as used by the controller and the standby. Each makes requests while it is not frozen."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = LeaseInMemory()
        self.of_first, self.of_second = CutStore(self.store), CutStore(self.store)
        self.first = LeaseKeeper(self.of_first, "first", self.clock)
        self.second = LeaseKeeper(self.of_second, "second", self.clock)
        self.first.acquire(Claim())
        self.frozen: set[LeaseKeeper] = set()

    async def keep(self) -> None:
        while True:
            for each in {self.first, self.second} - self.frozen:
                each.step()
            await asyncio.sleep(0.01)

    async def pass_by(self, seconds: float) -> None:
        """Let time pass in which both make requests as often as real ones."""
        for _ in range(round(seconds)):
            self.clock.now += 1
            for each in {self.first, self.second} - self.frozen:
                each.step()
            await asyncio.sleep(0)


Scene = Callable[[Pair, Leases], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        async def main() -> None:
            leases = Leases()
            keeping = asyncio.get_running_loop().create_task(leases.keep())
            # The controller does not tick any more, because its messages of that time would be lost with it.
            pair = Pair(tmp_path, ShellTimes(ping=1000.0), leases=(leases.first, leases.second))
            try:
                await pair.start()
                await scene(pair, leases)
            finally:
                keeping.cancel()
                pair.end()
                await asyncio.sleep(0.05)

        asyncio.run(asyncio.wait_for(main(), 120))

    return run


def test_a_standby_of_a_killed_controller_waits_until_its_lease_is_free(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        await pair.is_followed_closely()
        assert leases.store.record.standby == str(pair.second)
        leases.frozen.add(leases.first)
        pair.cut()
        pair.proxy.connection.send(m.Await(8, ()))
        await leases.pass_by(LEASE_SECONDS - 2)
        assert not pair.running.done()
        leases.clock.now += 5
        shell = await pair.taken_over()
        assert (await pair.proxy.next_of(READY))[1] == 8
        assert shell.resumable.term == 1000
        assert leases.store.record.holder == "second"
        assert not pair.worker.lost
        shell.stop()

    play(scene)


def test_a_standby_that_may_have_acquired_the_lease_keeps_its_copy_and_follows_again_if_it_has_not(play, monkeypatch):
    # On a busy machine, the controller would find its hosts silent meanwhile, and release the lease.
    monkeypatch.setattr(takeover, "LEASE_SECONDS", 1000.0)

    async def scene(pair: Pair, leases: Leases) -> None:
        await pair.is_followed_closely()
        leases.frozen.add(leases.first)
        leases.of_second.is_read_only = True
        pair.cut()
        await leases.pass_by(LEASE_SECONDS + 2)
        await until_async(lambda: not leases.second.withdraw())
        leases.of_second.is_cut = True
        leases.frozen.clear()
        await until_async(leases.first.holds)
        await pair.mend()
        await asyncio.sleep(0.5)  # the time in which it would connect to the controller and receive a heartbeat
        assert not pair.of_standby.is_used

        def state() -> tuple[StandbyState, bool]:
            status = standby_status(str(pair.directory))
            assert status is not None
            return status.state, status.has_copy

        assert state() == (StandbyState.LOST, True)
        leases.of_second.is_cut = leases.of_second.is_read_only = False
        await until_async(lambda: state() == (StandbyState.COPYING, False))
        assert not pair.running.done()
        pair.shell.stop()

    play(scene)


def test_a_controller_that_was_frozen_ends_without_an_answer_to_its_peers(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        beside = await Peer.open(pair.first, "proxy")  # the lease was not acquired by the standby
        await beside.next_of(60)
        await pair.is_followed_closely()
        leases.frozen.add(leases.first)
        leases.clock.now += RENEW_SECONDS + 1
        link = max(pair.shell.resumable.all(), key=lambda each: each.number)
        sent = link.statistics().messages_out
        beside.connection.send(m.Await(7, ()))
        await until_async(lambda: pair.shell.replication.is_fenced)
        pair.cut()
        await leases.pass_by(LEASE_SECONDS + 2)
        assert await asyncio.wait_for(pair.running, 60) is not None
        assert link.statistics().messages_out == sent
        leases.frozen.clear()
        await asyncio.wait_for(pair.stopped.wait(), 60)
        assert pair.shell.superseded_by == 1000
        assert (await beside.next_of(READY))[1] == 7, "of the standby"
        assert not beside.lost
        beside.connection.close()
        shell = await pair.taken_over()
        shell.stop()

    play(scene)


def test_a_controller_without_its_lease_answers_commands_and_everybody_else_when_it_holds_the_lease_again(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        leases.of_first.is_cut = True
        await leases.pass_by(2 * LEASE_SECONDS)
        await asked(pair)
        assert pair.shell.replication.is_fenced
        assert not pair.running.done(), "no peer has tried the standby"
        late = await Peer.open(pair.first, "proxy")
        status = (await late.next_of(REFUSED))[1]
        assert "does not hold the lease of a test" in status[1]
        command = await Peer.open(pair.first, "operator")
        command.connection.send(m.StatusRequest())
        await command.next_of(STATUS)
        leases.of_first.is_cut = False
        assert (await pair.proxy.next_of(READY))[1] == 7
        for each in (late, command):
            each.connection.close()
        pair.shell.stop()

    play(scene)


async def new_proxy(pair: Pair, *others: Address) -> Peer:
    """Dial the first controller as a proxy that knows `others`, and that waits until a controller admits it."""
    peer, address = Peer(), replace(pair.first, others=others)
    peer.connection = await dial(
        address, Any, peer.inbox.put_nowait, peer.lost.append, name="the controller", patience=60
    )
    peer.connection.send(m.Hello(m.PROTOCOL, "proxy", "", 1, "test", "script.py", resumes=True, redials=True))
    return peer


def test_a_new_peer_waits_for_a_controller_without_its_lease_and_tells_why_meanwhile(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        leases.of_first.is_cut = True
        await leases.pass_by(2 * LEASE_SECONDS)
        late = await new_proxy(pair)
        assert isinstance(late.connection, DialedConnection)
        connection = late.connection
        await until_async(lambda: "does not hold the lease of a test" in connection.put_off)
        leases.of_first.is_cut = False
        await late.next_of(WELCOME)
        assert connection.put_off == ""
        connection.close()
        pair.shell.stop()

    play(scene)


def test_a_new_peer_is_admitted_by_the_standby_that_has_acquired_the_lease(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        await pair.is_followed_closely()
        leases.of_first.is_cut = True
        await leases.pass_by(LEASE_SECONDS - 2)
        leases.clock.now += 3
        late = await new_proxy(pair, pair.second)
        pair.cut()
        pair.proxy.connection.send(m.Await(8, ()))
        shell = await pair.taken_over()
        await late.next_of(WELCOME)
        assert isinstance(late.connection, DialedConnection)
        assert late.connection.address == pair.second
        late.connection.close()
        shell.stop()

    play(scene)


def test_a_command_changes_nothing_without_the_lease_and_is_repeated_until_it_is_held_again(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        (session,) = pair.shell.controller.sessions
        ends = m.EndSessionRequest(session)
        leases.of_first.is_cut = True
        await leases.pass_by(2 * LEASE_SECONDS)
        command = await Peer.open(pair.first, "operator")
        command.connection.send(ends)
        status = (await command.next_of(REFUSED))[1]
        assert "does not hold the lease of a test" in status[1]
        ending = asyncio.create_task(asyncio.to_thread(request_operation, pair.first, "", ends))
        await asyncio.sleep(0.3)
        assert not ending.done()
        assert session in pair.shell.controller.sessions
        leases.of_first.is_cut = False
        await ending
        assert session not in pair.shell.controller.sessions
        command.connection.close()
        pair.shell.stop()

    play(scene)


def test_a_controller_without_its_lease_drops_an_agent_instead_of_forwarding_a_message_of_the_engine(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        engine = await Peer.open(pair.first, "engine")
        await until_async(lambda: pair.shell.controller.connections.engine is not None)
        received: list[Any] = []
        lost: list[str] = []
        agent = await connect(pair.first, Any, received.append, lost.append, name="the controller")
        agent.send(m.Hello(m.PROTOCOL, "agent", "", 1, "test", "a machine"))
        agent.send(m.AgentSays(b"hello"))
        number = (await engine.next_of(AGENT_SAYS))[2]
        engine.connection.send(m.TellAgent(number, b"one"))
        await until_async(lambda: [each[2] for each in received] == [b"one"])
        leases.frozen.add(leases.first)
        leases.clock.now += RENEW_SECONDS
        engine.connection.send(m.TellAgent(number, b"two"))
        await until_async(lambda: bool(lost))
        assert len(received) == 1
        for each in (engine.connection, agent):
            each.close()
        pair.shell.stop()

    play(scene)


def test_a_controller_that_cannot_reach_the_lease_is_replaced_although_its_standby_reaches_it(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        await pair.is_followed_closely()
        leases.of_first.is_cut = True
        await leases.pass_by(RENEW_SECONDS + 1)
        await until_async(lambda: pair.shell.replication.is_fenced)
        pair.of_worker.cut()
        pair.of_proxy.cut()
        await leases.pass_by(LEASE_SECONDS + 2)
        shell = await pair.taken_over()
        assert shell.resumable.term == 1000
        assert not pair.worker.lost
        assert not pair.proxy.lost
        shell.stop()

    play(scene)


def test_a_controller_that_reaches_the_lease_but_no_hosts_and_no_standby_releases_the_lease(play):
    async def scene(pair: Pair, leases: Leases) -> None:
        await pair.is_followed_closely()
        for relay in (pair.of_standby, pair.of_worker):
            relay.hold()
        await until_async(lambda: pair.shell.replication.is_fenced)
        pair.cut()
        shell = await pair.taken_over()
        await asyncio.wait_for(pair.stopped.wait(), 60)
        assert pair.shell.superseded_by == shell.resumable.term == 1000
        shell.stop()

    play(scene)
