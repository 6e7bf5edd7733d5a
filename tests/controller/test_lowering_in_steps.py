"""Tests that large programs are lowered in steps: other sessions continue, and the session's later messages wait."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from atoll.controller.controller_dumps import load_controller
from atoll.controller.sessions.inboxes import MAX_WAITING
from atoll.errors import OK, Code
from atoll.ir.program import Call, Program
from atoll.ir.validation import MAX_NODES
from atoll.launch import registry
from atoll.launch.registry import SMALL_NODES
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.session.registered_programs import in_parts
from atoll.virtual.host_process import decoded
from tests.controller.dumps import dumped
from tests.controller.play import Play, chain_of, on, runs

NODES = 1000
CREDITS = 9  # steps of a launch with so many nodes


class Blocks:
    """Counts the memory blocks that turns of a play make or free. `limit` is the maximum of a turn so far."""

    def __init__(self) -> None:
        self.limit = 0
        self._before = sys.getallocatedblocks()

    def turns(self, play: Slow) -> None:
        """Run turns until no work is left."""
        while True:
            play.turn()
            after = sys.getallocatedblocks()
            self.limit, self._before = max(self.limit, abs(after - self._before)), after
            if not play.controller.has_work:
                return


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector from freeing anything."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Slow(Play):
    """Session with a function, a small program 1 and array 10, beside another session."""

    def __init__(self) -> None:
        super().__init__("1x1x2")
        self.with_call()
        self.array(10)
        self.other = self.open(43, "other.py").number
        self.flush()

    def turn(self) -> list[Any]:
        """Return the messages that are sent at one flush."""
        return [each.message for each in self.event(e.Flush(self.now)) if isinstance(each, a.Send)]

    def register(self, number: int, program: Program) -> None:
        for message in in_parts(number, program):
            self.proxy(self.session, message)


def test_a_large_program_is_lowered_over_many_flushes_and_then_launched():
    play = Slow()
    play.register(5, chain_of(NODES))
    play.proxy(play.session, m.Launch(5, (10,), (11,), (), credits=CREDITS))
    turns, sent = 0, []
    while not any(isinstance(each, m.RegisterPlan) for each in sent):
        assert not runs(sent)
        sent += play.turn()
        turns += 1
    sent += play.outbox()
    assert turns > NODES // e.STEPS_PER_FLUSH
    (plan,) = [each for each in sent if isinstance(each, m.RegisterPlan)]
    assert len(decoded(plan).definition.segments) == NODES
    assert [each.plan for each in runs(sent)] == [plan.plan]


def test_other_sessions_are_served_meanwhile():
    play = Slow()
    play.register(5, chain_of(NODES))
    play.turn()
    assert play.controller.has_work
    play.proxy(play.other, m.Await(7, ()))
    assert m.Awaited(7, OK) in play.turn()
    play.proxy(play.session, m.Await(8, ()))
    assert m.Awaited(8, OK) not in play.turn(), "it comes after the program"
    assert m.Awaited(8, OK) in play.outbox()


def test_the_work_of_one_flush_does_not_grow_with_the_program():
    def steps_of(nodes: int) -> int:
        play = Slow()
        play.register(5, chain_of(nodes))
        while not play.controller.programs.lowerings.waiting:
            play.turn()
        play.turn()
        (waiting,) = play.controller.programs.lowerings.waiting.values()
        return waiting[0].done

    assert steps_of(NODES) == steps_of(4 * NODES) == e.STEPS_PER_FLUSH


def test_a_program_that_cannot_be_lowered_fails_its_launches():
    play = Slow()
    before = set(play.controller.programs.plans)
    missing = Program("missing", (on(0),), (*chain_of(NODES).nodes, Call(77, (0,), (on(0),), (0,))), (NODES + 1,))
    play.register(5, missing)
    play.proxy(play.session, m.Launch(5, (10,), (11,), (), credits=CREDITS))
    play.proxy(play.session, m.Await(8, (11,)))
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert "calls function 77, which is not registered" in awaited.status.message
    assert set(play.controller.programs.plans) == before


def test_what_a_session_leaves_half_lowered_is_dropped():
    play = Slow()
    play.register(5, chain_of(NODES))
    play.turn()
    play.close(play.session)
    play.flush()
    assert not play.controller.has_work
    assert play.controller.programs.plans == {}
    assert play.controller.functions.users == {}


def test_a_program_that_is_released_meanwhile_is_dropped():
    play = Slow()
    before = set(play.controller.programs.plans)
    play.register(5, chain_of(NODES))
    play.proxy(play.session, m.ReleaseProgram(5))
    play.flush()
    assert set(play.controller.programs.plans) == before


def test_a_session_with_too_many_waiting_messages_ends():
    play = Slow()
    play.register(5, chain_of(NODES))
    for _ in range(MAX_WAITING + 1):
        play.proxy(play.session, m.Release((99,)))
    closings = [each for each in play.outbox() if isinstance(each, m.Closing)]
    assert [each.status.code for each in closings] == [Code.RESOURCE_EXHAUSTED]
    assert play.session not in play.controller.sessions


def test_a_controller_that_is_restored_goes_on_with_the_same_messages():
    play = Slow()
    play.register(5, chain_of(NODES))
    play.proxy(play.session, m.Launch(5, (10,), (11,), (), credits=CREDITS))
    for _ in range(10):
        play.turn()
    restored = load_controller(dumped(play.controller))
    while play.controller.has_work:
        event = e.Flush(play.now)
        assert restored.handle(event) == play.controller.handle(event)
    assert not restored.has_work


@pytest.mark.parametrize("function", [1, 77])
def test_a_lowering_leaves_next_to_nothing_for_the_garbage_collector(function):
    """The collector would need long for all the objects of a lowering."""
    play = Slow()
    program = Program("f", (on(0),), (*chain_of(NODES).nodes, Call(function, (0,), (on(0),), (0,))), (NODES + 1,))
    assert len(program.nodes) > SMALL_NODES
    play.register(5, program)
    gc.collect()
    gc.disable()
    try:
        while play.controller.has_work:
            play.turn()
        assert gc.collect() < NODES // 10
    finally:
        gc.enable()


# ---- parts


def test_a_program_in_parts_is_the_same_program():
    play = Slow()
    program = chain_of(NODES)
    messages = list(in_parts(5, program))
    assert [len(each.definition.nodes) for each in messages] == [256, 256, 256, 232]
    for message in messages:
        play.send(message)
    assert play.controller.sessions[play.session].definitions[5] == program
    assert not play.controller.sessions[play.session].parts


def closing_of(play: Play, *messages: Any) -> str:
    for message in messages:
        play.proxy(play.session, message)
    (closing,) = [each for each in play.outbox() if isinstance(each, m.Closing)]
    assert play.session not in play.controller.sessions
    return str(closing.status.message)


def test_more_nodes_than_a_message_may_have_are_refused():
    text = closing_of(Slow(), m.RegisterProgram(5, chain_of(257)))
    assert text == "RegisterProgram.definition.nodes is '257 entries': expected at most 256 in one message"


@pytest.mark.thorough
def test_more_nodes_than_a_program_may_have_are_refused_with_the_part_that_has_them():
    node = Call(1, (0,), (), (0,))
    part = m.ProgramPart(5, Program("f", (on(0),), (node,) * 256, ()))
    text = closing_of(Slow(), *([part] * (MAX_NODES // 256 + 1)))
    assert f"nodes has more than {MAX_NODES} entries" in text


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (Program("", (), (Call(1, (9,), (on(0),), (0,)),), ()), "definition.nodes[1]: program 'f' uses value 9"),
        (Program("", (), (Call(1, (0,), (on(9),), (0,)),), ()), "definition.nodes[1].outputs[0].sharding.devices"),
        (Program("", (), (), (3,)), "definition.results[0] is 3: the program defines 2 values"),
    ],
)
def test_a_part_is_checked_as_what_follows_the_ones_before(second, text):
    first = m.ProgramPart(5, Program("f", (on(0),), (Call(1, (0,), (on(0),), (0,)),), ()))
    assert text in closing_of(Slow(), first, m.RegisterProgram(5, second))


def test_no_flush_makes_or_frees_more_objects_than_its_steps_do():
    """Count the memory blocks that a flush makes or frees, because durations depend on the machine."""

    def max_blocks(nodes: int) -> int:
        play = Slow()
        play.register(5, chain_of(nodes))
        assert play.controller.has_work
        blocks = Blocks()
        blocks.turns(play)
        return blocks.limit

    with without_collector():
        assert max_blocks(4 * NODES) < 2 * max_blocks(NODES)


def test_a_bug_in_a_pass_ends_the_session_and_is_not_met_again(monkeypatch):
    steps = registry.register_in_steps

    def faulty(*arguments: Any) -> Iterator[None]:
        for each in steps(*arguments):
            yield each
            raise KeyError("a bug")

    play = Slow()
    monkeypatch.setattr(registry, "register_in_steps", faulty)
    play.register(5, chain_of(NODES))
    while not play.controller.bugs():
        play.turn()
    ((bug, connections, sessions),) = play.controller.bugs()
    assert sessions == (play.session,)
    assert bug.reason.startswith("KeyError: 'a bug'")
    assert "faulty" in bug.trace
    play.turn()
    assert play.controller.bugs() == [(bug, connections, sessions)], "no part is left"
    play.event(e.Skipped(play.now, bug.reason, connections, sessions, skips=False))
    assert any(isinstance(each, m.Closing) for each in play.outbox())
    while play.controller.has_work:
        play.turn()
    assert set(play.controller.sessions) == {play.other}
