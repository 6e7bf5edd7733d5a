"""Coroutines in virtual time: a client's program is one, so that it also runs on an asyncio loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from atoll.virtual.clock import VirtualClock

Result = TypeVar("Result")


class Future(Generic[Result]):
    """A value that comes later: the part of `asyncio.Future` that clients use."""

    def __init__(self) -> None:
        self._result: Result
        self._is_done = False
        self._when_done: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: Result) -> None:
        self._result, self._is_done = result, True
        calls, self._when_done = self._when_done, []
        for call in calls:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        if self._is_done:
            call()
        else:
            self._when_done.append(call)

    def __await__(self) -> Generator[Future[Any], None, Result]:
        if not self._is_done:
            yield self
        return self._result


class Task(Future[Result]):
    """Runs a coroutine, which goes on as soon as the future that it awaits has its result.

    It may await futures of this module only. The clock's `run_until` raises what it raises.
    """

    def __init__(self, clock: VirtualClock, work: Coroutine[Any, Any, Result]) -> None:
        super().__init__()
        self._clock = clock
        self._work = work
        clock.call_soon(self._step)

    def result(self) -> Result:
        """The coroutine's result; only of a task that is done."""
        return self._result

    def _step(self) -> None:
        try:
            awaited = self._work.send(None)
        except StopIteration as end:
            self.set_result(end.value)
            return
        awaited.when_done(lambda: self._clock.call_soon(self._step))
