"""Which machines an island gets."""

from __future__ import annotations

import pytest

from atoll.cluster.topology import Seat
from atoll.engines.agent.launcher_environment import seat_of
from atoll.engines.hosts.rank_assignment import Candidate, choose, pending_reason
from atoll.errors import SettingsError


def free(
    name: str, island: int = -1, rank: int = -1, group: str = "", served: tuple[int, int] | None = None
) -> Candidate:
    return Candidate(name, name, Seat(island, rank), group, served)


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
    found = choose(1, [2, 3], machines)
    assert [each and each.machine for each in found] == chosen


def test_what_an_island_waits_for_names_who_is_missing_and_who_is_not_for_it() -> None:
    machines = [free("a"), free("b", 7, 7)]
    text = pending_reason(choose(0, [0, 1, 2], machines), machines[1:])
    assert text == (
        "waits for 2 of 3 hosts: ranks 1, 2 (rank 0 would be a); b is free, but asks for rank 7 of island 7"
    )


@pytest.mark.parametrize(
    ("environment", "seat"),
    [
        ({}, Seat()),
        ({"ATOLL_ISLAND": "1", "ATOLL_RANK": "0"}, Seat(1, 0)),
        ({"ATOLL_ISLAND": "1"}, Seat(1)),
        ({"ATOLL_RANK": "3"}, Seat(-1, 3)),
        ({"SLURM_PROCID": "5"}, Seat(-1, 5)),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, Seat(-1, 2)),  # mpirun within a Slurm job's one task
        ({"JOB_COMPLETION_INDEX": "1"}, Seat(-1, 1)),  # an indexed Job
        ({"JOB_INDEX": "2", "JOB_COMPLETION_INDEX": "1"}, Seat(2, 1)),  # a JobSet
        ({"ATOLL_RANK": "0", "ATOLL_ISLAND": "0", "SLURM_PROCID": "5"}, Seat(0, 0)),
    ],
)
def test_the_launcher_says_which_host_this_is(environment: dict[str, str], seat: Seat) -> None:
    assert seat_of(environment) == seat


def test_flags_go_before_the_launcher() -> None:
    assert seat_of({"SLURM_PROCID": "5"}, island=1, rank=0) == Seat(1, 0)


def test_a_rank_that_is_no_number_is_refused_by_its_name() -> None:
    with pytest.raises(SettingsError, match="SLURM_PROCID is 'x': expected a number"):
        seat_of({"SLURM_PROCID": "x"})
