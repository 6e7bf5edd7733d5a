"""Tests of the controller's shell, which has sockets, a clock and random numbers, but makes no decisions."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller.validation import PROXIES
from atoll.controller_process.controller_main import serve
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import CLUSTER_ENDED, ControllerShell, new_controller
from atoll.controller_process.step_budget import FLUSH_SECONDS, StepBudget
from atoll.errors import Code
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import recover
from atoll.journal.persisted_state import has_killed_cluster
from atoll.operate.log_replay import replay
from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction, SetTimer
from atoll.protocol.events import STEPS_PER_FLUSH
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from tests.controller.play import ready

SETTINGS = ClusterSettings("1x1x1")


class Peer:
    """Peer that connects to the controller."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.connection: Connection

    @classmethod
    async def open(cls, path: Path, role: str, token: str = "a token", label: str = "script.py") -> Peer:
        peer = cls()
        for _ in range(200):
            if path.exists():
                break
            await asyncio.sleep(0.01)
        peer.connection = await connect(
            Address(path=str(path)), Any, peer.inbox.put_nowait, lambda reason: peer.inbox.put_nowait(None), name="it"
        )
        peer.connection.send(m.Hello(m.PROTOCOL, role, token, 1, "test", label))
        return peer

    async def next(self) -> Any:
        """Return the next message as a list that starts with its tag, or None after the connection was closed."""
        return await asyncio.wait_for(self.inbox.get(), 10)

    def output(self) -> list[Any]:
        """Return the messages that have arrived since the last call of `next`."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    async def next_of(self, tag: int) -> Any:
        while True:
            message = await self.next()
            if message is None or message[0] == tag:
                return message


async def life(path: Path, ready_fd: int) -> bytes:
    """Run a controller with one host and one session until an operator ends it. Return its log."""
    stop = asyncio.Event()
    options = ControllerOptions(f"unix:{path}", SETTINGS, os.getpid(), ready_fd)
    running = asyncio.create_task(serve(options, stop))
    intruder = await Peer.open(path, "operator", token="wrong")
    refused = await intruder.next()
    assert (refused[0], refused[1][0]) == (2, Code.UNAUTHENTICATED)
    assert await intruder.next() is None, "it is closed"

    proxy = await Peer.open(path, "proxy")
    worker = await Peer.open(path, "worker")
    worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
    welcome = await proxy.next()
    assert welcome[0] == 60
    assert (await worker.next_of(26))[2] == welcome[2], "both ends have the session's secret"
    assert len(welcome[2]) == 32
    assert (await worker.next_of(33)) is not None, "it is asked for signs of life"

    engine = await Peer.open(path, "engine")
    operator = await Peer.open(path, "operator")
    operator.connection.send(m.StatusRequest())
    assert [each["label"] for each in json.loads((await operator.next())[1])["sessions"]] == ["script.py"]
    operator.connection.send(m.DumpRequest())
    dump = bytes((await operator.next())[1])
    operator.connection.send(m.StopRequest())
    assert (await operator.next())[0] == 83
    assert await worker.next_of(31) is not None, "workers end in good order"
    closing = await proxy.next_of(m.Closing.__struct_config__.tag)
    assert (closing[1][0], closing[1][1]) == (Code.UNAVAILABLE, CLUSTER_ENDED)
    ends = await engine.next_of(m.ClusterEnds.__struct_config__.tag)
    assert ends is not None, "an engine whose child it is not does not see its exit status"
    await asyncio.wait_for(running, 10)
    for peer in (proxy, worker, operator, engine):
        peer.connection.close()
    return dump


def test_the_life_of_a_controller(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_TOKEN", "a token")
    read, write = os.pipe()
    path = tmp_path / "socket"
    dump = asyncio.run(life(path, write))
    assert os.read(read, 64) == b"runs\nready\n"
    os.close(read)
    assert not path.exists()
    assert sum(1 for _ in replay(dump.splitlines())) > 10


async def life_with_a_bug(path: Path, ready_fd: int) -> None:
    """Run a controller without a journal that fails at the check of a message which waited behind a large one."""
    stop = asyncio.Event()
    running = asyncio.create_task(serve(ControllerOptions(f"unix:{path}", SETTINGS, os.getpid(), ready_fd), stop))
    one, other = await Peer.open(path, "proxy"), await Peer.open(path, "proxy", label="other.py")
    worker = await Peer.open(path, "worker")
    worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
    for peer in (one, other):
        assert (await peer.next())[0] == 60
    one.connection.send(m.Release(tuple(range(1000, 3000))))
    one.connection.send(m.Await(7, ()))
    closing = await one.next_of(m.Closing.__struct_config__.tag)
    assert closing[1][0] == Code.INTERNAL
    assert "Await: KeyError: 'a dtype'" in closing[1][1]
    operator = await Peer.open(path, "operator")
    operator.connection.send(m.StatusRequest())
    status = json.loads((await operator.next())[1])
    assert [each["label"] for each in status["sessions"]] == ["other.py"]
    operator.connection.send(m.StopRequest())
    await asyncio.wait_for(running, 10)
    for peer in (one, other, worker, operator):
        peer.connection.close()


def test_a_bug_in_the_check_of_a_message_that_waited_ends_its_session_and_not_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(*arguments: object) -> None:
        raise KeyError("a dtype")

    monkeypatch.setenv("ATOLL_TOKEN", "a token")
    monkeypatch.setitem(PROXIES, m.Await, check)
    read, write = os.pipe()
    asyncio.run(life_with_a_bug(tmp_path / "socket", write))
    os.close(read)
    (record,) = [each for each in caplog.records if "and drops it" in each.getMessage()]
    assert "in check" in record.getMessage(), "the log has the traceback"


@pytest.mark.parametrize("continues", [True, False])
def test_a_controller_whose_engine_has_ended_leaves_its_journal_if_another_engine_may_continue(
    tmp_path: Path, continues: bool
) -> None:
    path, journal = tmp_path / "socket", tmp_path / "journal"

    async def main(engine: subprocess.Popen[bytes]) -> None:
        settings = msgspec.structs.replace(SETTINGS, grace_seconds=60.0)
        options = ControllerOptions(f"unix:{path}", settings, engine.pid, journal=str(journal), continues=continues)
        running = asyncio.create_task(serve(options, asyncio.Event()))
        worker = await Peer.open(path, "worker", token="")
        worker.connection.send(ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
        assert await worker.next_of(33) is not None, "it has joined"
        engine.kill()
        await asyncio.wait_for(running, 10)
        if not continues:
            assert await worker.next_of(31) is not None, "it ends with the cluster"
        assert all(message is None or message[0] != 31 for message in worker.output())
        worker.connection.close()

    with subprocess.Popen(["sleep", "60"]) as engine:
        try:
            asyncio.run(asyncio.wait_for(main(engine), 30))
        finally:
            engine.kill()
    assert has_killed_cluster(journal) is continues
    found = recover(JournalDirectory(journal))
    assert (found is not None) is continues
    if found is not None:
        events = [event for turn in found.decoded_turns() for event in turn]
        assert any(isinstance(getattr(event, "message", None), m.WorkerReady) for event in events)


def test_the_shell_can_do_all_that_a_controller_decides():
    async def does() -> set[type[Any]]:
        options = ControllerOptions("unix:/x", SETTINGS, 0)
        return set(ControllerShell(options, ProcessState(new_controller(options)), asyncio.Event())._does)

    assert asyncio.run(does()) == set(get_args(AnyAction))


def test_a_controller_that_was_stopped_reads_before_it_looks_at_deadlines(monkeypatch: pytest.MonkeyPatch):
    async def scene() -> list[str]:
        handled: list[str] = []
        options, loop = ControllerOptions("unix:/x", SETTINGS, 0), asyncio.get_running_loop()
        shell = ControllerShell(options, ProcessState(new_controller(options)), asyncio.Event())
        monkeypatch.setattr(shell, "_handle", lambda event: handled.append(type(event).__name__))

        def arrives(steps: int) -> None:
            loop.call_soon(arrives, steps - 1) if steps else handled.append("message")

        shell._tick()
        shell._set_timer(SetTimer((), 1, 0.5))
        time.sleep(shell._times.ping + 1.2)  # as if it was stopped
        loop.call_soon(arrives, 20)  # a connection is accepted, then read in parts
        while len(handled) < 5:
            await asyncio.sleep(0.05)
        return handled

    assert asyncio.run(scene()) == ["Tick", "message", "TimerEnded", "Tick", "Tick"]


@pytest.mark.parametrize("kind", get_args(AnyAction))
def test_actions_name_their_causes(kind):
    assert kind.__struct_fields__[0] == "cause"


def test_steps_that_take_long_are_done_in_smaller_numbers():
    budget = StepBudget()
    budget.observe(8 * FLUSH_SECONDS)
    assert budget.steps == STEPS_PER_FLUSH // 8
    for _ in range(10):
        budget.observe(8 * FLUSH_SECONDS)
    assert budget.steps >= 1


def test_steps_that_take_little_are_done_in_the_usual_number_again():
    budget = StepBudget()
    for _ in range(10):
        budget.observe(8 * FLUSH_SECONDS)
    for _ in range(20):
        budget.observe(FLUSH_SECONDS / 4)
    assert budget.steps == STEPS_PER_FLUSH
