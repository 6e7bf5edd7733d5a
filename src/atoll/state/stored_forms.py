"""Stored forms of values that structs of several packages have, such as counts in groups. See `state_dumps`."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Annotated, Any

from atoll.cluster.locations import MemoryRequirement
from atoll.state.durations import Durations
from atoll.state.gang_specs import GangSpec, MadeValue, RunGangs
from atoll.state.grouped_counts import CountGroup, GroupedCounts
from atoll.state.object_dumps import As, Deque, Ref, Shared
from atoll.state.stepped_work import Turns


def _durations(since: dict[Any, float]) -> Durations[Any]:
    made: Durations[Any] = Durations()
    made._since = since
    return made


def _read_turns(turns: Turns[Any]) -> tuple[Any, ...]:
    return [(tenant, list(sessions)) for tenant, sessions in turns._sessions.items()], turns.waiting


def _turns(order: list[tuple[str, list[int]]], waiting: dict[int, Any]) -> Turns[Any]:
    made: Turns[Any] = Turns()
    made._sessions = {tenant: dict.fromkeys(sessions) for tenant, sessions in order}
    made._tenants = {session: tenant for tenant, sessions in order for session in sessions}
    made.waiting.update(waiting)
    return made


def _update_turns(turns: Turns[Any], made: Turns[Any]) -> None:
    turns._sessions, turns._tenants = made._sessions, made._tenants
    turns.waiting.clear()
    turns.waiting.update(made.waiting)


def _read_groups(groups: GroupedCounts[Any, Any]) -> tuple[Any, ...]:
    """Return the keys in order, with the group of each; and the groups as (count, whether it was divided)."""
    numbers = {id(group): number for number, group in enumerate(groups)}
    keys = [(key, numbers[id(group)]) for key, group in groups._groups.items()]
    return keys, [(group.count, group.was_divided) for group in groups]


def _groups(keys: list[tuple[Any, int]], counts: list[tuple[Any, bool]]) -> GroupedCounts[Any, Any]:
    made: GroupedCounts[Any, Any] = GroupedCounts(replace, astuple)
    groups = [CountGroup[Any, Any](set(), count, was_divided) for count, was_divided in counts]
    for key, number in keys:
        groups[number].keys.add(key)
        made._groups[key] = groups[number]
    return made


def _update_groups(groups: GroupedCounts[Any, Any], made: GroupedCounts[Any, Any]) -> None:
    groups._groups = made._groups
    groups.version += 1


if TYPE_CHECKING:
    DurationsOf = Durations
    TurnsOf = Turns
    GroupsOf = GroupedCounts
else:

    class DurationsOf:
        def __class_getitem__(cls, key: Any) -> Any:
            return Annotated[dict[key, float], As(_durations, read=lambda durations: durations._since)]

    class TurnsOf:
        def __class_getitem__(cls, item: Any) -> Any:
            form = tuple[list[tuple[str, list[int]]], dict[int, Deque[item]]]
            return Annotated[form, As(_turns, True, _read_turns, _update_turns)]

    class GroupsOf:
        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            form = tuple[list[tuple[types[0], int]], list[tuple[types[1], bool]]]
            return Annotated[form, As(_groups, True, _read_groups, _update_groups)]


# A requirement is shared, since the ledger remembers requirements by identity.
Requirement = Shared[MemoryRequirement]
Hosts = Shared[tuple[int, ...]]
Key = tuple[int, int]
Units = tuple[tuple[Ref[GangSpec], ...], ...]
Made = Annotated[tuple[int, Requirement, frozenset[int]], As(MadeValue, True)]
RunGangsForm = Annotated[
    tuple[tuple[Ref[GangSpec], ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]], As(RunGangs, True)
]
