"""Model hosts: they do what plans say, as far as the controller can tell."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, Status
from atoll.ir import plan as p
from atoll.protocol import messages as m


class ModelWalk:
    """A run of a plan on a model host."""

    def __init__(self, run: m.Run, plan: p.Plan) -> None:
        self.run = run
        self.plan = plan
        self.left = list(plan.segments)
        self.values: set[int] = set()
        self.problem: Status | None = None
        self.reported = False


@dataclass
class ModelTurn:
    """Legs that have one turn, in their session's line, as far as they have come."""

    sequence: int
    steps: Iterator[int]
    collective: bool


class ModelHost:
    """A worker as the controller may take it to be: it walks a session's legs in order, and parks what lacks bytes.

    What hosts compute together keeps its order, and ends on none of them before all have begun.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.plans: dict[int, p.Plan] = {}
        self.stores: dict[int, dict[int, Status | None]] = {}
        self.freed: Counter[tuple[int, int]] = Counter()
        self.sequences: list[tuple[int, int]] = []  # (session, sequence) as they came
        self.lines: dict[int, deque[Any]] = defaultdict(deque)  # of each session: legs, frees and ends in order
        self.collective: deque[int] = deque()  # sequences of legs that have yet to begin
        self.walks: dict[int, ModelWalk] = {}  # with legs to come, by the sequence of their first
        self.inbox: dict[tuple[int, int], Status | None] = {}
        self.running: list[tuple[int, Status | None]] = []
        self.begun: set[int] = set()  # sequences of what is computed together
        self.enqueued: deque[int] = deque()  # sequences, to be told
        self.sends: list[tuple[int, int, int]] = []  # (host, session, feed) that are to arrive
        self.functions: set[str] = set()
        self.compiled: list[str] = []  # to be told

    def take(self, message: Any) -> None:
        match message:
            case m.OpenStore(session=session):
                self.stores[session] = {}
            case m.RegisterPlan(plan=plan, definition=definition):
                self.plans[plan] = definition
            case m.DropPlan(plan=plan):
                del self.plans[plan]
            case m.Compile(function=function):
                self.functions.add(function)
                self.compiled.append(function)
            case m.DropFunction(function=function):
                self.functions.discard(function)
            case m.FailFeeds(session=session, feeds=feeds, status=status):
                self.inbox.update(((session, feed), status) for feed in feeds)
                self.go_on()
            case m.Run(sequence=sequence):
                self.walks[sequence] = ModelWalk(message, self.plans[message.plan])
                self.turn(self.walks[sequence], sequence, message.segments)
                self.go_on()
            case m.Dispatch(run=run, turns=turns):
                for sequence, segments in turns:
                    if run in self.walks:
                        self.turn(self.walks[run], sequence, segments)
                    else:
                        self.running.append((sequence, None))
                self.go_on()
            case m.DropRun(session=session) | m.CloseStore(session=session) | m.Free(session=session, delete=False):
                self.lines[session].append(message)
                self.go_on()

    def turn(self, walk: ModelWalk, sequence: int, count: int) -> None:
        self.sequences.append((walk.run.session, sequence))
        segments, walk.left = walk.left[:count], walk.left[count:]
        if not walk.left:
            del self.walks[walk.run.sequence]
        collective = any(segment.collective for segment in segments)
        self.lines[walk.run.session].append(
            ModelTurn(sequence, self.turn_of(walk, segments, sequence, collective), collective)
        )
        if collective:
            self.collective.append(sequence)

    def turn_of(self, walk: ModelWalk, segments: list[p.Segment], sequence: int, collective: bool) -> Iterator[int]:
        for segment in segments:
            yield from self.walk(walk, segment, sequence)
        self.running.append((sequence, None if walk.reported and not collective else walk.problem))
        walk.reported = walk.problem is not None
        if walk.problem is None:
            if collective:
                self.begun.add(sequence)
            if walk.run.acknowledge:
                self.enqueued.append(sequence)

    def arrive(self, session: int, feed: int) -> None:
        if session in self.stores:
            self.inbox.setdefault((session, feed), None)
            self.go_on()

    def go_on(self) -> None:
        progress = True
        while progress:
            progress = False
            for session, line in list(self.lines.items()):
                while line and self.do(session, line[0]):
                    line.popleft()
                    progress = True

    def do(self, session: int, item: Any) -> bool:
        match item:
            case m.Free(handles=handles):
                for handle in handles:
                    self.freed[session, handle] += 1
                    self.stores[session].pop(handle, None)
            case m.DropRun(run=run):
                self.walks.pop(run, None)
            case m.CloseStore():
                del self.stores[session]
                for run in [run for run, walk in self.walks.items() if walk.run.session == session]:
                    del self.walks[run]
            case ModelTurn():
                if next(item.steps, None) is not None:
                    return False
                if item.collective:
                    self.collective.remove(item.sequence)
        return True

    def walk(self, walk: ModelWalk, segment: p.Segment, sequence: int) -> Iterator[int]:
        """Yields while bytes are missing."""
        run, plan = walk.run, walk.plan
        store = self.stores[run.session]
        if segment is plan.segments[0]:
            for handle in run.arguments:
                assert handle in store, "an argument has been freed before its use, or was never made"
                walk.problem = walk.problem or store[handle]
            walk.values.update(plan.arguments)
        if "doomed" in plan.name and segment is plan.segments[run.sequence % len(plan.segments)]:
            walk.problem = walk.problem or Status(Code.INTERNAL, plan.name)
        while segment.collective and walk.problem is None and self.collective[0] != sequence:
            yield -1
        for step in segment.steps:
            if walk.problem is not None:
                break
            assert walk.values.issuperset(p.uses(step)), "a value was dropped or donated before its last use"
            walk.values.difference_update(p.consumes(step))
            if isinstance(step, p.Send):
                self.sends.extend((piece.host, run.session, run.feeds[piece.feed]) for piece in step.pieces)
            if isinstance(step, p.Receive):
                for piece in step.pieces:
                    while (run.session, run.feeds[piece.feed]) not in self.inbox:
                        yield piece.feed
                    walk.problem = walk.problem or self.inbox[run.session, run.feeds[piece.feed]]
            walk.values.update(defines(step))
        handles = dict(zip(plan.results, run.results, strict=True))
        later = (
            plan.segments[plan.segments.index(segment) :]
            if walk.problem is not None and not walk.reported
            else (segment,)
        )
        for value in [value for each in later for value in each.results if not walk.reported]:
            store[handles[value]] = walk.problem
        walk.values.difference_update(segment.drops)

    def finish(self, index: int) -> Any:
        sequence, problem = self.running.pop(index)
        return m.Done(((sequence, 0, 1),)) if problem is None else m.Failed(sequence, problem)


def defines(step: p.Step) -> tuple[int, ...]:
    match step:
        case p.Execute(first_output=first):
            return tuple(range(first, first + 3))
        case p.Move(outputs=outputs):
            return outputs
        case p.Put(output=output) | p.Receive(output=output) | p.Select(output=output):
            return (output,)
        case p.Get(completion=completion):
            return (completion,)
    return ()
