"""Tests of `atoll check`: it names contradictions, and ignores messages in transit."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import COPY_HANDLES, LOOP_HANDLES
from atoll.state.buffer_directory import Entry
from atoll.telemetry.consistency import CHECK_SECONDS, contradictions
from tests.controller.play import Play


@pytest.fixture
def play() -> Play:
    """Return a session on one host, with one complete array and one that is being made."""
    play = Play("1x1x1", device_memory=1000)
    play.with_call()
    play.array(10)
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.flush()
    return play


def stores(*contents: m.StoreContent) -> m.StoresReported:
    return m.StoresReported(1, contents)


def checked(play: Play, *contents: m.StoreContent, held: dict[int, bool] | None = None) -> m.CheckReply:
    """Return the reply to an operator if the host has these stores and the proxy knows these arrays."""
    play.operator(m.CheckRequest())
    play.flush()
    play.worker(0, stores(*contents))
    play.proxy(play.session, m.HandlesReported(1, held))
    (reply,) = [message for message in play.outbox() if isinstance(message, m.CheckReply)]
    return reply


@pytest.mark.parametrize("handles", [(10,), (10, 11)])
def test_a_host_that_has_what_it_is_to_have_agrees(play, handles):
    reply = checked(play, m.StoreContent(play.session, handles))
    assert reply == m.CheckReply((), (), 2, 1)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([(1, (11,))], "host 0 lacks 1 array (10) of session 1"),
        ([(1, (10, 12, 13))], "host 0 has 2 arrays (12, 13) of session 1, unknown to the controller"),
        ([(1, (10,)), (7, ())], "host 0 has a store of session 7, which is not open"),
        ([], "host 0 has no store of session 1, which is open"),
    ],
)
def test_what_disagrees_is_named(play, content, text):
    reply = checked(play, *(m.StoreContent(session, handles) for session, handles in content))
    assert reply.differences == (text,)


def test_a_host_that_has_yet_to_do_something_may_have_more(play):
    assert checked(play, m.StoreContent(play.session, (10, 12), is_busy=True)).differences == ()


def test_a_store_that_goes_once_what_is_before_that_has_ended_is_no_difference(play):
    closed = m.StoreContent(7, (3,), is_busy=True)
    assert checked(play, m.StoreContent(play.session, (10,)), closed).differences == ()


def test_what_goes_is_gone_before_a_host_looks(play):
    play.worker(0, m.Done(((1, 5, 9),)))
    play.proxy(play.session, m.Release((10,)))
    play.operator(m.CheckRequest())
    kinds = [type(message) for message in play.outbox() if isinstance(message, m.Free | m.ReportStores)]
    assert kinds == [m.Free, m.ReportStores]


def test_a_host_that_does_not_answer_is_named(play):
    play.operator(m.CheckRequest())
    play.flush()
    play.tick(CHECK_SECONDS + 1.0)
    (reply,) = [message for message in play.outbox() if isinstance(message, m.CheckReply)]
    assert reply.differences == (
        "host 0 has not answered within 5 s",
        "the proxy of session 1 has not answered within 5 s",
    )


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({10: False}, "the proxy of session 1 lacks 1 array (11) that it has not released"),
        (
            {10: False, 11: False, 12: False},
            "the proxy of session 1 has 1 array (12) that the controller does not know",
        ),
    ],
)
def test_a_proxy_that_knows_other_arrays_is_named(play, held, text):
    assert checked(play, m.StoreContent(play.session, (10,)), held=held).differences[0].startswith(text)


def test_a_proxy_knows_arrays_that_failed_before_they_were_launched_and_none_of_the_controllers_own(play):
    entries = play.controller.sessions[play.session].directory
    entries.add(COPY_HANDLES.start + 1, Entry((), 0))  # a copy of an array that moves
    entries.add(LOOP_HANDLES.start + 1, Entry((), 0))  # a value that a loop carries
    held = {10: False, 11: False, 12: True}
    assert checked(play, m.StoreContent(play.session, (10,)), held=held).differences == ()


def test_what_a_proxy_has_said_before_it_answers_counts(play):
    play.operator(m.CheckRequest())
    play.flush()
    play.worker(0, stores(m.StoreContent(play.session, (10,))))
    play.proxy(play.session, m.Release((10,)))
    play.proxy(play.session, m.HandlesReported(1, {11: False}))
    (reply,) = [message for message in play.outbox() if isinstance(message, m.CheckReply)]
    assert reply.differences == ()


def test_a_proxy_that_is_away_or_ends_is_not_waited_for(play):
    play.operator(m.CheckRequest())
    play.worker(0, stores(m.StoreContent(play.session, (10,))))
    play.flush()
    play.close(play.session)
    assert any(isinstance(message, m.CheckReply) for message in play.outbox())
    other = play.open(43).number
    play.event(e.ConnectionAway(play.now, play.controller.connections.sessions[other]))
    play.flush()
    play.operator(m.CheckRequest())
    assert not any(isinstance(message, m.ReportHandles) for message in play.outbox())


def spoil_ledger(controller: Any) -> None:
    controller.ledger.take((((0, 0), 5),))


def spoil_entry(controller: Any) -> None:
    controller.sessions[1].directory.nbytes += 1


def spoil_uses(controller: Any) -> None:
    controller.sessions[1].directory.entries[10].uses = -1


def spoil_gangs(controller: Any) -> None:
    controller.launches.in_flight.clear()


def spoil_tenant(controller: Any) -> None:
    controller.tenants.default.sessions = 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_ledger, "bytes in use on device 0 of host 0, but buffers and gangs hold"),
        (spoil_entry, "bytes of arrays, but has"),
        (spoil_uses, "array 10 of session 1 is needed by -1 gangs"),
        (spoil_gangs, "unbounded gangs, but has (0, 0, 0)"),
        (spoil_tenant, "counts 0 sessions, but has 1"),
    ],
)
def test_a_controller_that_contradicts_itself_says_so(play, spoil, text):
    assert contradictions(play.controller) == []
    spoil(play.controller)
    assert any(text in each for each in contradictions(play.controller))
