"""When a drain is asked for again that was refused, as a table."""

from __future__ import annotations

from atoll.engines.hosts.machine_drains import AGAIN_SECONDS, MachineDrains
from atoll.errors import OK, Code, Status

NO_ROOM = Status(Code.FAILED_PRECONDITION, "island 0 is the only one that is ready")
IN_USE = Status(Code.FAILED_PRECONDITION, "island 0 is in use: red: no room")


def test_a_drain_that_was_refused_is_asked_for_again_while_a_machine_of_the_island_leaves() -> None:
    drains = MachineDrains()
    assert drains.ask(0)
    assert drains.due(50.0, {0}) == []  # the answer is still to come
    assert drains.answered(NO_ROOM, 100.0) == (0, NO_ROOM.message)
    assert drains.due(100.0 + AGAIN_SECONDS - 0.1, {0}) == []
    assert drains.due(100.0 + AGAIN_SECONDS, {0}) == [0]
    assert drains.due(100.0 + 2 * AGAIN_SECONDS, {0}) == []
    assert drains.answered(OK, 120.0) == (0, "")
    assert drains.due(1000.0, {0}) == []


def test_where_the_machines_are_gone_a_drain_is_not_asked_for_again() -> None:
    drains = MachineDrains()
    drains.ask(0)
    drains.answered(NO_ROOM, 100.0)
    assert drains.due(101.0, set()) == []
    assert drains.due(100.0 + AGAIN_SECONDS, {0}) == []  # the next machine that leaves asks by itself


def test_a_reason_is_given_once() -> None:
    drains = MachineDrains()
    said = []
    for turn, status in enumerate((NO_ROOM, NO_ROOM, IN_USE)):
        drains.ask(0)
        said.append(drains.answered(status, 10.0 * turn)[1])
    assert said == [NO_ROOM.message, "", IN_USE.message]


def test_answers_come_in_the_order_of_what_was_asked_and_an_island_is_asked_for_once() -> None:
    drains = MachineDrains()
    assert [drains.ask(island) for island in (1, 0, 1)] == [True, True, False]
    assert drains.answered(OK, 1.0) == (1, "")
    assert drains.answered(NO_ROOM, 1.0)[0] == 0
