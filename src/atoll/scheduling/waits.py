"""Who waits for an island, and for what: for reports, made when somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.scheduling.gang_states import GangState
from atoll.scheduling.queued_nodes import Gang, Payload, QueuedNode
from atoll.scheduling.reasons import Reason


@dataclass(frozen=True)
class Wait:
    """The gangs of one session that wait for an island: how many, the first of them, and its reason."""

    session: int
    gangs: int
    first: Gang[object]
    reason: Reason


@dataclass(frozen=True)
class Hindrances:
    """Of an island: what keeps its gangs from being started."""

    paused: bool
    draining: bool
    excluded: frozenset[int]  # sessions


def waits_of(
    island: int,
    lines: Mapping[int, deque[QueuedNode[Payload]]],
    committed: Iterable[Gang[Payload]],
    deferred: Iterable[QueuedNode[Payload]],
    hindrances: Hindrances,
) -> list[Wait]:
    """By session, in the order of their first gangs. What stands deferred comes after what is in line."""
    counts: dict[int, int] = {}
    firsts: dict[int, Gang[Payload]] = {}
    for gang in committed:
        counts[gang.node.session] = counts.get(gang.node.session, 0) + 1
        firsts.setdefault(gang.node.session, gang)
    for session, line in lines.items():
        counts[session] = counts.get(session, 0) + len(line)
        firsts.setdefault(session, _there(line[0], island))
    for node in deferred:
        if any(gang.island == island for gang in node.gangs):
            counts[node.session] = counts.get(node.session, 0) + 1
            firsts.setdefault(node.session, _there(node, island))
    return [
        Wait(session, counts[session], first, _reason(first.node, hindrances))  # type: ignore[arg-type]
        for session, first in sorted(firsts.items(), key=lambda each: each[1].sequence)
    ]


def _there(node: QueuedNode[Payload], island: int) -> Gang[Payload]:
    return next(gang for gang in node.gangs if gang.island == island)


def _reason(node: QueuedNode[Payload], hindrances: Hindrances) -> Reason:
    if node.gangs[0].state in (GangState.DEFERRED, GangState.WAITING):
        return node.reason
    if hindrances.paused:
        return Reason.ISLAND
    if node.session in hindrances.excluded:
        return Reason.FUNCTIONS
    return Reason.ALONE if hindrances.draining else Reason.ORDER
