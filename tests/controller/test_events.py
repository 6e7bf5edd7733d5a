"""The event log: whoever is told the same says the same."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.settings import ClusterSettings, Dispatch
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.controller.events import EventLog, replay
from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m

PAIR = ArraySpec("float32", (2,), Sharding((0, 1)))


def recorded(**settings: Any) -> tuple[EventLog, list[Any]]:
    """A session's life on an island of two hosts, one of which is lost on the way; the log, and what was said."""
    cluster = ClusterSettings("1x2x1", **settings)
    log = EventLog(Controller(Topology.parse(cluster.islands), cluster), cluster, "test")
    said: list[Any] = []
    clock = iter(range(1, 1000))

    def tell(what: str, who: int = 0, text: str = "", message: Any = None) -> Any:
        result = log.tell(float(next(clock)), what, who, text, message)
        said.extend(log.tell(float(next(clock)), "flush"))
        return result

    device = m.DeviceInfo(0, "null", "cpu", ("device",), "device", (0, 0, 0), 0, 0, 0)
    for host in (0, 1):
        tell("worker joins", 100 + host, message=m.WorkerReady(0, host, (device,), "cpu", "1", f"unix:/{host}", 24))
    session = tell("session opens", 42, "script.py").number
    tell("proxy", session, message=m.RegisterFunction(1, "content", 9, ((0, 1),)))
    for host in (0, 1):
        tell("worker", host, message=m.FeedsArrived(session, (9,)))
    name = log.controller.sessions[session].functions[1]
    for host in (0, 1):
        tell("worker", host, message=m.Compiled(name, OK, b"info", 0.1, False, 64))
    put = HostToDevice((HostBuffer(0, (2,), None, None),), (PAIR,))
    tell("proxy", session, message=m.RegisterProgram(2, single("put", (), put, feeds=1)))
    tell("proxy", session, message=m.RegisterProgram(3, single("f", (PAIR,), Call(1, (0,), (PAIR,), (0, 1)))))
    tell("proxy", session, message=m.Launch(2, (), (10,), (77,)))
    tell("proxy", session, message=m.Launch(3, (10,), (11,), ()))
    tell("proxy", session, message=m.Await(5, (11,)))
    for host in (0, 1):
        tell("worker", host, message=m.FeedsArrived(session, (77,)))
    tell("tick")
    tell("worker", 0, message=m.Done(((1, 5, 9),)))
    tell("worker ended", message=m.WorkerEnded(1, 101, -9, "killed by SIGKILL"))
    tell("session ends", session)
    return log, said


def without_secrets(messages: list[Any]) -> list[str]:
    return [
        f"{to} {type(message).__name__}" if isinstance(message, m.OpenStore | m.Welcome) else f"{to} {message}"
        for to, message in messages
    ]


@pytest.mark.parametrize("settings", [{}, {"dispatch": Dispatch.SEQUENTIAL}, {"device_memory": 100}])
def test_a_log_replays_to_the_same_decisions(settings):
    log, said = recorded(**settings)
    assert any(isinstance(message, m.Run) for _, message in said)
    assert any(isinstance(message, m.Awaited) for _, message in said)
    again = [message for _, messages in replay(log.dump().splitlines()) for message in messages]
    assert without_secrets(again) == without_secrets(said)


def test_a_log_that_has_lost_its_beginning_says_so(monkeypatch):
    monkeypatch.setattr("atoll.controller.events.MOST_EVENTS", 10)
    log, _ = recorded()
    with pytest.raises(ValueError, match=r"first \d+ events are missing"):
        list(replay(log.dump().splitlines()))


@pytest.mark.parametrize("lines", [[], [b"{}"], [b"no JSON"]])
def test_what_is_no_log_is_refused(lines):
    with pytest.raises(ValueError, match="no event log"):
        list(replay(lines))
