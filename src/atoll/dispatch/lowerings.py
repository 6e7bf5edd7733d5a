"""Programs that are being lowered in steps, so that no other session notices how large they are.

Each flush of the controller does some steps for one session; sessions take turns (`scheduling.turns`). Meanwhile later
messages of such a session wait, in order (`controller.sessions.inboxes`). A session that ends does not end its
lowerings, whose results are dropped: a program that is half lowered would leave garbage that only a full garbage
collection frees.

Pure. A snapshot has no generators: a restored lowering first repeats the steps that it had done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from atoll.errors import Status, StatusError
from atoll.ir.program import Program
from atoll.ir.steps import Steps
from atoll.scheduling.estimates import GangsByKey
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.session import Session
from atoll.scheduling.turns import TurnFailedError, Turns

# A program, and its gangs by their keys in `Estimates`.
Lowered = tuple[RegisteredProgram, GangsByKey]

# Programs of up to so many nodes are lowered at once.
SMALL_NODES = 16


@dataclass(eq=False)
class Lowering:
    """The lowering of a program of a session, with all that it depends on as it was at the beginning."""

    session: Session
    number: int
    definition: Program
    begin: Callable[[], Steps[Lowered]]
    functions: tuple[str, ...]  # the workers' names of those that it may call, which it refers to
    done: int = 0  # steps
    _steps: Steps[Lowered] | None = None

    def proceed(self, count: int) -> Lowered | Status | None:
        """Do so many steps. Return the program, or the reason why it cannot be lowered, after the last one."""
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_steps": None}


class Lowerings:
    """Those under way, by session. `finished(lowering, result)` takes what comes of each."""

    def __init__(self, finished: Callable[[Lowering, Lowered | Status], None]) -> None:
        self._finished = finished
        self._turns: Turns[Lowering] = Turns()
        self.waiting = self._turns.waiting

    def add(self, lowering: Lowering) -> None:
        """Lower this program after the others of its session."""
        session = lowering.session
        session.in_steps += 1
        self._turns.add(session.number, session.tenant.name, lowering)

    def abandon(self, number: int) -> Collection[Lowering]:
        """Forget the lowerings of a closed session, and return them: a bug was met in one of them."""
        return self._turns.remove(number)

    def proceed(self, steps: int) -> None:
        """Do so many steps for the session whose turn it is."""
        number = self._turns.next()
        if number is None:
            return
        try:
            result = self.waiting[number][0].proceed(steps)
        except Exception as error:
            raise TurnFailedError(session=number) from error
        if result is not None:
            finished = self._turns.take(number)
            finished.session.in_steps -= 1
            self._finished(finished, result)
