"""Which machines an island gets."""

from __future__ import annotations

import pytest

from atoll.cluster.topology import RankSlot
from atoll.engines.agent.launcher_environment import rank_slot_of
from atoll.engines.hosts.rank_assignment import Candidate, assign_ranks, pending_reason
from atoll.errors import SettingsError


def free(
    name: str, island: int = -1, rank: int = -1, group: str = "", served: tuple[int, int] | None = None
) -> Candidate:
    return Candidate(name, name, RankSlot(island, rank), group, served)


@pytest.mark.parametrize(
    ("machines", "chosen"),
    [
        ([], [None, None]),
        ([free("a")], ["a", None]),
        ([free("a"), free("b"), free("c")], ["a", "b"]),  # in the order in which they came
        ([free("a"), free("b", 1, 0)], ["b", "a"]),
        ([free("b", 1, 1), free("a", 1, 0)], ["a", "b"]),
        ([free("a", 0, 0), free("b", 1, 1)], [None, "b"]),  # one that asks for another island is none for this
        ([free("a", rank=3), free("b", rank=2)], ["b", "a"]),  # ranks of the whole cluster: 2 and 3 are island 1
        ([free("a", rank=0), free("b", rank=1)], [None, None]),
        ([free("a"), free("b", 1)], ["b", "a"]),  # any rank of this island, before any of all
        ([free("a"), free("b"), free("c", served=(1, 1))], ["a", "c"]),  # where it was before
        ([free("a", group="x"), free("b", group="y"), free("c", group="y")], ["b", "c"]),  # near one another
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


@pytest.mark.parametrize(
    ("environment", "rank_slot"),
    [
        ({}, RankSlot()),
        ({"ATOLL_ISLAND": "1", "ATOLL_RANK": "0"}, RankSlot(1, 0)),
        ({"ATOLL_ISLAND": "1"}, RankSlot(1)),
        ({"ATOLL_RANK": "3"}, RankSlot(-1, 3)),
        ({"SLURM_PROCID": "5"}, RankSlot(-1, 5)),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, RankSlot(-1, 2)),  # mpirun within a Slurm job's one task
        ({"JOB_COMPLETION_INDEX": "1"}, RankSlot(-1, 1)),  # an indexed Job
        ({"JOB_INDEX": "2", "JOB_COMPLETION_INDEX": "1"}, RankSlot(2, 1)),  # a JobSet
        ({"ATOLL_RANK": "0", "ATOLL_ISLAND": "0", "SLURM_PROCID": "5"}, RankSlot(0, 0)),
    ],
)
def test_the_launcher_says_which_host_this_is(environment: dict[str, str], rank_slot: RankSlot) -> None:
    assert rank_slot_of(environment) == rank_slot


def test_flags_go_before_the_launcher() -> None:
    assert rank_slot_of({"SLURM_PROCID": "5"}, island=1, rank=0) == RankSlot(1, 0)


def test_a_rank_that_is_no_number_is_refused_by_its_name() -> None:
    with pytest.raises(SettingsError, match="SLURM_PROCID is 'x': expected a number"):
        rank_slot_of({"SLURM_PROCID": "x"})
