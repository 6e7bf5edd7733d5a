"""The entries of a schedule, their durations, and the result of checking a schedule. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import PipelineError

_ENTRY = re.compile(r"(\d+)([FBIW])(\d+)")


class Kind(enum.StrEnum):
    """The computation of an entry. INPUT and WEIGHTS are the two halves of BACKWARD (Qi et al., 2023)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHTS = "W"


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """A run of one part on one micro-batch. The text `2F5` means part 2, forward, micro-batch 5."""

    part: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.part}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Entry:
        found = _ENTRY.fullmatch(text)
        if found is None:
            raise PipelineError(
                f"invalid schedule entry {text!r}: write part, kind and micro-batch, as in 0F3; kinds are F "
                "(forward), B (backward), or I and W (backward, for inputs and for weights)"
            )
        return cls(int(found[1]), Kind(found[2]), int(found[3]))


@dataclass(frozen=True)
class Times:
    """Durations of entries by kind, and of a transfer between stages, in any unit."""

    forward: float = 1.0
    backward: float = 2.0
    input: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0

    def of(self, entry: Entry) -> float:
        by_kind = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.input,
            Kind.WEIGHTS: self.weights,
        }
        return by_kind[entry.kind]


DEFAULT_TIMES = Times()


@dataclass(frozen=True)
class Check:
    """The result of checking a schedule.

    Attributes:
      spans: Start and end of each entry.
      length: The end of the last entry.
      bubble: The fraction of the stages' time in which they are idle.
      held: The maximum number of activations that each stage holds at a time. A stage holds an activation from the
        forward entry of a part to the end of its B entry, or of its W entry if the backward entry is split.
    """

    spans: Mapping[Entry, tuple[float, float]]
    length: float
    bubble: float
    held: tuple[int, ...]
