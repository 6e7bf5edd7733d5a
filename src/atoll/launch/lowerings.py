"""Lower programs in steps, in turns between sessions."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from atoll.errors import Status, StatusError
from atoll.ir.program import Program
from atoll.ir.steps import Steps
from atoll.state.estimates import GangsByKey
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session
from atoll.state.stepped_work import Turns

# A program, and its gangs by their keys in `Estimates`.
Lowered = tuple[RegisteredProgram, GangsByKey]


class Lowering(msgspec.Struct, eq=False):
    """The lowering of a session's program. `begin` holds a copy of the state that the lowering depends on."""

    session: Session
    number: int
    definition: Program
    begin: Callable[[], Steps[Lowered]]
    functions: tuple[str, ...]  # names of the functions that it may call; it holds a reference to each
    done: int = 0  # number of steps
    _steps: Steps[Lowered] | None = None

    def proceed(self, count: int) -> Lowered | Status | None:
        """Do `count` steps. After the last one, return the program, or the reason why it cannot be lowered."""
        if self._steps is None:
            self._steps, count, self.done = self.begin(), count + self.done, 0
        try:
            for _ in range(count):
                next(self._steps)
        except StopIteration as end:
            lowered: Lowered = end.value
            return lowered
        except StatusError as error:
            return error.status
        self.done += count
        return None


class Lowerings:
    """Lowers programs in steps, so that large programs do not delay other sessions. Sessions take turns.

    Meanwhile, later messages of such a session wait in order (`controller.sessions.inboxes`). If a session ends, its
    lowerings are finished and their results dropped: a program that is partly lowered would leave garbage that only a
    full garbage collection frees. A snapshot contains no generators, so a restored lowering first repeats its steps.

    `finished(lowering, result)` is called with the result of each lowering. A bug in a lowering has changed nothing.
    Its session has no turn until it ends: it is in `failed`.
    """

    def __init__(self, finished: Callable[[Lowering, Lowered | Status], None]) -> None:
        self._finished = finished
        self._turns: Turns[Lowering] = Turns()
        self.waiting = self._turns.waiting
        self.failed = self._turns.failed

    def add(self, lowering: Lowering) -> None:
        """Lower a program after the earlier ones of its session."""
        session = lowering.session
        session.in_steps += 1
        self._turns.add(session.number, session.tenant.name, lowering)

    def abandon(self, number: int) -> Collection[Lowering]:
        """Forget the lowerings of a closed session after a bug in one of them, and return them."""
        return self._turns.remove(number)

    def proceed(self, steps: int) -> None:
        """Do `steps` steps for the session whose turn it is."""
        number = self._turns.next()
        if number is None:
            return
        try:
            result = self.waiting[number][0].proceed(steps)
        except Exception as error:
            self._turns.fail(number, error)
            return
        if result is not None:
            finished = self._turns.take(number)
            finished.session.in_steps -= 1
            self._finished(finished, result)
