"""What a gang waits for, from its launch until it is started."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One at a time: what stands first in the way."""

    OWN = "own"  # what its session has launched before it, which goes first
    ORDER = "order"  # its turn, or room for it: others are before it, or in flight
    ALONE = "alone"  # a gang that runs alone is before it, or is it
    MEMORY = "memory"  # of its devices
    QUOTA = "quota"  # of its tenant's memory
    RATE = "rate"  # of its tenant's launches or uploads: they are limited per second
    BYTES = "bytes"  # that its client sends
    PLAN = "plan"  # a large one, on its way to the hosts
    PYTHON = "python"  # what the client's Python, or Python on the hosts, is about to make
    FUNCTIONS = "functions"  # that are compiled again, on an island that failed
    ISLAND = "island"  # which is not there


# Reasons one after another, each with its seconds.
Waited = tuple[tuple[Reason, float], ...]
