"""Tests of the arguments that a worker sends at the request of a Python process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.cluster.sandbox.grants import USER_RULES, PythonRules, Sandbox, View
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.errors import OK, Code, FrameError, Status, StatusError
from atoll.host_services.python import python_sessions as module
from atoll.host_services.python.python_options import PythonHost
from atoll.host_services.python.python_sessions import Input, PythonSessions
from atoll.ir.program import STORAGE_STREAM
from atoll.ir.types import Replicated, Sharding
from atoll.protocol.messages import CloseWorld, Compile
from atoll.protocol.messages import python_messages as m
from tests.host_services.python.stored_values import Store
from tests.waiting import until


class Process:
    """Process that runs nothing, and keeps all messages."""

    def __init__(
        self, name: str, options: Any, rendezvous: Any, on_message: Any, on_end: Any, on_gone: Any, expected: Any
    ) -> None:
        self.name = name
        self.receive, self.end, self.gone = on_message, on_end, on_gone
        self.is_started = False
        self.scratch = Path(options.sandbox.scratch)
        self.is_killed = False
        self.messages: list[Any] = []
        self.calls: list[m.Call] = []
        self.sent: list[tuple[int, list[float]]] = []

    def start(self) -> None:
        self.is_started = True
        self.scratch.mkdir(parents=True, exist_ok=True)

    def kill(self) -> None:
        self.is_killed = True

    def kill_at_once(self) -> None:
        self.is_killed = True

    def give_up(self, reason: str) -> None:
        self.end(reason)

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def call(self, call: m.Call, send: Any, later: Any) -> None:
        send(self)
        assert later is None
        self.calls.append(call)

    def send_array(self, send: Any) -> None:
        send(Link(self.sent))


class Link:
    def __init__(self, sent: list[tuple[int, list[float]]]) -> None:
        self._sent = sent

    def send_array(self, feed: int, array: np.ndarray[Any, Any], in_place: bool) -> None:
        assert in_place
        self._sent.append((feed, array.tolist()))


class Worlds:
    """Worlds of a host. World 9 was closed."""

    hostname = ""

    def __init__(self) -> None:
        self.store = Store()

    def key_values(self, world: int) -> Store:
        if world == 9:
            raise StatusError(Code.FAILED_PRECONDITION, "the hosts have lost one another")
        return self.store


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PythonSessions]:
    monkeypatch.setattr(module, "PythonProcess", Process)
    sessions = PythonSessions(PythonHost(0, 0, "unix:/c", "unix:/d", str(tmp_path), worlds=Worlds()))
    sessions.begin(1)
    yield sessions
    sessions.close(1)


@pytest.fixture
def process(sessions: PythonSessions, tmp_path: Path) -> tuple[Process, list[str], list[Any]]:
    """Return a process that writes an array of two shards, the released shards, and the call's outcomes."""
    record = sessions._sessions[1].programs[0] = module._Program(1, USER_RULES)
    record.options = m.PythonOptions(
        -1, ((0, 1),), 0, m.ClientSettings(), Sandbox(View.USER, str(tmp_path / "p" / "host-0")), "", ""
    )
    source = m.WriteArrays("write", (m.StoredArray("/x", "a", (4,), Sharding((0, 1), Replicated())),), 1.0)
    record.functions["f"], sessions._program_of["f"] = m.Load("f", source), record
    released: list[str] = []
    outcomes: list[Any] = []
    shards = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    argument = Input(0, "float64", ((2,), (2,)), True, lambda: shards, lambda: released.append("argument"))
    sessions.call("f", -1, [argument], [], outcomes.append)
    found: Any = record.process
    return found, released, outcomes


def test_of_a_write_nothing_is_sent_that_was_not_asked_for(process):
    writer, released, _ = process
    (call,) = writer.calls
    assert call.asks
    assert (writer.sent, released) == ([], [])
    first, second = call.arguments[0].feeds
    writer.receive(m.Wanted(call.number, second))
    assert (writer.sent, released) == ([(second, [3.0, 4.0])], [])
    writer.receive(m.Wanted(call.number, first))
    assert writer.sent[1:] == [(first, [1.0, 2.0])]
    assert released == ["argument"], "once all of it is sent"


