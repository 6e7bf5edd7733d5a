"""The entries of a schedule, how long they take, and what a table of them comes to. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import PipelineError

_ENTRY = re.compile(r"(\d+)([FBIW])(\d+)")


class Kind(enum.StrEnum):
    """What an entry computes. INPUT and WEIGHTS are the two halves of a BACKWARD (Qi et al., 2023)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHTS = "W"


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """One part, on one micro-batch. As text `2F5`: part 2, forward, micro-batch 5."""

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
                f"{text!r} is no entry of a schedule: write part, kind and micro-batch, as in 0F3; kinds are F "
                "(forward), B (backward), or I and W (backward, for inputs and for weights)"
            )
        return cls(int(found[1]), Kind(found[2]), int(found[3]))


@dataclass(frozen=True)
class Times:
    """How long entries take, in any unit. `transfer` is from one stage to another."""

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
    """What a table comes to. `held` is, by stage, the most activations of micro-batches that it holds at a time: from
    the forward entry of a part to the end of its backward one (of its W, where the backward one is split)."""

    spans: Mapping[Entry, tuple[float, float]]
    length: float
    bubble: float  # the part of the stages' time in which they do nothing
    held: tuple[int, ...]
