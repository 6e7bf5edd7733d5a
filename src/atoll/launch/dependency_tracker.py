"""Order launches of unbounded duration, and defer the launches that depend on them.

A call of colocated Python takes as long as the user's function, and so does a compiled function that calls its client's
Python. The gang of such a call is *unbounded*. If another launch waited on a host for an unbounded gang, it would take
a place there from all sessions. So a launch that needs the results of an unbounded gang is *deferred* in the
controller: its nodes are in no line, and later launches of its session overtake it. The unbounded gang may even need
these launches, since a callback that computes on the cluster returns only when that computation is done. Invariant:
nothing in line waits for an unbounded gang.

A deferred launch joins its lines, at its age, when its inputs are available. Other launches may depend on its results
in turn. These orders are kept:

- a launch that consumes an array waits for those that read the array and are deferred or unbounded;
- calls of Python run in the order of their launches, and follow the launches that make their arguments;
- the nodes of a launch follow one another.

Launches that need the results of a control flow node (`launch.control_flow_runs`) are deferred in the same way:
they depend on the node before it is known what the node will run. So are launches that need arrays which a later launch
of the controller makes (`launch.deferred_results`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic

from atoll.launch.scheduler import Scheduler
from atoll.state.buffer_directory import Entry
from atoll.state.gang_specs import GangSpec
from atoll.state.queued_nodes import Dependency, HostCallKind, Payload, QueuedNode


class DependencyTracker(Generic[Payload]):
    """Defers nodes while their dependencies are unresolved, and then calls `enqueue(node)` for each of them."""

    def __init__(self, scheduler: Scheduler[Payload], enqueue: Callable[[QueuedNode[Payload]], None]) -> None:
        self._scheduler = scheduler
        self._enqueue = enqueue
        self._unresolved: Counter[int] = Counter()  # by session
        self._last_python: dict[int, Dependency[Payload]] = {}  # last call of Python that was deferred, by session
        self._client_runs: ClientRunLimits[Payload] = ClientRunLimits()

    def has_some(self, session: int) -> bool:
        """Return whether the session has an unresolved dependency. If not, only unbounded launches need `order`."""
        return session in self._unresolved

    def statistics(self) -> dict[str, int]:
        """Return the number of unresolved dependencies."""
        return {"unresolved": self._unresolved.total()}

    def order(
        self,
        nodes: Sequence[QueuedNode[Payload]],
        units: Sequence[tuple[GangSpec, ...]],
        arguments: Sequence[Entry],
        donated: Sequence[Entry],
    ) -> Dependency[Payload] | None:
        """Order the nodes of a new launch, one per unit, and enqueue those that need not wait.

        Returns the dependency for its results, which is resolved last. Returns None if the launch needs no dependency;
        none of its nodes was enqueued then.
        """
        session = nodes[0].session
        kinds = [unit[0].host_call for unit in units]
        if any(kinds):
            dependencies = [Dependency(session, (node,), each) for node, each in zip(nodes, kinds, strict=True)]
            for dependency, unit in zip(dependencies, units, strict=True):
                dependency.alone = frozenset(name for gang in unit if gang.spans_devices for name in gang.functions)
            dependencies[0].has_thread = (
                len(dependencies) == 1 and not dependencies[0].alone and not donated
            )  # the same rule as in workers
        else:
            dependencies = [Dependency(session, tuple(nodes), None)]
        first, last = dependencies[0], dependencies[-1]
        self._await_inputs(first, arguments, donated)
        if first.host_call is None and last is first and not first.awaited:
            return None
        for before, after in pairwise(dependencies):
            _await(after, before.on_resolved)
        self._unresolved[session] += len(dependencies)
        for dependency in dependencies:
            for node in dependency.nodes:
                node.dependency = dependency
                self._scheduler.defer(node)
        if first.host_call is not HostCallKind.PYTHON or first.awaited:
            for entry in arguments:
                _add_reader(entry, last)
        if not first.awaited:
            self._start(deque([first]))
        return last

    def undecided(self, session: int, arguments: Sequence[Entry]) -> Dependency[Payload]:
        """Return the dependency for a launch that reads `arguments`, whose nodes are unknown until `decided`."""
        dependency: Dependency[Payload] = Dependency(session, (), None, awaited=1)
        self._await_inputs(dependency, arguments, ())
        self._unresolved[session] += 1
        for entry in arguments:
            _add_reader(entry, dependency)
        return dependency

    def decided(self, dependency: Dependency[Payload], nodes: Sequence[QueuedNode[Payload]]) -> None:
        """Set the nodes of the dependency; they are in no line yet."""
        dependency.nodes = tuple(nodes)
        for node in nodes:
            node.dependency = dependency
            self._scheduler.defer(node)
        dependency.awaited -= 1
        if not dependency.awaited:
            self._start(deque([dependency]))

    def _await_inputs(self, first: Dependency[Payload], arguments: Sequence[Entry], donated: Sequence[Entry]) -> None:
        """Have the first dependency of a launch await those of its inputs, and their readers if they are donated."""
        is_python = first.host_call is HostCallKind.PYTHON
        for dependency in {id(entry.dependency): entry.dependency for entry in arguments}.values():
            if dependency is None or dependency.is_resolved:
                continue
            if not (is_python and dependency.host_call is HostCallKind.PYTHON):
                _await(first, dependency.on_resolved)
            elif not dependency.is_enqueued:
                _await(first, dependency.on_enqueued)
        for reader in {id(reader): reader for entry in donated for reader in entry.readers or ()}.values():
            if reader.host_call is HostCallKind.PYTHON and not reader.is_enqueued:
                _await(first, reader.on_enqueued)  # from then on its host keeps the arrays that it reads
            elif reader.host_call is not HostCallKind.PYTHON and not reader.is_resolved:
                _await(first, reader.on_resolved)
        if is_python:
            before = self._last_python.pop(first.session, None)
            if before is not None and not before.is_enqueued:
                _await(first, before.on_enqueued)
            if first.awaited:
                self._last_python[first.session] = first

    def resolve(self, dependency: Dependency[Payload]) -> None:
        """Resolve a dependency whose nodes have ended, or will never run."""
        ready: deque[Dependency[Payload]] = deque()
        self._resolve(dependency, ready)
        self._start(ready)

    def forget(self, session: int) -> None:
        """Forget a session that has ended. Its dependencies are resolved as its launches end."""
        self._last_python.pop(session, None)

    def _resolve(self, dependency: Dependency[Payload], ready: deque[Dependency[Payload]]) -> None:
        if dependency.is_resolved:
            return
        dependency.is_resolved = True
        self._unresolved[dependency.session] -= 1
        if not self._unresolved[dependency.session]:
            del self._unresolved[dependency.session]
        if dependency.host_call is HostCallKind.CLIENT:
            ready.extend(self._client_runs.end(dependency))
        dependency.nodes = ()
        _release(dependency.on_resolved, ready)
        if not dependency.is_enqueued:
            dependency.is_enqueued = True
            _release(dependency.on_enqueued, ready)

    def _start(self, ready: deque[Dependency[Payload]]) -> None:
        """Enqueue the nodes of these dependencies, and then of dependencies that awaited these.

        The chain may be as long as the window of a session.
        """
        while ready:
            dependency = ready.popleft()
            if dependency.is_enqueued or (
                dependency.host_call is HostCallKind.CLIENT and not self._client_runs.begin(dependency)
            ):
                continue
            dependency.is_enqueued = True
            for node in dependency.nodes:
                if node.is_pending:
                    self._enqueue(node)
            _release(dependency.on_enqueued, ready)
            if dependency.host_call is None:
                self._resolve(dependency, ready)


def _add_reader(entry: Entry, reader: Dependency[Payload]) -> None:
    """Note that a launch reads a buffer. Forget resolved readers each time that the list has doubled."""
    readers = entry.readers
    if readers is None:
        entry.readers = [reader]
        return
    if len(readers) & (len(readers) - 1) == 0:
        readers[:] = [each for each in readers if not each.is_resolved]
    readers.append(reader)


def _await(dependency: Dependency[Payload], event: list[Dependency[Payload]]) -> None:
    dependency.awaited += 1
    event.append(dependency)


def _release(event: list[Dependency[Payload]], ready: deque[Dependency[Payload]]) -> None:
    for dependency in event:
        dependency.awaited -= 1
        if not dependency.awaited:
            ready.append(dependency)
    event.clear()


# Limits for runs on each host of an island. XLA's CPU client takes 32 runs on a device; the rest is for other runs.
MAX_PER_ISLAND = 28
MAX_PER_SESSION = 24  # on all islands

# Limits for the runs among these that occupy threads of XLA.
MAX_IN_XLA_PER_ISLAND = 8
MAX_IN_XLA_PER_SESSION = 4


class Places(Generic[Payload]):
    """Counts the runs in flight of each session and on each island, up to two limits."""

    def __init__(self, of_a_session: int, of_an_island: int) -> None:
        self._most_of_a_session = of_a_session
        self._most_of_an_island = of_an_island
        self._of_session: Counter[int] = Counter()
        self._of_island: Counter[int] = Counter()

    def has_room(self, run: Dependency[Payload]) -> bool:
        (node,) = run.nodes
        return self._of_session[node.session] < self._most_of_a_session and all(
            self._of_island[gang.island] < self._most_of_an_island for gang in node.gangs
        )

    def count(self, run: Dependency[Payload], change: int) -> None:
        (node,) = run.nodes
        self._of_session[node.session] += change
        if not self._of_session[node.session]:
            del self._of_session[node.session]
        for gang in node.gangs:
            self._of_island[gang.island] += change


class ClientRunLimits(Generic[Payload]):
    """Bounds the runs in flight that wait for their clients' Python, on each island and of each session.

    Such a run occupies the queue of a device for as long as its client likes. A callback may itself start such runs, as
    many as stock JAX takes on a device, and wait for them. Therefore the bounds are as wide as possible for runs that
    have their own thread on their host (`worker/future_arrays.py`). Other runs occupy threads of XLA, which are few. A
    function on several devices has one run in flight at a time, since the error of a callback is known only when the
    run has ended.
    """

    def __init__(self) -> None:
        self._admitted: dict[Dependency[Payload], None] = {}
        self._waiting: list[Dependency[Payload]] = []
        self._all: Places[Payload] = Places(MAX_PER_SESSION, MAX_PER_ISLAND)
        self._in_xla: Places[Payload] = Places(MAX_IN_XLA_PER_SESSION, MAX_IN_XLA_PER_ISLAND)
        self._alone: set[str] = set()  # functions in flight that have one run at a time

    def begin(self, run: Dependency[Payload]) -> bool:
        """Return whether the run may begin. If not, a later call of `end` returns it."""
        if run in self._admitted:
            return True
        if self._has_room(run):
            self._enter(run)
            return True
        self._waiting.append(run)
        return False

    def end(self, run: Dependency[Payload]) -> list[Dependency[Payload]]:
        """Note that a run has ended, or was dropped. Return the runs that may begin now."""
        if run not in self._admitted:
            if run in self._waiting:
                self._waiting.remove(run)
            return []
        del self._admitted[run]
        self._count(run, -1)
        self._alone -= run.alone
        entered = []
        for each in self._waiting:
            if self._has_room(each):
                self._enter(each)
                entered.append(each)
        self._waiting = [each for each in self._waiting if each not in self._admitted]
        return entered

    def _has_room(self, run: Dependency[Payload]) -> bool:
        return all(places.has_room(run) for places in self._places(run)) and self._alone.isdisjoint(run.alone)

    def _enter(self, run: Dependency[Payload]) -> None:
        self._admitted[run] = None
        self._count(run, 1)
        self._alone |= run.alone

    def _count(self, run: Dependency[Payload], change: int) -> None:
        for places in self._places(run):
            places.count(run, change)

    def _places(self, run: Dependency[Payload]) -> tuple[Places[Payload], ...]:
        return (self._all,) if run.has_thread else (self._all, self._in_xla)
