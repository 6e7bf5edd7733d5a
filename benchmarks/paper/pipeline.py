"""A pipeline of stages: the time of each stage for a micro-batch, and the resulting times in theory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pipeline:
    """Seconds are those of a stage, for one micro-batch or for the update; bytes are those of one of its devices."""

    stages: int
    micro_batches: int
    forward: float
    backward: float
    update: float
    activation_bytes: int
    gradient_bytes: int
    weight_bytes: int

    @property
    def ideal_seconds(self) -> float:
        """Of a step: each pass fills the pipeline and drains it, and the first stage, which ends last, updates."""
        waves = self.micro_batches + self.stages - 1
        return waves * (self.forward + self.backward) + self.update
