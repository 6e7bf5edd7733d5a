"""Tests of the rank slot that a launcher assigns to a host agent."""

from __future__ import annotations

import pytest

from atoll.cluster.topology import RankSlot
from atoll.engines.agent.agent_options import rank_slot_of
from atoll.errors import SettingsError


@pytest.mark.parametrize(
    ("environment", "rank_slot"),
    [
        ({}, RankSlot()),
        ({"ATOLL_ISLAND": "1", "ATOLL_RANK": "0"}, RankSlot(1, 0)),
        ({"ATOLL_ISLAND": "1"}, RankSlot(1)),
        ({"ATOLL_RANK": "3"}, RankSlot(-1, 3)),
        ({"SLURM_PROCID": "5"}, RankSlot(-1, 5)),
        # Mpirun within the only task of a Slurm job.
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, RankSlot(-1, 2)),
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
