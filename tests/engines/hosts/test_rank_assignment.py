"""Tests of which machines an island gets."""

from __future__ import annotations

import pytest

from atoll.cluster.topology import RankSlot
from atoll.engines.hosts.rank_assignment import Candidate, assign_ranks, pending_reason


def free(
    name: str, island: int = -1, rank: int = -1, group: str = "", served: tuple[int, int] | None = None
) -> Candidate:
    return Candidate(name, name, RankSlot(island, rank), group, served)


@pytest.mark.parametrize(
    ("machines", "chosen"),
    [
        ([], [None, None]),
        ([free("a")], ["a", None]),
        ([free("a"), free("b"), free("c")], ["a", "b"]),  # in the order in which they connected
        ([free("a"), free("b", 1, 0)], ["b", "a"]),
        ([free("b", 1, 1), free("a", 1, 0)], ["a", "b"]),
        ([free("a", 0, 0), free("b", 1, 1)], [None, "b"]),  # a machine that asks for another island is not used here
        ([free("a", rank=3), free("b", rank=2)], ["b", "a"]),  # ranks of the whole cluster: 2 and 3 belong to island 1
        ([free("a", rank=0), free("b", rank=1)], [None, None]),
        # Machines for any rank of this island come before those for all islands.
        ([free("a"), free("b", 1)], ["b", "a"]),
        ([free("a"), free("b"), free("c", served=(1, 1))], ["a", "c"]),  # the machine that it had before
        # A machine that asks for the rank comes before one that only had it.
        ([free("a", served=(1, 1)), free("b", 1, 1)], ["a", "b"]),
        ([free("a", served=(1, 1)), free("b", rank=3), free("c")], ["a", "b"]),
        ([free("a", 1, 1), free("b", 1, 1, served=(1, 1)), free("c")], ["c", "b"]),
        # Machines close to each other.
        ([free("a", group="x"), free("b", group="y"), free("c", group="y")], ["b", "c"]),
        ([free("a", 1, 0), free("b", 1, 0)], ["a", None]),
    ],
)
def test_an_island_gets_machines_that_fit(machines: list[Candidate], chosen: list[str | None]) -> None:
    found = assign_ranks(1, [2, 3], machines)
    assert [each and each.machine for each in found] == chosen


def test_what_an_island_waits_for_names_who_is_missing_and_who_is_not_for_it() -> None:
    machines = [free("a"), free("b", 7, 7)]
    text = pending_reason(assign_ranks(0, [0, 1, 2], machines), machines[1:])
    assert text == (
        "waits for 2 of 3 hosts: ranks 1, 2 (rank 0 would be a); b is free, but asks for rank 7 of island 7"
    )
