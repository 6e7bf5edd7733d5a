"""Read a timeline of faults from the lines that a training prints. Pure.

A timeline is phases, each with so many devices. In each phase: how long it took from what happened at its beginning to
the first step on its devices; the rate of steps from then on; and how many steps were computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Phase:
    """From what happened at `began` to `ended`, in seconds since the epoch."""

    happened: str
    devices: int
    began: float
    ended: float


def describe(phase: Phase, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe the phase, given the lines of all steps in order."""
    steps = [each for each in lines if each["what"] == "step"]
    before = [each for each in steps if each["at"] < phase.began]
    within = [each for each in steps if phase.began <= each["at"] < phase.ended]
    on_all = [each for each in within if each["devices"] == phase.devices]
    times = [each["at"] for each in ([before[-1]] if before else []) + within]
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    done = {each["step"] for each in before}
    changes = [each for each in lines if each["what"] == "change" and phase.began <= each["at"] < phase.ended]
    return {
        "happened": phase.happened,
        "devices": phase.devices,
        "seconds_until_on_them": on_all[0]["at"] - phase.began if on_all else None,
        "longest_pause_seconds": max(pauses, default=None),
        "steps_a_second": _rate([each["at"] for each in on_all]),
        "steps_again": sum(each["step"] in done for each in within) + sum(each["repeated"] for each in changes),
        "steps": len({each["step"] for each in within} - done),
    }


def _rate(times: Sequence[float]) -> float | None:
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else None
