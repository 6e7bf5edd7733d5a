"""The receive window: which transfers may land."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.transfers.receive_window import MAX_EXAMINED, ReceiveWindow, Transfer


def nothing() -> None:
    pass


def test_an_announcement_costs_the_same_however_many_transfers_wait():
    """All sessions share the lock of the inbox, and a client can announce transfers with few bytes."""
    window, examined = ReceiveWindow(10), list[int]()
    for feed in range(1, 1000):
        window.request(feed, Transfer(10, feed, nothing))
        window.admitted((feed,), lambda each: bool(examined.append(each)))
    assert window.waiting == 998
    assert len(examined) <= 999


def test_free_memory_goes_to_one_of_the_first_transfers_that_wait():
    window, landed = ReceiveWindow(10), list[int]()
    first = range(3, 3 + MAX_EXAMINED)
    for feed, nbytes in [(1, 4), (2, 2), *((feed, 9) for feed in first), (1000, 5)]:
        window.request(feed, Transfer(nbytes, 0, lambda feed=feed: landed.append(feed)))
        window.admitted((feed,))
    window.withdraw(2)
    assert window.admitted() == [], "a transfer that fits waits behind the others"
    window.withdraw(1)
    for grant in window.admitted():
        grant()
    assert landed == [3]


STEPS = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 9), st.integers(0, 12), st.integers(0, 4)),
    st.tuples(st.just("land"), st.integers(1, 9), st.integers(0, 12), st.booleans()),
    st.tuples(st.just("take"), st.integers(1, 9)),
    st.tuples(st.just("withdraw"), st.integers(1, 9)),
    st.tuples(st.just("await"), st.integers(1, 9)),
)


@given(st.lists(STEPS, max_size=40))
def test_no_transfer_waits_that_may_land(steps: list[Any]) -> None:
    """It may land if it fits, if a blocked plan awaits it, or if it belongs to the oldest launch."""
    bound, awaited = 10, set[int]()
    window = ReceiveWindow(bound)
    waiting: dict[int, tuple[int, int]] = {}
    landing: dict[int, tuple[int, int]] = {}
    here: dict[int, tuple[int, int]] = {}
    granted: list[int] = []
    for step, feed, *more in steps:
        if step == "request":
            waiting[feed] = (more[0], more[1])
            window.request(feed, Transfer(more[0], more[1], lambda feed=feed: granted.append(feed)))
        elif step == "land":
            window.taken(feed)
            here[feed] = (more[0], landing.pop(feed, (0, 0))[1])
            window.landed(feed, more[0])
        elif step == "take":
            here.pop(feed, None)
            window.taken(feed)
        elif step == "withdraw":
            waiting.pop(feed, None)
            landing.pop(feed, None)
            window.withdraw(feed)
        else:
            awaited.add(feed)
        for grant in window.admitted((feed,), awaited.__contains__):
            grant()
        for each in granted:
            landing[each] = waiting.pop(each)
        granted.clear()
        held = sum(nbytes for some in (landing, here) for nbytes, _ in some.values())
        launches = [launch for some in (waiting, landing, here) for _, launch in some.values() if launch]
        assert (window.held, window.waiting) == (held, len(waiting))
        assert window.is_empty is not (waiting.keys() | landing.keys() | here.keys() > set())
        for each, (nbytes, launch) in waiting.items():
            assert held
            assert held + nbytes > bound
            assert each not in awaited
            assert not launch or launch != min(launches)
