"""The order of collectives on one host."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.worker.collective_order import CollectiveOrder


def test_one_that_is_parked_holds_up_those_after_it_and_none_before():
    order = CollectiveOrder()
    first, second, third = order.came(), order.came(), order.came()
    order.block(second)
    order.block(third)
    assert order.may_start(first)
    assert order.may_start(second)
    assert not order.may_start(third)
    order.unblock(second)
    assert order.may_start(third)


def test_one_that_was_left_out_holds_up_later_ones_until_it_has_ended_everywhere():
    order = CollectiveOrder()
    first, second = order.came(), order.came()
    order.skip(70, first)
    assert not order.may_start(second)
    assert not order.ended(71)
    assert not order.may_start(second)
    assert order.ended(70)
    assert order.may_start(second)
    assert not order.ended(70)


def test_one_that_was_parked_and_is_left_out_then_still_holds_up_later_ones():
    order = CollectiveOrder()
    first, second = order.came(), order.came()
    order.block(first)
    order.skip(70, first)
    order.unblock(first)
    assert not order.may_start(second)


@given(st.lists(st.sampled_from(["comes", "starts", "is left out", "ends"]), max_size=40), st.data())
def test_what_starts_is_never_before_what_waits(steps: list[str], data: st.DataObject) -> None:
    order = CollectiveOrder()
    waiting: list[int] = []  # blocked or left out
    left_out: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step == "comes":
            index = order.came()
            assert order.may_start(index) == (not waiting)
            if waiting or data.draw(st.booleans()):
                order.block(index)
                waiting.append(index)
        elif step == "starts" and waiting and waiting[0] not in left_out.values():
            assert order.may_start(waiting[0])
            assert not any(map(order.may_start, waiting[1:]))
            order.unblock(waiting.pop(0))
        elif step == "is left out" and waiting:
            index = data.draw(st.sampled_from(waiting))
            if index not in left_out.values():
                order.skip(number, index)
                order.unblock(index)
                left_out[number] = index
        elif step == "ends" and left_out:
            sequence = data.draw(st.sampled_from(sorted(left_out)))
            assert order.ended(sequence)
            waiting.remove(left_out.pop(sequence))
