"""Tests of bugs: the controller skips an event at which it failed, and ends only the session or peer that sent it."""

from __future__ import annotations

import pytest

from atoll.controller.controller_dumps import load_controller
from atoll.controller.faults import NothingChangedError
from atoll.controller.validation import PROXIES
from atoll.errors import Code
from atoll.journal.event_log import replayed, with_skips
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.offenses import FIRST_SUSPENSION_SECONDS, MAX_CRASHES
from atoll.state.session import Session
from tests.controller.dumps import dumped
from tests.controller.play import Cluster, Play, joined
from tests.controller.test_tenants import shared

REASON = "Launch: TypeError: not callable (launch/launcher.py:1)"


def skip(cluster: Cluster, connection: int, **more: object) -> list[tuple[tuple[str, int], object]]:
    cluster.event(e.Skipped(cluster.now, REASON, (connection,), **more))  # type: ignore[arg-type]
    return cluster.sent()


def test_a_session_ends_with_the_bug_and_others_do_not():
    cluster = joined("1x1x2")
    one, other = cluster.open(), cluster.open()
    connection = cluster.controller.connections.sessions[one.number]
    (closing,) = [message for _, message in skip(cluster, connection) if isinstance(message, m.Closing)]
    assert closing.status.code == Code.INTERNAL
    assert REASON in closing.status.message
    assert set(cluster.controller.sessions) == {other.number}
    assert cluster.controller.history.events()[-2].text == REASON


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
        ([*RECEIVED, e.Flush(1.0), e.Skipped(1.0, "", sessions=(1,), skips=False)], set()),
    ],
)
def test_what_is_skipped(events, expected):
    marks = list(with_skips(events))
    assert [event for event, _ in marks] == events
    assert {position for position, (_, is_skipped) in enumerate(marks) if is_skipped} == expected


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


def bug_in_a_check(monkeypatch: pytest.MonkeyPatch, kind: type, of: Session) -> None:
    def check(session: Session, *arguments: object) -> None:
        if session.number == of.number:
            raise KeyError("a dtype")

    monkeypatch.setitem(PROXIES, kind, check)


def test_a_bug_in_the_checks_of_a_message_that_waited_ends_only_its_session(monkeypatch):
    cluster = Play("1x1x2")
    one, other = cluster.open(), cluster.open()
    bug_in_a_check(monkeypatch, m.Await, one)
    large = m.Release(tuple(range(1000, 3000)))
    for session in (one, other):
        cluster.proxy(session.number, large)
        cluster.proxy(session.number, m.Await(7, ()))
    assert cluster.controller.has_work, "the messages wait"
    for _ in range(50):
        cluster.event(e.Flush(cluster.now))
    ((bug, connections, sessions),) = cluster.controller.bugs()
    assert (connections, sessions) == ((), (one.number,))
    assert bug.reason.startswith("Await: KeyError: 'a dtype'")
    assert "in check" in bug.trace
    restored = load_controller(dumped(cluster.controller))
    assert restored.bugs() == cluster.controller.bugs(), "the next process ends the session, if this one cannot"
    cluster.event(e.Skipped(cluster.now, bug.reason, connections, sessions, skips=False))
    (closing,) = [each for each in cluster.outbox() if isinstance(each, m.Closing)]
    assert bug.reason in closing.status.message
    cluster.flush()
    assert one.number not in cluster.controller.sessions
    assert other.number in cluster.controller.sessions
    assert not cluster.controller.bugs()
    assert not cluster.controller.has_work


def test_a_session_that_closes_by_itself_leaves_no_bug(monkeypatch):
    cluster = Play("1x1x2")
    one = cluster.open()
    bug_in_a_check(monkeypatch, m.Await, one)
    cluster.proxy(one.number, m.Release(tuple(range(1000, 3000))))
    cluster.proxy(one.number, m.Await(7, ()))
    for _ in range(50):
        cluster.event(e.Flush(cluster.now))
    assert cluster.controller.bugs()
    cluster.close(one.number)
    cluster.flush()
    assert not cluster.controller.bugs()
    assert not cluster.controller.has_work


