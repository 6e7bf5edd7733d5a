"""The controller skips an event that it failed at, and ends what that event belongs to, and nothing else."""

from __future__ import annotations

import pytest

from atoll.controller.faults import NothingChangedError
from atoll.controller.validation import PROXIES
from atoll.errors import Code
from atoll.journal.replay import replayed, skipped_of
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Cluster, Play, joined

REASON = "Launch: TypeError: not callable (dispatch/launcher.py:1)"


def skip(cluster: Cluster, connection: int, **more: object) -> list[tuple[tuple[str, int], object]]:
    cluster.event(e.Skipped(10.0, REASON, (connection,), **more))  # type: ignore[arg-type]
    return cluster.sent()


def test_a_session_ends_with_the_bug_and_others_do_not():
    cluster = joined("1x1x2")
    one, other = cluster.open(), cluster.open()
    connection = cluster.controller.connections.sessions[one.number]
    (closing,) = [message for _, message in skip(cluster, connection) if isinstance(message, m.Closing)]
    assert closing.status.code == Code.INTERNAL
    assert REASON in closing.status.message
    assert set(cluster.controller.sessions) == {other.number}
    assert cluster.controller.history.events()[-2]["text"] == REASON


def test_of_a_worker_the_island_restarts_and_the_reason_is_the_controllers():
    cluster = joined("2x1x1")
    session = cluster.open()
    connection = cluster.controller.connections.hosts[1]
    asked = [message for _, message in skip(cluster, connection) if isinstance(message, m.RestartIsland)]
    assert [each.island for each in asked] == [1]
    failure = cluster.controller.resources.islands[1].last_failure
    assert failure is not None
    assert failure.message.startswith(f"the controller failed at a message of host 1 ({REASON})")
    assert "is gone" not in failure.message
    assert set(cluster.controller.sessions) == {session.number}


def test_a_worker_that_speaks_of_a_session_ends_that():
    cluster = joined("2x1x1")
    one, other = cluster.open(), cluster.open()
    skip(cluster, cluster.controller.connections.hosts[1], sessions=(one.number,))
    assert set(cluster.controller.sessions) == {other.number}


def test_the_engine_stays():
    cluster = Play("1x1x2")
    engine = cluster.controller.connections.engine
    if engine is None:
        engine = cluster.connect("engine")
    skip(cluster, engine)
    assert cluster.controller.connections.engine == engine


RECEIVED = [e.Received(1.0, connection, m.Pong()) for connection in (1, 2, 3)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([*RECEIVED, e.Flush(1.0)], set()),
        ([*RECEIVED, e.Skipped(1.0, "", (3,))], {2}),
        ([*RECEIVED, e.Flush(1.0), e.Skipped(1.0, "")], {3}),
        ([RECEIVED[0], e.Skipped(1.0, "", (1,)), RECEIVED[1], e.Flush(1.0), e.Skipped(1.0, "")], {0, 3}),
        ([e.TimerEnded(1.0, 1), e.Skipped(1.0, "")], {0}),
        ([e.Skipped(1.0, "")], set()),
    ],
)
def test_what_is_skipped(events, expected):
    assert skipped_of(events) == expected


def test_a_dump_replays_without_what_was_skipped():
    handled: list[object] = []

    def handle(event: e.AnyEvent) -> list[object]:
        handled.append(event)
        return []

    events = [RECEIVED[0], RECEIVED[1], e.Skipped(1.0, "", (2,)), e.Flush(1.0)]
    assert [event for event, _ in replayed(handle, events)] == events  # type: ignore[arg-type]
    assert handled == [RECEIVED[0], *events[2:]]


def test_a_bug_in_the_checks_of_a_message_is_known_to_have_changed_nothing(monkeypatch):
    cluster = joined("1x1x2")
    session = cluster.open()

    def check(*arguments: object) -> None:
        raise KeyError("a dtype")

    monkeypatch.setitem(PROXIES, m.Pong, check)
    with pytest.raises(NothingChangedError) as raised:
        cluster.proxy(session.number, m.Pong())
    assert isinstance(raised.value.__cause__, KeyError)