def test_a_process_gets_each_feed_once_and_no_other(process):
    writer, _, _ = process
    (call,) = writer.calls
    feed = call.arguments[0].feeds[0]
    writer.receive(m.Wanted(call.number, feed))
    for number, wanted in ((call.number, feed), (call.number, 999), (999, feed)):
        with pytest.raises(FrameError, match=f"call {number} requested feed {wanted}, which"):
            writer.receive(m.Wanted(number, wanted))


def test_what_was_not_asked_for_is_released_when_the_call_has_returned(process):
    writer, released, outcomes = process
    (call,) = writer.calls
    writer.receive(m.Returned(call.number, OK))
    assert (released, outcomes) == (["argument"], [[]])


def test_calls_fail_once_their_process_is_killed_and_its_directory_goes_with_its_memory(process, sessions, tmp_path):
    killed, released, outcomes = process
    scratch = tmp_path / "p" / "host-0"
    sessions.close(1)
    assert (scratch.is_dir(), outcomes) == (True, [])
    killed.end("the Python process of session 1 was killed")
    assert (scratch.is_dir(), released) == (True, ["argument"])
    assert [(each.code, each.message) for each in outcomes] == [
        (Code.ABORTED, "the Python process of session 1 was killed")
    ]
    killed.gone()
    assert not scratch.exists()


def test_the_directory_of_a_process_that_has_crashed_goes_with_its_session(process, sessions, tmp_path):
    crashed, _, _ = process
    crashed.end("the Python process of session 1 was ended by signal 11")
    crashed.gone()
    scratch = tmp_path / "p" / "host-0"
    assert scratch.is_dir(), "the next process of the session uses it"
    sessions.close(1)
    until(lambda: not scratch.exists())


# ---- worlds

CLOSED = Status(Code.DATA_LOSS, "host 1 of island 1 is gone")


def load(
    sessions: PythonSessions, function: str, source: m.PythonProgram, world: int, statuses: list[Status] | None = None
) -> None:
    """Load a function on this host, and on the host with rank 1 in the world."""
    assignment = (((0, 0), (1, 0)),) if world else (((0, 0),),)
    message = Compile(function, 1, 0, assignment, world=world, ranks=(0, 1) if world else (0, 0))
    report = (lambda status: None) if statuses is None else statuses.append
    sessions.load(message, msgspec.msgpack.encode(source), report)


def start(sessions: PythonSessions, world: int, statuses: list[Status] | None = None) -> Process:
    """Start a process of the session's program in the world, with a function `in <world>`."""
    hosts = m.PythonHosts((0, 1) if world else (0,), m.ClientSettings())
    load(sessions, f"in {world}", m.PythonFunction("f", b""), world, statuses)
    load(sessions, f"hosts {world}", hosts, world, statuses)
    found: Any = sessions._sessions[1].programs[world].process
    return found


def ready(process: Process, world: int) -> Process:
    process.receive(m.PythonReady(False))
    process.receive(m.Loaded(f"in {world}", OK))
    return process


def test_a_session_has_a_process_for_its_island_and_one_for_each_world(sessions):
    alone, together = (ready(start(sessions, world), world) for world in (0, 5))
    assert alone is not together
    for world, process in ((0, alone), (5, together)):
        sessions.call(f"in {world}", 1, [], [], lambda outcome: None)
        assert [each.function for each in process.calls] == [f"in {world}"]


def test_processes_end_with_their_world_and_others_continue(sessions):
    alone, together = (ready(start(sessions, world), world) for world in (0, 5))
    outcomes: list[Any] = []
    for world in (0, 5):
        sessions.call(f"in {world}", 1, [], [], outcomes.append)
    waiting: list[Status] = []
    load(sessions, "late", m.PythonFunction("f", b""), 5, waiting)
    sessions.close_world(CloseWorld(5, CLOSED))
    assert (outcomes, waiting) == ([CLOSED], [CLOSED])
    assert (alone.is_killed, together.is_killed) == (False, True)
    with pytest.raises(StatusError, match="is not on this host"):
        sessions.call("in 5", 1, [], [], outcomes.append)
    together.end("was killed")
    assert outcomes == [CLOSED]
    again = start(sessions, 6)
    assert again is not together


