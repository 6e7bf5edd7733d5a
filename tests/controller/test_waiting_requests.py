"""Tests that requests of users' commands take turns: each flush answers one."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.operators.service import MAX_REQUESTS
from atoll.errors import Code
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.stepped_work import TurnFailedError
from tests.controller.play import Play
from tests.controller.test_tenants import shared


def answered(play: Play) -> list[int]:
    """Return the connections that get a report in one flush."""
    actions = play.event(e.Flush(play.now))
    return [each.connection for each in actions if isinstance(each, a.Send) and isinstance(each.message, m.StatusReply)]


def test_each_flush_answers_one_request_of_users_and_tenants_take_turns():
    play = shared()
    first, second, other = (play.connect("operator", token=token) for token in ("alice", "alice", "bob"))
    play.flush()
    for connection in (first, second, other):
        for _ in range(2):
            play.receive(connection, m.StatusRequest())
    assert play.controller.has_work
    assert [answered(play) for _ in range(7)] == [[first], [other], [second], [other], [first], [second], []]
    assert not play.controller.has_work


def test_requests_of_operators_do_not_wait():
    play = shared()
    user, operator = play.connect("operator", token="alice"), play.connect("operator", token="root")
    play.flush()
    for connection in (user, operator, operator):
        play.receive(connection, m.StatusRequest())
    assert answered(play) == [operator, operator, user]


def test_a_command_with_too_many_requests_loses_its_connection():
    play = shared()
    user = play.connect("operator", token="alice")
    play.flush()
    for _ in range(MAX_REQUESTS + 1):
        play.receive(user, m.StatusRequest())
    assert answered(play) == []
    (close,) = [each for each in play.closed if each.connection == user]
    assert "requests of this command are waiting" in close.reason
    assert not play.controller.has_work


def test_requests_of_a_command_that_has_ended_are_dropped():
    play = shared()
    user = play.connect("operator", token="alice")
    play.flush()
    for _ in range(3):
        play.receive(user, m.StatusRequest())
    play.event(e.ConnectionLost(play.now, user, "closed"))
    assert answered(play) == []
    assert not play.controller.has_work


def test_a_bug_at_a_message_that_waited_names_the_connection_that_sent_it(monkeypatch: pytest.MonkeyPatch):
    def bug(*arguments: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("atoll.controller.operators.service.report", bug)
    play = shared()
    user = play.connect("operator", token="alice")
    play.flush()
    play.receive(user, m.StatusRequest())
    other = play.connect("operator", token="bob")
    play.receive(other, m.EndSessionRequest(99))
    for _ in range(3):
        play.event(e.Flush(play.now))
    ((bug, connections, sessions),) = play.controller.bugs()
    assert (connections, sessions) == ((user,), ())
    assert bug.reason.startswith("StatusRequest: KeyError: 'a bug'")
    play.event(e.Skipped(play.now, bug.reason, connections, sessions, skips=False))
    assert user not in play.controller.connections.peers
    assert other in play.controller.connections.peers
    play.flush()
    assert not play.controller.has_work


def test_a_bug_at_a_request_that_changes_state_names_the_connection_that_sent_it(monkeypatch: pytest.MonkeyPatch):
    def bug(*arguments: Any) -> None:
        raise KeyError("a bug")

    play = shared()
    user = play.connect("operator", token="alice")
    play.flush()
    monkeypatch.setattr("atoll.controller.operators.service.OperatorService._check_owner", bug)
    play.receive(user, m.EndSessionRequest(1))
    with pytest.raises(TurnFailedError) as raised:
        play.flush()
    assert raised.value.connections == (user,)
    play.event(e.Skipped(play.now, "a bug", (user,)))
    assert answered(play) == []
    assert not play.controller.has_work


def test_a_report_that_is_too_large_for_a_reply_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.controller.operators.service.MAX_STATUS_BYTES", 100)
    play = shared()
    (reply,) = play.ask(play.connect("operator", token="alice"), m.StatusRequest())
    assert isinstance(reply, m.OperationReply)
    assert reply.status.code == Code.RESOURCE_EXHAUSTED
    assert "a reply at most 100" in reply.status.message
