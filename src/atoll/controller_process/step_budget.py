"""How many steps of large work one flush of the controller does: the shell has the clock, the controller has none.

A step is the work for one node of a program. It takes from one to some hundred microseconds, by the kind of node and
by the pass.
"""

from __future__ import annotations

from atoll.protocol.events import STEPS_PER_FLUSH

# CPU time of a flush that does steps.
FLUSH_SECONDS = 0.001
_LEAST_STEPS = 4


class StepBudget:
    """`steps` for the next flush, by the CPU time of those before it."""

    def __init__(self) -> None:
        self.steps = STEPS_PER_FLUSH

    def observe(self, seconds: float) -> None:
        """Note what a flush took that did as many steps."""
        if seconds > FLUSH_SECONDS:
            self.steps = max(_LEAST_STEPS, min(self.steps // 2, int(self.steps * FLUSH_SECONDS / seconds)))
        elif seconds < FLUSH_SECONDS / 2:
            self.steps = min(STEPS_PER_FLUSH, self.steps + self.steps // 4)