def test_a_process_goes_on_in_the_world_that_replaces_its_own(sessions):
    process = ready(start(sessions, 5), 5)
    sessions.close_world(CloseWorld(5, CLOSED, successor=6))
    sessions.call("in 5", 1, [], [], lambda outcome: None)
    load(sessions, "later", m.PythonFunction("f", b""), 6)
    assert not process.is_killed
    assert [type(each) for each in process.messages] == [m.Load, m.Load]
    sessions.close_world(CloseWorld(6, CLOSED))
    assert process.is_killed


def test_hosts_that_run_already_are_reported_at_once(sessions):
    process = ready(start(sessions, 5), 5)
    statuses: list[Status] = []
    load(sessions, "hosts again", m.PythonHosts((0, 1), m.ClientSettings()), 5, statuses)
    assert statuses == [OK]
    assert [type(each) for each in process.messages] == [m.Load]


def test_a_function_of_a_closed_world_is_refused(sessions):
    with pytest.raises(StatusError, match="lost one another"):
        load(sessions, "f", m.PythonFunction("f", b""), 9)


# ---- processes that wait for others


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_process_that_waits_ends_with_all_of_its_calls_and_the_next_one_starts(sessions, is_dropped):
    process = ready(start(sessions, 5), 5)
    outcomes: list[Any] = []
    for _ in range(2):
        sessions.call("in 5", 1, [], [], outcomes.append)
    if is_dropped:
        sessions.drop("in 5")
    sessions.end_process("in 5", "was ended, because it waited")
    text = "the Python process of session 1 on host 0 was ended, because it waited"
    assert [(each.code, each.message) for each in outcomes] == [(Code.ABORTED, text)] * 2
    assert process.is_killed
    again = sessions._sessions[1].programs[5].process
    assert again is not process
    sessions.end_process("in 5", "was ended again")
    assert sessions._sessions[1].programs[5].process is again, "it starts"


def test_calls_after_the_end_of_a_process_are_for_the_next_one_as_on_the_other_hosts(sessions):
    process = ready(start(sessions, 5), 5)
    outcomes: list[Any] = []
    sessions.call("in 5", 1, [], [], outcomes.append)
    (call,) = process.calls
    sessions.end_process("in 5", "was ended")
    again = sessions._sessions[1].programs[5].process
    sessions.call("in 5", 1, [], [], outcomes.append)
    process.receive(m.Returned(call.number, OK))
    assert (len(again.calls), again.is_started) == (1, False), "two processes would use the same files and ports"
    process.end("was ended by signal 9")
    assert again.is_started
    assert len(outcomes) == 1
    ready(again, 5).receive(m.Returned(again.calls[0].number, OK))
    assert outcomes[1:] == [[]]


def test_the_directory_of_a_process_that_ends_goes_with_its_session(sessions):
    process = ready(start(sessions, 5), 5)
    outcomes: list[Any] = []
    sessions.end_process("in 5", "was ended")
    sessions.call("in 5", 1, [], [], outcomes.append)
    sessions.close(1)
    assert process.scratch.is_dir()
    process.end("was ended by signal 9")
    assert [each.code for each in outcomes] == [Code.ABORTED]
    process.gone()
    assert not process.scratch.exists()


def test_calls_behind_a_failed_one_are_resumed_when_it_has_ended_on_all_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PythonProcess", Process)
    sessions = PythonSessions(PythonHost(0, 0, "unix:/c", "unix:/d", str(tmp_path), worlds=Worlds()))
    sessions.begin(1)
    alone, together = (ready(start(sessions, world), world) for world in (0, 5))
    outcomes: list[Any] = []
    for world, stream, sequence in ((0, 1, 7), (5, 1, 8), (5, STORAGE_STREAM, 9)):
        sessions.call(f"in {world}", stream, [], [], outcomes.append, sequence)
    calls = [*alone.calls, *together.calls]
    assert [each.holds for each in calls] == [False, True, False], "the others need no other host"
    for process, call in zip((alone, together, together), calls, strict=True):
        process.receive(m.Returned(call.number, Status(Code.INTERNAL, "bad")))
    before = len(together.messages)
    for sequence in (7, 8, 9, 8):
        sessions.resume(sequence)
    assert together.messages[before:] == [m.Resume(calls[1].number)]
    assert not any(isinstance(each, m.Resume) for each in alone.messages)
    sessions.close(1)


