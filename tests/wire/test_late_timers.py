"""Tests of timers that let their process read before a late deadline counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.wire.late_timers import LATE_SECONDS, READ_SECONDS, ReadingTimer, call_later
from tests.wire.resumption.network import pass_unnoticed, play, until

STOPPED_SECONDS = LATE_SECONDS + 4.0


def arrives(then: Callable[[], None], turns: int = 20) -> None:
    """Call `then` after some turns of the loop, as a message on a connection that was accepted meanwhile is read."""
    asyncio.get_running_loop().call_soon(arrives, then, turns - 1) if turns else then()


def test_a_timer_in_time_calls_at_once():
    async def main() -> None:
        loop, called = asyncio.get_running_loop(), list[float]()
        due = loop.time() + 3.0
        ReadingTimer(loop, due, lambda: called.append(loop.time()))
        await until(lambda: bool(called))
        assert called[0] - due < READ_SECONDS / 2

    play(main)


def test_a_late_timer_lets_the_process_read_first():
    async def main() -> None:
        loop, happened = asyncio.get_running_loop(), list[str]()
        call_later(loop, 1.0, lambda: happened.append("deadline"))
        pass_unnoticed(STOPPED_SECONDS)
        loop.call_soon(arrives, lambda: happened.append("message"))
        await until(lambda: len(happened) == 2)
        assert happened == ["message", "deadline"]

    play(main)


def test_a_timer_waits_once_if_the_loop_is_always_late():
    async def main() -> None:
        loop, called = asyncio.get_running_loop(), list[float]()
        call_later(loop, 1.0, lambda: called.append(loop.time()))
        turns = 0
        while not called:
            pass_unnoticed(STOPPED_SECONDS)
            await asyncio.sleep(0)
            turns += 1
        assert turns < 5

    play(main)


def test_a_timer_that_is_cancelled_while_it_waits_calls_nothing():
    async def main() -> None:
        called: list[bool] = []
        timer = call_later(asyncio.get_running_loop(), 1.0, lambda: called.append(True))
        pass_unnoticed(STOPPED_SECONDS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        timer.cancel()
        await asyncio.sleep(10.0)
        assert not called

    play(main)
