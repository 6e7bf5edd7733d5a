"""The launch window: credits that are taken and come back."""

from __future__ import annotations

import pytest

from atoll.session.window import LaunchWindow


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
