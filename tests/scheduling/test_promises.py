"""Results that take as long as they like: what needs them waits, aside from its session's line where it can."""

from __future__ import annotations

from atoll.scheduling.promises import await_promises
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.tickets import Gang, Promise, Ticket


class Launches:
    """Launches of one session on one island."""

    def __init__(self) -> None:
        self.scheduler = Scheduler[str](1, 8)

    def launch(
        self, number: int, *inputs: Promise[str] | None, python: bool = False, tickets: int = 1
    ) -> Promise[str] | None:
        made = [Ticket[str](number + i, 1) for i in range(tickets)]
        for ticket in made:
            weight = 0 if python else 1
            ticket.gangs = (Gang(ticket.number, 0, ticket, "run", 0 if python else 200_000, weight=weight),)
        promise = await_promises(made, inputs, colocated=python)
        for ticket in made:
            self.scheduler.enqueue(ticket)
        return promise

    def started(self) -> list[int]:
        found = []
        while (gang := self.scheduler.next(0)) is not None:
            found.append(gang.ticket.number)
        return found


def test_what_needs_only_a_promised_result_lets_its_session_go_on():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise)
    launches.launch(3, None)
    assert launches.started() == [1, 3]
    launches.scheduler.keep(promise)
    assert launches.started() == [2]


def test_what_also_needs_something_else_waits_in_line():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise, None)
    launches.launch(3, None)
    assert launches.started() == [1]
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3]


def test_launches_of_several_nodes_wait_in_line():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise, tickets=2)
    launches.launch(4, None)
    assert launches.started() == [1]
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3, 4]


def test_what_a_launch_aside_gives_is_promised_in_its_turn():
    launches = Launches()
    promise = launches.launch(1, python=True)
    second = launches.launch(2, promise)
    launches.launch(3, second)
    launches.launch(4, None)
    assert launches.started() == [1, 4]
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3]


def test_a_launch_aside_joins_its_line_by_its_age_so_that_nothing_waits_for_what_is_behind_it():
    launches = Launches()
    promise = launches.launch(1, python=True)
    second = launches.launch(2, promise)
    launches.launch(3, second, None)  # at the head of the line, where it waits for 2
    assert launches.started() == [1]
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3]


def test_two_that_need_one_result_keep_their_order():
    """The younger one may consume the array."""
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise)
    launches.launch(3, promise)
    launches.started()
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3]


def test_results_of_two_calls_are_awaited_in_line():
    """One of them may be there, and consumed by a younger launch, before the other is."""
    launches = Launches()
    first, second = launches.launch(1, python=True), launches.launch(2, python=True)
    launches.launch(3, first, second)
    launches.scheduler.keep(first)
    launches.launch(4, None)
    assert launches.started() == [1, 2]
    launches.scheduler.keep(second)
    assert launches.started() == [3, 4]


def test_a_call_of_python_follows_the_call_that_gives_its_argument_at_once():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise, python=True)
    assert launches.started() == [1, 2]


def test_a_call_of_python_waits_in_line_for_a_launch_aside():
    launches = Launches()
    promise = launches.launch(1, python=True)
    second = launches.launch(2, promise)
    launches.launch(3, second, python=True)
    launches.launch(4, python=True)
    assert launches.started() == [1]
    launches.scheduler.keep(promise)
    assert launches.started() == [2, 3, 4]


def test_any_number_of_python_calls_leaves_room_for_others():
    launches = Launches()
    for number in range(1, 100):
        launches.launch(number, python=True)
    launches.launch(100, None)
    assert launches.started() == list(range(1, 101))
    assert launches.scheduler.statistics(0).in_flight == 1


def test_a_session_that_ends_takes_what_stands_aside_with_it():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise)
    assert launches.started() == [1]
    assert [ticket.number for ticket in launches.scheduler.drop_session(1)] == [2]
    launches.scheduler.keep(promise)
    assert launches.started() == []
    assert launches.scheduler.tickets(0) == []


def test_a_launch_aside_that_is_dropped_never_starts():
    launches = Launches()
    promise = launches.launch(1, python=True)
    launches.launch(2, promise)
    launches.started()
    (ticket,) = launches.scheduler.tickets(0)
    launches.scheduler.drop(ticket)
    launches.scheduler.keep(promise)
    assert launches.started() == []


def test_a_chain_as_long_as_a_window_starts_in_order_once_its_first_promise_is_kept():
    launches = Launches()
    first = promise = launches.launch(1, python=True)
    for number in range(2, 2002):
        promise = launches.launch(number, promise)
    assert launches.started() == [1]
    launches.scheduler.keep(first)
    assert launches.started()[0] == 2
    assert promise is not None
    assert promise.is_kept