# ---- with tenants, a bug is charged to the tenant whose messages cause it


def skip_for(cluster: Play, *sessions: Session, **more: object) -> list[object]:
    """Skip a turn that contained messages of these sessions, at which the controller failed.

    Return the messages it sends.
    """
    of = cluster.controller.connections.sessions
    cluster.event(e.Skipped(cluster.now, REASON, **{"suspects": tuple(of[each.number] for each in sessions)} | more))  # type: ignore[arg-type]
    return cluster.outbox()


def fail_at(cluster: Play, token: str, times: int) -> None:
    """Let the controller fail at messages of new sessions of a tenant."""
    for _ in range(times):
        session = cluster.open(token=token)
        skip(cluster, cluster.controller.connections.sessions[session.number])


def refusals(cluster: Play, role: str, token: str) -> list[str]:
    cluster.outbox()
    cluster.connect(role, token=token)
    return [each.status.message for each in cluster.outbox() if isinstance(each, m.Refused)]


def test_a_tenant_at_whose_messages_the_controller_failed_again_and_again_is_suspended():
    cluster = shared()
    alice, bob = cluster.open(token="alice"), cluster.open(token="bob")
    fail_at(cluster, "alice", MAX_CRASHES - 1)
    assert alice.number in cluster.controller.sessions
    assert refusals(cluster, "operator", "alice") == []
    fail_at(cluster, "alice", 1)
    assert alice.number not in cluster.controller.sessions
    assert bob.number in cluster.controller.sessions
    for role in ("proxy", "operator"):
        (text,) = refusals(cluster, role, "alice")
        assert text.startswith(f"tenant alice cannot open sessions for another {FIRST_SUSPENSION_SECONDS:.0f} s: ")
    assert refusals(cluster, "proxy", "bob") == []
    cluster.now += FIRST_SUSPENSION_SECONDS
    assert cluster.open(token="alice").number in cluster.controller.sessions


def test_a_suspension_outlives_a_restart_of_the_controller():
    cluster = shared()
    fail_at(cluster, "alice", MAX_CRASHES)
    cluster.controller = load_controller(dumped(cluster.controller))
    assert cluster.controller.offenses.client_problem(cluster.controller.tenants.by_name["alice"], cluster.now)


def test_a_bug_in_a_turn_is_charged_if_messages_of_one_tenant_came_in_it():
    cluster = shared()
    alice, second, bob = (cluster.open(token=token) for token in ("alice", "alice", "bob"))
    root, controller = cluster.open(token="root"), cluster.controller
    suspects = [(alice, bob), (alice, root), (root,), (), (alice,), (alice, second)]
    of = controller.connections.sessions
    events = [e.Skipped(0.0, REASON, suspects=tuple(of[each.number] for each in some)) for some in suspects]
    assert [controller.is_charged(each) for each in events] == [False, False, False, False, True, True]
    for _ in range(MAX_CRASHES - 1):
        skip_for(cluster, alice)
    assert set(controller.sessions) >= {alice.number, second.number, bob.number}
    skip_for(cluster, second)
    assert controller.sessions.keys() & {alice.number, second.number, bob.number} == {bob.number}


def test_without_tenants_a_bug_is_charged_to_nobody():
    cluster = joined("1x1x2")
    connection = cluster.controller.connections.sessions[cluster.open().number]
    assert not cluster.controller.is_charged(e.Skipped(0.0, REASON, (connection,)))


def test_a_bug_at_what_a_worker_says_of_a_tenants_session_does_not_count_against_the_island():
    cluster = shared("2x1x1")
    session = cluster.open(token="alice")
    cluster.outbox()
    host = cluster.controller.connections.hosts[1]
    found = skip_for(cluster, connections=(host,), sessions=(session.number,), suspects=())
    assert m.RestartExcused(1) in found
    assert m.RestartExcused(0) not in skip_for(
        cluster, connections=(cluster.controller.connections.hosts[0],), suspects=()
    )
