"""Model hosts, which carry out plans as the controller expects of a worker."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.errors import OK, Code, Status
from atoll.ir import plan as p
from atoll.protocol import messages as m


class ModelRun:
    """A run of a plan on a model host."""

    def __init__(self, run: m.Run, plan: p.Plan) -> None:
        self.run = run
        self.plan = plan
        self.left = list(plan.segments)
        self.values: set[int] = set()
        self.problem: Status | None = None
        self.reported = False


@dataclass
class ModelUnit:
    """A dispatch unit in its session's line: the steps that are left of its segments."""

    sequence: int
    steps: Iterator[int]
    collective: bool


class ModelHost:
    """Model of a worker, with the behavior that the controller may rely on.

    It runs a session's units in order, and blocks those whose bytes are missing. Collective segments keep their order,
    and a collective segment ends on a host only after it has begun on all of its hosts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = 0  # in nanoseconds
        self.plans: dict[int, p.Plan] = {}
        self.stores: dict[int, dict[int, Status | None]] = {}
        self.freed: Counter[tuple[int, int]] = Counter()
        self.sequences: list[tuple[int, int]] = []  # (session, sequence) in order of arrival
        self.launches: list[tuple[int, int]] = []  # (session, first result) of runs with results on this host
        self.lines: dict[int, deque[Any]] = defaultdict(deque)  # units, frees and drops of each session, in order
        self.collective: deque[int] = deque()  # sequences of collective units that have yet to begin
        self.runs: dict[int, ModelRun] = {}  # runs with undispatched segments, by first sequence
        self.inbox: dict[tuple[int, int], Status | None] = {}
        self.running: list[tuple[int, Status | None]] = []
        self.begun: set[int] = set()  # sequences of collective units
        self.enqueued: deque[int] = deque()  # sequences to report
        self.sends: list[tuple[int, int, int]] = []  # (host, session, feed) in transit
        self.functions: set[str] = set()
        self.compiled: list[str] = []  # to report
        self.reported: set[str] = set()  # functions that were reported before the controller asked their hosts
        self.on_arrival: Any = lambda: None  # called when bytes arrive that a delegated run awaits
        self.numbers: list[int] = []  # sequences of units whose numbers are to be reported
        self.spilled: dict[int, dict[int, int]] = {}  # pieces and their handles, by session
        self.copied: list[m.SpillReply] = []  # to report
        self.files: dict[int, int] = {}  # pieces in files, with the numbers of their directories; they outlive the host
        self.returning: list[tuple[int, int, int]] = []  # (host, session, feed) of pieces in transit

    def now(self) -> int:
        return self.clock

    @property
    def has_news(self) -> bool:
        """Return whether the host has anything to report or to send."""
        return bool(self.sends or self.enqueued or self.compiled or self.numbers or self.copied or self.returning)

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
                if function in self.reported:
                    self.reported.discard(function)
                else:
                    self.compiled.append(function)
            case m.DropFunction(function=function):
                self.functions.discard(function)
            case m.FailFeeds(session=session, feeds=feeds, status=status):
                for first, count in feeds:
                    self.inbox.update(((session, feed), status) for feed in range(first, first + count))
                self.go_on()
                self.on_arrival()
            case m.Run(sequence=sequence):
                self.runs[sequence] = ModelRun(message, self.plans[message.plan])
                self.dispatch(self.runs[sequence], sequence, message.segments)
                self.go_on()
            case m.Dispatch(run=run, units=units):
                for sequence, segments in units:
                    if run in self.runs:
                        self.dispatch(self.runs[run], sequence, segments)
                    else:
                        self.running.append((sequence, None))
                self.go_on()
            case (
                m.DropRun(session=session)
                | m.SpillRequest(session=session)
                | m.CloseStore(session=session)
                | m.Free(session=session, delete=False)
            ):
                self.lines[session].append(message)
                self.go_on()
            case m.ShareBuffers(source=source, target=target, handles=handles):
                for handle, shared in handles if target in self.stores else ():
                    assert self.stores[source].get(handle, OK) is None, "a missing array is shared"
                    self.stores[target][shared] = None
            case m.FreeMany(frees=frees):
                for each in frees:
                    self.take(each)
            case m.SendSpilled(session=session, pieces=pieces):
                for piece, feed, hosts in pieces:
                    there = self.files if piece.path else self.spilled[session]
                    assert piece.number in there, "a piece is restored that was not spilled"
                    self.returning.extend((host, session, feed) for host in hosts)
            case m.DropSpilled(session=session, pieces=pieces):
                for piece in pieces:  # already gone if its host failed
                    (self.files if piece.path else self.spilled.get(session, {})).pop(piece.number, None)
            case m.KeepFiles(before=before, numbers=numbers):
                for piece, directory in list(self.files.items()):
                    if directory < before and directory not in numbers:
                        del self.files[piece]

    def dispatch(self, state: ModelRun, sequence: int, count: int) -> None:
        self.sequences.append((state.run.session, sequence))
        if state.run.results:
            self.launches.append((state.run.session, min(state.run.results)))
        segments, state.left = state.left[:count], state.left[count:]
        if not state.left:
            del self.runs[state.run.sequence]
        collective = any(segment.collective for segment in segments)
        self.lines[state.run.session].append(
            ModelUnit(sequence, self.run_unit(state, segments, sequence, collective), collective)
        )
        if collective:
            self.collective.append(sequence)

    def run_unit(self, state: ModelRun, segments: list[p.Segment], sequence: int, collective: bool) -> Iterator[int]:
        for segment in segments:
            yield from self.run_segment(state, segment, sequence)
        self.running.append((sequence, None if state.reported and not collective else state.problem))
        state.reported = state.problem is not None
        if state.problem is None:
            if collective:
                self.begun.add(sequence)
            if state.run.acknowledge:
                self.enqueued.append(sequence)

    def arrive(self, session: int, feed: int) -> None:
        if session in self.stores:
            self.inbox.setdefault((session, feed), None)
            self.go_on()
            self.on_arrival()

    def await_feeds(self, session: int, feeds: list[int], wake: Any, who: int) -> bool:
        """Await feeds like `Inbox.await_all`."""
        self.on_arrival = wake
        return all((session, feed) in self.inbox for feed in feeds)

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
                self.runs.pop(run, None)
            case m.SpillRequest(request=request, shards=shards, to_files=True, directory=directory):
                for number, handle, _ in shards:
                    assert self.stores[session].get(handle, OK) is None, "a missing array is written to a file"
                    self.files[number] = int(directory.rpartition("-")[2])
                pieces = tuple(m.SpilledPiece(number, 8, f"/files/{number}") for number, _, _ in shards)
                self.copied.append(m.SpillReply(session, request, OK, pieces))
            case m.SpillRequest(request=request, shards=shards):
                own = self.spilled.setdefault(session, {})
                for number, handle, _ in shards:
                    assert self.stores[session].get(handle, OK) is None, "a missing array is spilled"
                    own[number] = handle
                pieces = tuple(m.SpilledPiece(number, 8) for number, _, _ in shards)
                self.copied.append(m.SpillReply(session, request, OK, pieces))
            case m.CloseStore():
                del self.stores[session]
                self.spilled.pop(session, None)
                for run in [run for run, state in self.runs.items() if state.run.session == session]:
                    del self.runs[run]
            case ModelUnit():
                if next(item.steps, None) is not None:
                    return False
                if item.collective:
                    self.collective.remove(item.sequence)
        return True

    def run_segment(self, state: ModelRun, segment: p.Segment, sequence: int) -> Iterator[int]:
        """Run a segment, and yield as long as bytes are missing."""
        run, plan = state.run, state.plan
        store = self.stores[run.session]
        if segment is plan.segments[0]:
            for handle in run.arguments:
                assert handle in store, "an argument has been freed before its use, or was never made"
                state.problem = state.problem or store[handle]
            state.values.update(plan.arguments)
        if "doomed" in plan.name and segment is plan.segments[run.sequence % len(plan.segments)]:
            state.problem = state.problem or Status(Code.INTERNAL, plan.name)
        while segment.collective and state.problem is None and self.collective[0] != sequence:
            yield -1
        for step in segment.steps:
            if state.problem is not None:
                break
            assert state.values.issuperset(p.uses(step)), "a value was dropped or donated before its last use"
            state.values.difference_update(p.consumes(step))
            if isinstance(step, p.Send):
                self.sends.extend((piece.host, run.session, run.host_feeds + piece.feed) for piece in step.pieces)
            if isinstance(step, p.Report):
                self.numbers.append(sequence)
            if isinstance(step, p.Receive):
                for piece in step.pieces:
                    while (run.session, run.host_feeds + piece.feed) not in self.inbox:
                        yield piece.feed
                    state.problem = state.problem or self.inbox[run.session, run.host_feeds + piece.feed]
            state.values.update(defines(step))
        handles = dict(zip(plan.results, run.results, strict=True))
        later = (
            plan.segments[plan.segments.index(segment) :]
            if state.problem is not None and not state.reported
            else (segment,)
        )
        for value in [value for each in later for value in each.results if not state.reported]:
            store[handles[value]] = state.problem
        state.values.difference_update(segment.drops)

    def finish(self, index: int) -> Any:
        sequence, problem = self.running.pop(index)
        return m.Done(((sequence, 0, 1),)) if problem is None else m.Failed(sequence, problem)


def defines(step: p.Step) -> tuple[int, ...]:
    match step:
        case p.Execute(first_output=first):
            return tuple(range(first, first + 3))
        case p.Move(outputs=outputs) | p.PutAll(outputs=outputs):
            return outputs
        case p.Put(output=output) | p.Receive(output=output) | p.Select(output=output):
            return (output,)
        case p.Get(completion=completion) | p.GetAll(completion=completion):
            return (completion,)
    return ()
