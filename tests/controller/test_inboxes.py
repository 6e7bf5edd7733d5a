"""Tests of inboxes: expensive messages wait in their session's inbox, and each flush handles a few of them."""

from __future__ import annotations

import sys

import msgspec
import pytest

from atoll.controller.sessions.inboxes import MAX_WAITING_NODES
from atoll.errors import OK
from atoll.ir.program import Program
from atoll.ir.validation import MAX_RESULTS
from atoll.launch.compilation import MAX_RECOMPILES
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.session.registered_programs import in_parts
from tests.controller.play import BROKEN, Play, chain_of, on
from tests.controller.test_lowering_in_steps import Slow
from tests.controller.test_tenants import shared

HANDLES = 10_000


def test_each_flush_checks_one_part_of_a_program_whoever_sent_it():
    play = Slow()
    session, other = play.controller.sessions[play.session], play.controller.sessions[play.other]
    for message in list(in_parts(5, chain_of(1000)))[:3]:
        play.proxy(play.session, message)
        play.proxy(play.other, message)
    checked = []
    for _ in range(6):
        play.turn()
        checked.append([sum(len(part.nodes) for part in each.parts.values()) for each in (session, other)])
    assert checked == [[256, 0], [256, 256], [512, 256], [512, 512], [768, 512], [768, 768]]


def test_a_tenant_with_many_sessions_has_no_more_turns_than_another():
    play = shared()
    own = [play.open(token="alice") for _ in range(3)]
    other = play.open(token="bob")
    play.flush()
    for message in list(in_parts(5, chain_of(2000)))[:6]:
        for session in (*own, other):
            play.proxy(session.number, message)
    for _ in range(8):
        play.event(e.Flush(play.now))
    checked = [sum(len(part.nodes) for part in each.parts.values()) // m.MAX_PART_NODES for each in (*own, other)]
    assert checked == [2, 1, 1, 4]


def test_messages_of_a_session_behind_a_part_wait_and_those_of_others_do_not():
    play = Slow()
    for message in in_parts(5, chain_of(1000)):
        play.proxy(play.session, message)
    play.proxy(play.session, m.Await(8, ()))
    play.proxy(play.other, m.Await(7, ()))
    sent = play.turn()
    assert m.Awaited(7, OK) in sent
    assert m.Awaited(8, OK) not in sent
    assert m.Awaited(8, OK) in play.outbox()


def test_a_long_list_of_handles_is_handled_over_several_flushes():
    play = Slow()
    session = play.controller.sessions[play.session]
    handles = tuple(range(100, 100 + HANDLES))
    play.proxy(play.session, m.MakeError(handles, BROKEN))
    assert len(session.directory.entries) < 10
    play.turn()
    assert 100 in session.directory.entries
    assert len(session.directory.entries) < HANDLES // 5
    play.flush()
    assert len(session.directory.entries) > HANDLES
    play.proxy(play.session, m.Release(handles))
    play.proxy(play.session, m.Await(8, (100 + HANDLES - 1,)))
    play.turn()
    assert len(session.directory.entries) > HANDLES // 2
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert "does not exist" in awaited.status.message, "it was released before"
    assert len(session.directory.entries) < 10


def closing_of(play: Play, message: object) -> str:
    play.proxy(play.session, message)
    (closing,) = [each for each in play.outbox() if isinstance(each, m.Closing)]
    return str(closing.status.message)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (m.HandlesReported(1, dict.fromkeys(range(m.MAX_HANDLES_REPORTED + 1), False)), "HandlesReported.handles"),
        (
            m.RegisterProgram(5, Program("f", (on(0),), (), (0,) * (MAX_RESULTS + 1))),
            "the program has 16,385 results: return at most 16,384",
        ),
    ],
)
def test_longer_lists_than_an_honest_proxy_sends_end_the_session(message: object, text: str):
    assert text in closing_of(Slow(), message)


def test_a_function_is_not_compiled_again_without_end():
    play = Slow()
    for feed in range(MAX_RECOMPILES):
        play.proxy(play.session, m.Recompile(1, 5000 + feed))
    assert not [each for each in play.outbox() if isinstance(each, m.Closing)]
    assert "compilations of it wait on host 0" in closing_of(play, m.Recompile(1, 6000))


