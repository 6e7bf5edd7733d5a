"""Tests of outgoing messages: launches include releases, which do not overtake other messages, and the window counts
credits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.protocol import messages as m
from atoll.session.outgoing_messages import LaunchWindow, OutgoingMessages


class Sent:
    """Control connection, and a clock whose timers the test triggers."""

    def __init__(self, has_clock: bool = True) -> None:
        self.messages: list[Any] = []
        self.timers: list[Callable[[], None]] = []
        self.outgoing = OutgoingMessages(self, self.later if has_clock else None)

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds <= 1e-3
        self.timers.append(call)

    def launch(self) -> None:
        self.outgoing.launch(1, (10,), (11,), (), 0, 1)

    def ring(self) -> None:
        timers, self.timers = self.timers, []
        for call in timers:
            call()


def test_what_is_released_goes_along_with_the_next_launch():
    sent = Sent()
    sent.outgoing.release((1, 2), delete=False)
    sent.outgoing.release((3,), delete=False)
    sent.launch()
    sent.launch()
    assert [message.released for message in sent.messages] == [(1, 2, 3), ()]


def test_it_goes_by_itself_where_no_launch_comes():
    sent = Sent()
    sent.outgoing.release((1,), delete=False)
    assert sent.messages == []
    sent.ring()
    assert sent.messages == [m.Release((1,))]
    sent.ring()
    assert len(sent.messages) == 1


def test_one_timer_runs_at_a_time():
    sent = Sent()
    for handle in range(1, 10):
        sent.outgoing.release((handle,), delete=False)
        sent.launch()
    assert len(sent.timers) == 1
    sent.ring()
    assert all(isinstance(message, m.Launch) for message in sent.messages)
    sent.outgoing.release((10,), delete=False)
    sent.ring()
    assert sent.messages[-1] == m.Release((10,))


def test_no_other_message_overtakes_it():
    sent = Sent()
    sent.outgoing.release((1,), delete=False)
    sent.outgoing.send(m.Pong(0.0, 0))
    assert sent.messages == [m.Release((1,)), m.Pong(0.0, 0)]
    sent.outgoing.release((2,), delete=False)
    sent.outgoing.release((3,), delete=True)
    assert sent.messages[2:] == [m.Release((2,)), m.Release((3,), delete=True)]


def test_so_much_waits_and_no_more():
    sent = Sent()
    for handle in range(1000):
        sent.outgoing.release((handle,), delete=False)
    waiting = 1000 - sum(len(message.handles) for message in sent.messages)
    assert 0 <= waiting < 256


def test_without_a_clock_nothing_waits():
    sent = Sent(has_clock=False)
    sent.outgoing.release((1,), delete=False)
    assert sent.messages == [m.Release((1,))]


def test_a_long_list_goes_in_messages_that_the_controller_takes():
    sent = Sent()
    handles = tuple(range(2 * m.MAX_HANDLES + 1))
    sent.outgoing.release((7,), delete=False)
    sent.outgoing.release(handles, delete=False)
    assert [len(message.handles) for message in sent.messages] == [1, m.MAX_HANDLES, m.MAX_HANDLES, 1]
    assert sum((message.handles for message in sent.messages[1:]), ()) == handles


def test_a_launch_releases_no_more_than_the_controller_takes():
    sent = Sent()
    for length in (255, 256, 255):
        sent.outgoing.release(tuple(range(length)), delete=False)
    sent.launch()
    assert all(len(message.released) <= m.MAX_RELEASED for message in sent.messages if isinstance(message, m.Launch))
    assert (
        sum(len(getattr(message, "handles", ())) for message in sent.messages) + len(sent.messages[-1].released) == 766
    )


def test_a_window_is_full_when_all_of_its_credits_are_taken():
    window = LaunchWindow(4)
    window.take(3)
    assert not window.is_full
    window.take(1)
    assert window.is_full
    window.give_back(1)
    assert not window.is_full


@pytest.mark.parametrize(("credits", "limit"), [(1, 3), (4, 0), (9, 0)])
def test_a_launch_that_is_larger_than_the_window_fits_when_it_is_empty(credits, limit):
    assert LaunchWindow(4).limit_for(credits) == limit


def test_those_who_wait_are_called_once_when_enough_has_come_back():
    window, calls = LaunchWindow(8), list[str]()
    window.take(8)
    window.when_at_most(4, lambda: calls.append("half"))
    window.when_at_most(7, lambda: calls.append("one"))
    window.give_back(1)
    assert calls == ["one"]
    window.give_back(3)
    assert calls == ["one", "half"]
    window.give_back(4)
    assert calls == ["one", "half"]


def test_who_need_not_wait_is_called_at_once():
    window, calls = LaunchWindow(8), list[str]()
    window.when_at_most(0, lambda: calls.append("now"))
    assert calls == ["now"]


def test_the_controllers_own_launches_take_credits_too():
    window = LaunchWindow(2)
    window.give_back(-2)
    assert window.is_full
    window.give_back(2)
    assert window.in_flight == 0


def test_one_who_waits_may_take_credits_and_wait_again():
    window, launched = LaunchWindow(1), list[int]()

    def launch() -> None:
        if window.is_full:
            window.when_at_most(0, launch)
            return
        window.take(1)
        launched.append(len(launched))

    for _ in range(3):
        launch()
    assert launched == [0]
    window.give_back(1)
    assert launched == [0, 1]
    window.give_back(1)
    assert launched == [0, 1, 2]
