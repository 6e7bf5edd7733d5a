"""What a worker sends of the arguments that a Python process asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.cluster.sandbox.grants import Sandbox, View
from atoll.errors import OK, Code, FrameError
from atoll.host_services.python import python_sessions as module
from atoll.host_services.python.python_options import PythonHost
from atoll.host_services.python.python_sessions import Input, PythonSessions
from atoll.ir.types import Replicated, Sharding
from atoll.protocol.messages import python_messages as m


class Process:
    """A process that runs nothing: what is sent to it is kept."""

    def __init__(
        self, name: str, options: Any, rendezvous: Any, on_message: Any, on_end: Any, on_gone: Any, expected: Any
    ) -> None:
        self.receive, self.end, self.gone = on_message, on_end, on_gone
        self.calls: list[m.Call] = []
        self.sent: list[tuple[int, list[float]]] = []

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def send(self, message: Any) -> None: ...

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


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PythonSessions:
    monkeypatch.setattr(module, "PythonProcess", Process)
    sessions = PythonSessions(PythonHost(0, 0, "unix:/c", "unix:/d", str(tmp_path)))
    sessions.begin(1)
    return sessions


@pytest.fixture
def process(sessions: PythonSessions, tmp_path: Path) -> tuple[Process, list[str], list[Any]]:
    """Return a process that writes an array of two shards, the shards that are released, and the call's outcomes."""
    record = sessions._sessions[1]
    record.options = m.PythonOptions(
        -1, ((0, 1),), 0, m.ClientSettings(), Sandbox(View.USER, str(tmp_path / "p" / "host-0")), "", ""
    )
    source = m.WriteArrays("write", (m.StoredArray("/x", "a", (4,), Sharding((0, 1), Replicated())),), 1.0)
    record.functions["f"], sessions._session_of["f"] = m.Load("f", source), 1
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
