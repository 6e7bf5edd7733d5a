"""Tests of what a controller's process does with a connection, by the connection's first message."""

from __future__ import annotations

import pytest

from atoll.controller_process.incoming_connection import Verdict, verdict_on
from atoll.protocol import messages as m
from atoll.protocol.messages.standby_messages import STANDBY

SUSPICION = "another controller may have taken over"


def hello(role: str) -> m.Hello:
    return m.Hello(m.PROTOCOL, role, "a token", 1, "test", "a test")


@pytest.mark.parametrize("role", ["proxy", "worker", "engine", "agent", STANDBY])
def test_no_peer_is_admitted_while_another_controller_may_have_taken_over(role: str) -> None:
    assert verdict_on(hello(role), suspicion=SUSPICION, resumes=True) is Verdict.PUT_OFF


def test_commands_are_admitted_while_another_controller_may_have_taken_over() -> None:
    assert verdict_on(hello("operator"), suspicion=SUSPICION, resumes=True) is Verdict.ASK


def test_a_first_message_that_is_no_hello_is_for_the_controller_or_put_off() -> None:
    message = m.StatusRequest()
    assert verdict_on(message, suspicion="", resumes=True) is Verdict.ASK
    assert verdict_on(message, suspicion=SUSPICION, resumes=True) is Verdict.PUT_OFF


@pytest.mark.parametrize(("resumes", "verdict"), [(True, Verdict.REPLICATE), (False, Verdict.ASK)])
def test_a_standby_is_served_only_by_a_process_whose_connections_can_be_resumed(
    resumes: bool, verdict: Verdict
) -> None:
    assert verdict_on(hello(STANDBY), suspicion="", resumes=resumes) is verdict


@pytest.mark.parametrize("role", ["proxy", "worker", "engine", "agent", "operator"])
def test_the_controller_decides_on_all_other_peers(role: str) -> None:
    assert verdict_on(hello(role), suspicion="", resumes=True) is Verdict.ASK