def test_calls_behind_one_that_fails_before_it_reaches_the_process_are_held_back(sessions):
    alone, together = (ready(start(sessions, world), world) for world in (0, 5))
    before = len(together.messages)
    for function, stream, sequence in (("in 0", 1, 7), ("in 5", 1, 8), ("in 5", 2, 8), ("in 5", STORAGE_STREAM, 9)):
        sessions.leave_out(function, stream, sequence)
    sessions.leave_out("unknown", 1, 8)
    held = together.messages[before:]
    assert [(type(each), each.stream) for each in held] == [(m.Hold, 1), (m.Hold, 2)], "the others need no other host"
    assert not any(isinstance(each, m.Hold) for each in alone.messages)
    for sequence in (7, 8, 9, 8):
        sessions.resume(sequence)
    assert together.messages[before + 2 :] == [m.Resume(each.number) for each in held]


def test_only_the_process_of_the_function_that_waits_ends(sessions):
    alone, together = (ready(start(sessions, world), world) for world in (0, 5))
    sessions.end_process("in 5", "was ended")
    sessions.end_process("of another session", "was ended")
    processes = [sessions._sessions[1].programs[world].process for world in (0, 5)]
    assert processes[0] is alone
    assert processes[1] is not together


# ---- processes that do not start


def on_two_hosts(directory: Path, second: PythonRules = USER_RULES) -> list[PythonSessions]:
    """Return the sessions of two hosts of one world, and begin a session there, with `second` rules on one of them."""
    worlds = Worlds()
    hosts = []
    for rank, rules in enumerate((USER_RULES, second)):
        place = directory / str(rank)
        host = PythonHost(rank, 0, "unix:/c", "unix:/d", str(place), mechanisms=Mechanisms(), worlds=worlds)
        sessions = PythonSessions(host)
        sessions.begin(1, rules)
        hosts.append(sessions)
    return hosts


def start_on(sessions: PythonSessions, rank: int, statuses: list[Status]) -> Process:
    """Start the process of the session on the host with this rank of two."""
    assignment = (((0, 0), (1, 0)),)
    for name, source in (("f", m.PythonFunction("f", b"")), ("hosts", m.PythonHosts((0, 1), m.ClientSettings()))):
        message = Compile(name, 1, 0, assignment, world=5, ranks=(rank, 1))
        sessions.load(message, msgspec.msgpack.encode(source), statuses.append)
    found: Any = sessions._sessions[1].programs[5].process
    return found


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PythonProcess", Process)


@pytest.mark.usefixtures("without_processes")
def test_if_a_process_does_not_start_the_one_that_waits_for_it_ends_and_the_next_ones_start(tmp_path):
    first, second = on_two_hosts(tmp_path)
    statuses: list[Status] = []
    start_on(first, 0, statuses)
    for _ in range(2):
        start_on(second, 1, []).end("cannot be started: No space left on device")
        until(lambda: len(statuses) == 2)
        assert {each.code for each in statuses} == {Code.ABORTED}
        assert all("another host failed: cannot be started: No space left" in each.message for each in statuses)
        statuses.clear()
        start_on(first, 0, statuses)
    both = start_on(second, 1, statuses), first._sessions[1].programs[5].process
    for each in both:
        each.receive(m.PythonReady(False))
        each.receive(m.Loaded("f", OK))
    until(lambda: len(statuses) == 4)
    assert {each.code for each in statuses} == {Code.OK}


@pytest.mark.usefixtures("without_processes")
def test_if_a_host_refuses_a_process_the_one_that_waits_for_it_ends(tmp_path):
    first, second = on_two_hosts(tmp_path, msgspec.structs.replace(USER_RULES, view=View.GRANTED, insecure=False))
    statuses: list[Status] = []
    start_on(first, 0, statuses)
    with pytest.raises(StatusError, match="host 1: "):
        start_on(second, 1, [])
    until(lambda: len(statuses) == 2)
    assert all("another host failed: host 1: " in each.message for each in statuses)
