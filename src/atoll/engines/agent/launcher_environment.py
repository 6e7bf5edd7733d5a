"""Which host of the cluster this machine is, as the launcher that started its agent says in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.topology import RankSlot
from atoll.errors import SettingsError

# By launcher: the variables of a job's index (an island's number) and of the process within it, or of all of them.
# The first whose rank is there counts. Kubernetes sets JOB_COMPLETION_INDEX in the pods of an indexed Job; the index of
# the Job within its JobSet is a label of the pod, which its manifest gives as JOB_INDEX.
_LAUNCHERS: tuple[tuple[str, str], ...] = (
    ("ATOLL_ISLAND", "ATOLL_RANK"),
    ("JOB_INDEX", "JOB_COMPLETION_INDEX"),
    ("", "OMPI_COMM_WORLD_RANK"),
    ("", "PMIX_RANK"),
    ("", "SLURM_PROCID"),
)


def rank_slot_of(environment: Mapping[str, str], island: int | None = None, rank: int | None = None) -> RankSlot:
    """The rank slot that flags, or else the launcher, ask for; any where nobody says.

    A rank without an island counts through all hosts of the cluster. Raises SettingsError for what is no number.
    """
    if island is not None or rank is not None:
        return RankSlot(_or_any(island), _or_any(rank))
    for of_island, of_rank in _LAUNCHERS:
        said_island, said_rank = environment.get(of_island, ""), environment.get(of_rank, "")
        if said_rank or (said_island and of_island.startswith("ATOLL_")):
            return RankSlot(_number(of_island, said_island), _number(of_rank, said_rank))
    return RankSlot()


def _or_any(number: int | None) -> int:
    return -1 if number is None else number


def _number(name: str, text: str) -> int:
    if not text:
        return -1
    if not (text.isascii() and text.isdigit()):
        raise SettingsError(f"{name} is {text!r}: expected a number from 0 on")
    return int(text)
