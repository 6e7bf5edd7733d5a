"""What lowering gives: a program's gangs, its plans, and where each of its values is."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.cluster.locations import MemoryRequirement
from atoll.ir.plan import Plan


@dataclass(frozen=True)
class LoweredGang:
    """What one node does on one island, as one gang on these hosts.

    `node` counts the nodes that are left after simplification.
    """

    node: int
    island: int
    hosts: tuple[int, ...]
    function: str = ""  # that it runs; "" where it runs none
    collective: bool = False  # its hosts compute something together: on none of them it ends without the others
    makes: tuple[int, ...] = ()  # values, or their parts here
    drops: tuple[int, ...] = ()  # values between nodes that no later gang of this island uses
    colocated: bool = False  # it runs Python beside the devices, for as long as that likes


@dataclass(frozen=True)
class LoweredValue:
    """Where a value is, and the memory that it takes there. Views take none of their own."""

    hosts: tuple[int, ...]
    nbytes: int = 0  # over all devices
    memory: MemoryRequirement = ()
    views: frozenset[int] = frozenset()  # the values whose memory it shares


@dataclass(frozen=True)
class Lowered:
    """A program's gangs, in order, and its plans, by host. `host_feeds` counts the feeds between hosts.

    Values are numbered anew: the program's arguments keep their numbers, what its nodes make follows in order.
    No two hosts wait for each other: what a segment receives was sent by a segment of an earlier gang, or by the same
    gang on hosts that send before they receive.
    """

    gangs: tuple[LoweredGang, ...]
    plans: dict[int, Plan]
    values: tuple[LoweredValue, ...]  # arguments first
    results: tuple[int, ...]  # values
    donated: frozenset[int]  # positions of arguments whose buffers the program consumes
    host_feeds: int
