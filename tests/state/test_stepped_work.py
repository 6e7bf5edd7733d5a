"""The order of turns of sessions, by tenant first."""

from __future__ import annotations

from atoll.state.stepped_work import Turns


def made(*sessions: tuple[int, str]) -> Turns[None]:
    turns: Turns[None] = Turns()
    for number, tenant in sessions:
        turns.add(number, tenant, None)
    return turns


def test_a_tenant_with_many_sessions_has_as_many_turns_as_one_with_few():
    turns = made((1, "ana"), (2, "ana"), (3, "ana"), (4, "ben"))
    assert [turns.next() for _ in range(8)] == [1, 4, 2, 4, 3, 4, 1, 4]


def test_a_session_that_is_not_ready_does_not_use_the_turn_of_its_tenant():
    turns = made((1, "ana"), (2, "ana"), (3, "ben"))
    assert [turns.next(lambda session: session != 1) for _ in range(4)] == [2, 3, 2, 3]
    assert turns.next(lambda session: session > 3) is None


def test_a_removed_session_has_no_turns_and_a_second_item_gives_no_second_turn():
    turns = made((1, "ana"), (1, "ana"), (2, "ben"))
    assert [turns.next() for _ in range(4)] == [1, 2, 1, 2]
    turns.remove(1)
    turns.remove(1)
    assert [turns.next() for _ in range(2)] == [2, 2]
    turns.remove(2)
    assert turns.next() is None


def test_a_session_with_a_bug_has_no_turn_until_it_is_removed():
    turns = made((1, "ana"), (2, "ana"), (3, "ben"))
    turns.fail(turns.next() or 0, ValueError("a bug"))
    turns.take(2)
    assert [turns.next(), turns.next()] == [3, 3]
    turns.remove(3)
    assert turns.next() is None
    assert [bug.reason for bug in turns.failed.values()] == ["ValueError: a bug"]
    turns.remove(1)
    assert turns.failed == {}
    turns.add(1, "ana", None)
    assert turns.next() == 1
