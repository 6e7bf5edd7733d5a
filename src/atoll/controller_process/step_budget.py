"""How much large work a turn of the controller does, from the CPU time of earlier turns."""

from __future__ import annotations

from atoll.protocol.events import STEPS_PER_FLUSH

# CPU time of a flush that does steps of large work.
FLUSH_SECONDS = 0.001
_MIN_STEPS = 4


class StepBudget:
    """The number of `steps` of large work in the next flush, from the CPU time of previous ones.

    A step is the work for one node of a program, which takes from one to some hundred microseconds, depending on the
    kind of node and the pass. The controller itself has no clock.
    """

    def __init__(self) -> None:
        self.steps = STEPS_PER_FLUSH

    def observe(self, seconds: float) -> None:
        """Record the CPU time of a flush that did `steps` steps."""
        if seconds > FLUSH_SECONDS:
            self.steps = max(_MIN_STEPS, min(self.steps // 2, int(self.steps * FLUSH_SECONDS / seconds)))
        elif seconds < FLUSH_SECONDS / 2:
            self.steps = min(STEPS_PER_FLUSH, self.steps + self.steps // 4)
