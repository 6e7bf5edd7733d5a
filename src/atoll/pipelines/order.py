"""Computes the order of a step's nodes from a schedule: one list that contains the nodes of all stages. Pure.

A host runs its nodes in the program's order, and nodes after a receive wait for it. So receives are placed as late as
possible, and sends as early as possible. Nodes are ordered by their times in `Schedule.check`. Values that an entry
needs are moved before the entries that start at the same time; other values that are ready are moved after these. A
single list for all stages cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from atoll.pipelines.entries import DEFAULT_TIMES, Entry, Kind, Times
from atoll.pipelines.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """Run an entry on its stage; with `whole`, the last part's forward and backward entries in one function."""

    entry: Entry
    whole: bool = False


@dataclass(frozen=True)
class Move:
    """Move values, or gradients of values, that part `source` computed to part `target` on another stage."""

    source: int
    target: int
    microbatch: int
    gradients: bool


Action = Run | Move


def order(schedule: Schedule, links: Mapping[int, Iterable[int]], times: Times = DEFAULT_TIMES) -> list[Action]:
    """Return the actions of a step in order. Raise PipelineError if the schedule cannot run.

    `links[part]` are the parts that use the part's values.
    """
    spans = schedule.check(times).spans
    stage = {part: schedule.stage_of(part) for part in range(schedule.parts)}
    whole = _whole(schedule)
    forward = {part: [each for each in links.get(part, ()) if stage[each] != stage[part]] for part in stage}
    sources: dict[int, list[int]] = {part: [] for part in stage}
    for source, targets in forward.items():
        for target in targets:
            sources[target].append(source)
    starts: dict[float, list[Entry]] = {}
    for entry, (start, _) in spans.items():
        if not (entry.kind is Kind.BACKWARD and entry in whole):
            starts.setdefault(round(start, 9), []).append(entry)
    actions: list[Action] = []
    pending: dict[Move, float] = {}  # the time at which the values are ready
    for now, entries in sorted(starts.items()):
        needed = {move for entry in entries for move in _needs(entry, sources, forward)}
        first = [move for move, ready in pending.items() if move in needed or ready < now - 1e-9]
        _move(first, pending, actions)
        for entry in sorted(entries, reverse=True):
            both = Entry(entry.part, Kind.BACKWARD, entry.microbatch)
            fused = entry.kind is Kind.FORWARD and both in whole
            actions.append(Run(entry, fused))
            for done in (entry, both) if fused else (entry,):
                for move in _makes(done, sources, forward):
                    pending[move] = spans[done][1]
        _move([move for move, ready in pending.items() if ready <= now + 1e-9], pending, actions)
    _move(list(pending), pending, actions)
    return actions


def replicated(actions: Iterable[Action], replicas: int, parts: int, microbatches: int) -> list[Action]:
    """Return the actions of all replicas, interleaved.

    Part p of replica r has the number r * `parts` + p, and micro-batches are numbered in the same way.
    """
    made: list[Action] = []
    for action in actions:
        for replica in range(replicas):
            part, microbatch = replica * parts, replica * microbatches
            if isinstance(action, Run):
                entry = action.entry
                entry = replace(entry, part=entry.part + part, microbatch=entry.microbatch + microbatch)
                made.append(replace(action, entry=entry))
            else:
                made.append(
                    replace(
                        action,
                        source=action.source + part,
                        target=action.target + part,
                        microbatch=action.microbatch + microbatch,
                    )
                )
    return made


def _whole(schedule: Schedule) -> set[Entry]:
    """Return the last part's backward entries that immediately follow their forward entries."""
    return {
        entry
        for row in schedule.rows
        for before, entry in pairwise(row)
        if entry.kind is Kind.BACKWARD
        and entry.part == schedule.parts - 1
        and before == Entry(entry.part, Kind.FORWARD, entry.microbatch)
    }


def _makes(entry: Entry, sources: Mapping[int, list[int]], targets: Mapping[int, list[int]]) -> list[Move]:
    if entry.kind is Kind.WEIGHTS:
        return []
    gradients = entry.kind is not Kind.FORWARD
    others = sources if gradients else targets
    return [Move(entry.part, other, entry.microbatch, gradients) for other in others[entry.part]]


def _needs(entry: Entry, sources: Mapping[int, list[int]], targets: Mapping[int, list[int]]) -> list[Move]:
    if entry.kind is Kind.WEIGHTS:
        return []
    gradients = entry.kind is not Kind.FORWARD
    others = targets if gradients else sources
    return [Move(other, entry.part, entry.microbatch, gradients) for other in others[entry.part]]


def _move(moves: list[Move], pending: dict[Move, float], actions: list[Action]) -> None:
    """Append moves, those at the far end of the pipeline first, so that a stage sends before it waits."""
    for move in sorted(moves, key=lambda each: (each.gradients, each.source if each.gradients else -each.source)):
        del pending[move]
        actions.append(move)
