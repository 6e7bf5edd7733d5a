"""Assign free machines to the hosts of an island, all or none. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cluster.topology import RankSlot
from atoll.quantities import counted, noun_for


@dataclass(frozen=True)
class Candidate:
    """A free machine. `served` is the island and the rank that its last worker had."""

    agent: str
    machine: str
    rank_slot: RankSlot
    group: str = ""
    served: tuple[int, int] | None = None


def assign_ranks(island: int, hosts: Sequence[int], free: Sequence[Candidate]) -> list[Candidate | None]:
    """Return a machine for each of the island's first hosts `hosts`, None for a host that no free machine fits.

    `free` is in the order in which the machines joined. A machine that asks for a rank slot gets only that slot. If
    several machines fit, a machine that asks for this rank is preferred, then the machine that served the rank before,
    then a machine of the group with the most free machines, then the one that joined first. Among those that ask for
    the rank, the machine that served it before is preferred.
    """
    left = list(free)
    near = Counter(each.group for each in free if each.group)
    chosen: list[Candidate | None] = [None] * len(hosts)

    def take(rank: int, fits: Sequence[Candidate]) -> None:
        if chosen[rank] is None and fits:
            chosen[rank] = fits[0]
            left.remove(fits[0])

    def candidates_of(rank: int) -> list[Candidate]:
        return [each for each in left if each.rank_slot.fits(island, hosts[rank], hosts[0])]

    for rank in range(len(hosts)):
        asking = [each for each in candidates_of(rank) if each.rank_slot.rank >= 0]
        take(rank, sorted(asking, key=lambda each: each.served != (island, rank)))
    for rank in range(len(hosts)):
        take(rank, [each for each in candidates_of(rank) if each.served == (island, rank)])
    for rank in range(len(hosts)):
        take(rank, sorted(candidates_of(rank), key=lambda each: (each.rank_slot.island < 0, -near[each.group])))
    return chosen


def pending_reason(chosen: Sequence[Candidate | None], others: Sequence[Candidate]) -> str:
    """Return which hosts an island with the machines `chosen` waits for, and why it cannot use the free `others`."""
    have = [f"rank {rank} would be {each.machine}" for rank, each in enumerate(chosen) if each is not None]
    missing = [rank for rank, each in enumerate(chosen) if each is None]
    ranks = f"{noun_for(len(missing), 'rank')} {', '.join(map(str, missing))}"
    text = f"waits for {len(missing)} of {counted(len(chosen), 'host')}: {ranks}"
    if have:
        text += f" ({', '.join(have)})"
    for each in others:
        text += f"; {each.machine} is free, but asks for {each.rank_slot}"
    return text
