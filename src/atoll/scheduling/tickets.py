"""What stands in line: tickets, and the gangs that they start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

# What a gang is about: the scheduler never looks at it.
Payload = TypeVar("Payload")

# What a gang counts that has not run yet: enough to keep a few of them in flight, whatever they turn out to be.
UNKNOWN_NS = 200_000


@dataclass(slots=True, eq=False)
class Ticket(Generic[Payload]):
    """A node of a launch, in line. `number` is its age; `missing` counts what it still waits for, such as its client's
    bytes.
    """

    number: int
    session: int
    missing: int = 0
    gangs: tuple[Gang[Payload], ...] = ()
    behind: int = 0  # in how many lines it is not at the head
    committed: bool = False
    dropped: bool = False
    aside: Promise[Payload] | None = None  # it is in no line until it misses nothing; what its results then keep


@dataclass(slots=True, eq=False)
class Promise(Generic[Payload]):
    """The results of one launch, which take as long as they like: see `scheduling.promises`. `is_aside`: not even the
    launch is in line yet.
    """

    is_aside: bool
    waiting: list[Ticket[Payload]] = field(default_factory=list)
    is_kept: bool = False


@dataclass(slots=True, eq=False)
class Gang(Generic[Payload]):
    """A node's part on one island: what its hosts start together.

    `estimate` is the time it keeps them busy, in nanoseconds; `weight` is how much of the window it takes; with
    `exclusive`, nothing else is in flight meanwhile. `hosts` are those of the island that it runs on.
    One that is `detached` waits for its client, and takes nothing of the window any more.
    """

    sequence: int
    island: int
    ticket: Ticket[Payload]
    run: Payload
    estimate: int = UNKNOWN_NS
    exclusive: bool = False
    weight: int = 1
    hosts: tuple[int, ...] = (0,)
    detached: bool = False
