"""Tests of the search for holders of memory: exact for usual sessions, and bounded for those with many arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.launch import memory_holders
from atoll.launch.memory_holders import examined, holds
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from tests.controller.play import Play, on, runs
from tests.work_counts import instructions_of

CAPACITY = 1 << 20
LARGE = ArraySpec("float32", (200_000,), Sharding((0,)))
LOW, HIGH = TenantSettings("low", token_hash("low")), TenantSettings("high", token_hash("high"), priority=5)


class Small(Play):
    """The devices have little memory. Session 1 has one array on device 1, and many records that share its memory."""

    def receive(self, connection: int, message: Any) -> None:
        if isinstance(message, m.WorkerReady):
            devices = tuple(msgspec.structs.replace(each, memory_bytes=CAPACITY) for each in message.devices)
            message = msgspec.structs.replace(message, devices=devices)
        super().receive(connection, message)

    def fill(self, count: int) -> Session:
        """Add arrays to the session, which share the memory of array 10."""
        session = self.controller.sessions[self.session]
        self.with_put(device=1)
        self.array(10)
        entry = session.directory.entries[10]
        for handle in range(1000, 1000 + count):
            session.directory.add(
                handle, Entry(entry.hosts, 0, BufferState.READY, blocks=entry.blocks, spec=on(1), producer="many")
            )
        return session

    def wait_for_memory(self) -> None:
        """Have a launch of another session wait for memory of device 0."""
        self.session = self.open(43, token="high").number
        buffer = HostBuffer(0, LARGE.shape, None, None)
        self.send(m.RegisterProgram(4, single("large", (), HostToDevice((buffer,), (LARGE,)), feeds=1)))
        for handle in (500, 501):
            self.report(0, m.FeedsArrived(self.session, (handle,)))
            for run in runs(self.send(m.Launch(4, (), (handle,), (handle,)))):
                self.done(run.sequence)
        assert self.controller.launches.reservations.waits.waiting


@pytest.mark.parametrize("settings", [{}, {"spill": 1 << 30}, {"suspend_lower": "memory"}])
def test_a_launch_that_waits_for_memory_does_not_look_at_all_arrays_of_a_session(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_holders, "MAX_EXAMINED", 100)

    def work(count: int) -> int:
        play = Small(dumps=False, token="cluster", tenants=(LOW, HIGH), **settings)
        play.session = play.open(token="low").number
        play.fill(count)
        play.wait_for_memory()
        most = 0
        for now in (1.0, 2.0, 3.0):
            play.tick(now)
            most = max(most, instructions_of(lambda: play.controller.handle(e.Flush(play.now))))
            most = max(most, instructions_of(lambda: play.controller.handle(e.Tick(play.now + 0.5))))
        return most

    work(200)  # what is done once, such as imports
    few, many = work(1000), work(4000)
    assert many < 1.2 * few


def test_arrays_beyond_the_limit_have_their_turn_in_another_second() -> None:
    session = Small().fill(249)
    seen = [{handle for handle, _ in examined(session, 100, float(now))} for now in range(3)]
    assert [len(each) for each in seen] == [100, 100, 50]
    assert set().union(*seen) == session.directory.entries.keys()


def test_a_session_with_many_arrays_counts_as_a_holder() -> None:
    session = Small().fill(20)
    assert not holds(session, (0, 0))
    assert holds(session, (0, 1))
    assert holds(session, (0, 0), limit=20)