def test_the_end_of_a_session_frees_what_waits_over_several_flushes():
    """Count the memory blocks that an event frees, because durations depend on the machine."""
    play = Slow()
    for number in range(5, 13):
        for message in in_parts(number, msgspec.msgpack.decode(msgspec.msgpack.encode(chain_of(1000)), type=Program)):
            play.proxy(play.session, message)
    for _ in range(10):
        play.turn()
    before = sys.getallocatedblocks()
    play.close(play.session)
    del message
    assert before - sys.getallocatedblocks() < 4000
    play.flush()
    assert before - sys.getallocatedblocks() > 20_000


def test_a_session_whose_programs_wait_with_too_many_nodes_ends():
    play = Slow()
    (part, *_) = in_parts(5, chain_of(1000))
    for number in range(MAX_WAITING_NODES // m.MAX_PART_NODES):
        play.proxy(play.session, msgspec.structs.replace(part, program=number))
    assert play.session in play.controller.sessions
    assert "nodes of this session's programs are waiting" in closing_of(play, part)


@pytest.mark.parametrize(("nodes", "at_once"), [(1, 4), (16, 1)])
def test_of_many_small_programs_few_are_lowered_in_one_turn(nodes: int, at_once: int):
    play = Slow()
    session = play.controller.sessions[play.session]
    known = len(session.programs)
    for number in range(100, 120):
        play.proxy(play.session, m.RegisterProgram(number, chain_of(nodes)))
    play.proxy(play.session, m.Await(8, ()))
    assert len(session.programs) == known + at_once
    sent = play.turn()
    assert len(session.programs) <= known + at_once + 4
    assert m.Awaited(8, OK) not in sent
    assert m.Awaited(8, OK) in play.outbox()
    assert len(session.programs) == known + 20
    play.proxy(play.session, m.RegisterProgram(120, chain_of(nodes)))
    assert len(session.programs) == known + 21


def launches(count: int, nodes: int) -> tuple[Slow, list[m.Launch]]:
    """Return a session with program 5 of `nodes` nodes, and launches of this program that fit into the session's
    window.
    """
    play = Slow()
    play.register(5, chain_of(nodes))
    (plan,) = [each for each in play.outbox() if isinstance(each, m.RegisterPlan)]
    play.worker(0, m.PlanRegistered(plan.plan))
    play.flush()
    return play, [m.Launch(5, (10,), (1000 + i,), ()) for i in range(count)]


def enqueued(play: Slow) -> int:
    """Return the number of handles that launches have made."""
    return sum(handle >= 1000 for handle in play.controller.sessions[play.session].directory.entries)


@pytest.mark.thorough
def test_launches_of_many_nodes_in_one_turn_wait_for_the_next_ones():
    play, messages = launches(100, 100)
    for message in messages:
        play.proxy(play.session, message)
    assert 10 <= enqueued(play) <= 25
    play.proxy(play.session, m.Await(7, (1099,)))
    play.turn()
    assert enqueued(play) <= 30, "each flush handles a few launches"
    play.flush()
    assert enqueued(play) == 100, "all launches run, in order"


def test_the_bound_on_one_turn_is_one_over_all_sessions_and_others_get_their_turn():
    play = shared()
    own = [play.open(token="alice") for _ in range(8)]
    other = play.open(token="bob")
    play.flush()
    for session in own:
        for number in range(100):
            play.proxy(session.number, m.Await(100 + number, ()))
    play.proxy(other.number, m.Await(7, ()))
    answers = [[each.message for each in play.event(e.Flush(play.now)) if isinstance(each, a.Send)] for _ in range(3)]
    awaited = [sum(isinstance(each, m.Awaited) for each in sent) for sent in answers]
    assert awaited[0] < 600
    assert max(awaited[1:]) <= 8
    assert any(m.Awaited(7, OK) in sent for sent in answers), "it does not wait behind the 300 messages"


def test_launches_that_fit_into_a_turn_are_handled_at_once():
    play, messages = launches(100, 1)
    for message in messages:
        play.proxy(play.session, message)
    assert enqueued(play) == 100
