"""Launches that take as long as somebody else likes, and what waits for them.

A call of colocated Python takes as long as the user's function, and so does a compiled function that calls its client's
Python. What waits for such a *late* gang on its host would take room there from everybody. So what needs its results
*stands aside* in the controller: it is in no line, and what its session launches after it goes on before it. The late
gang may even need that: a callback that computes on the cluster returns when that is done. Invariant: nothing in line
waits for anything late.

What stands aside joins its lines, by its age, when what it needs is there; what it makes is promised in its turn. Order
is kept where it matters:

- what consumes an array waits for those that read it and stand aside, or are late;
- calls of Python are in the order of their launches, and follow those that give their arguments at once;
- nodes of a launch follow one another.

So does what needs the results of a node that depends on data (`promises.irregular`): what that will run is promised
before it is known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic

from atoll.promises.client_runs import ClientRuns
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.gangs import GangSpec
from atoll.scheduling.queued_nodes import Late, Payload, Promise, QueuedNode
from atoll.scheduling.scheduler import Scheduler


class Promises(Generic[Payload]):
    """`join(node)` puts a node in its lines, when it may be there."""

    def __init__(self, scheduler: Scheduler[Payload], join: Callable[[QueuedNode[Payload]], None]) -> None:
        self._scheduler = scheduler
        self._join = join
        self._unkept: Counter[int] = Counter()  # by session
        self._last_python: dict[int, Promise[Payload]] = {}  # that stood aside, by session
        self._client_runs: ClientRuns[Payload] = ClientRuns()

    def has_some(self, session: int) -> bool:
        """Whether some promise of the session is not kept: else only a late launch need be ordered here."""
        return session in self._unkept

    def order(
        self,
        nodes: Sequence[QueuedNode[Payload]],
        units: Sequence[tuple[GangSpec, ...]],
        arguments: Sequence[Entry],
        donated: Sequence[Entry],
    ) -> Promise[Payload] | None:
        """Orders a new launch: its nodes, with what each of them does. Those that may join their lines have done so.

        Returns the promise of its results, the last of the launch's to be kept; None where it needs none: its nodes
        are in no line then.
        """
        session = nodes[0].session
        late = [unit[0].late for unit in units]
        if any(late):
            promises = [Promise(session, (node,), each) for node, each in zip(nodes, late, strict=True)]
            for promise, unit in zip(promises, units, strict=True):
                promise.alone = frozenset(name for gang in unit if gang.spans_devices for name in gang.functions)
            promises[0].has_thread = len(promises) == 1 and not promises[0].alone and not donated  # as workers have it
        else:
            promises = [Promise(session, tuple(nodes), None)]
        first, last = promises[0], promises[-1]
        self._find_what_it_awaits(first, arguments, donated)
        if first.late is None and last is first and not first.awaited:
            return None
        for before, after in pairwise(promises):
            _await(after, before.after_keep)
        self._unkept[session] += len(promises)
        for promise in promises:
            for node in promise.nodes:
                node.promise = promise
                self._scheduler.stand_aside(node)
        if first.late is not Late.PYTHON or first.awaited:
            for entry in arguments:
                entry.readers = [*(each for each in entry.readers or () if not each.is_kept), last]
        if not first.awaited:
            self._start(deque([first]))
        return last

    def of_undecided(self, session: int, arguments: Sequence[Entry]) -> Promise[Payload]:
        """The promise of a launch that reads these, and whose nodes are not known before `decided`."""
        promise: Promise[Payload] = Promise(session, (), None, awaited=1)
        self._find_what_it_awaits(promise, arguments, ())
        self._unkept[session] += 1
        for entry in arguments:
            entry.readers = [*(each for each in entry.readers or () if not each.is_kept), promise]
        return promise

    def decided(self, promise: Promise[Payload], nodes: Sequence[QueuedNode[Payload]]) -> None:
        """These are its nodes; they are in no line yet."""
        promise.nodes = tuple(nodes)
        for node in nodes:
            node.promise = promise
            self._scheduler.stand_aside(node)
        promise.awaited -= 1
        if not promise.awaited:
            self._start(deque([promise]))

    def _find_what_it_awaits(
        self, first: Promise[Payload], arguments: Sequence[Entry], donated: Sequence[Entry]
    ) -> None:
        is_python = first.late is Late.PYTHON
        for promise in {id(entry.promise): entry.promise for entry in arguments}.values():
            if promise is None or promise.is_kept:
                continue
            if not (is_python and promise.late is Late.PYTHON):
                _await(first, promise.after_keep)
            elif not promise.has_joined:
                _await(first, promise.after_join)
        for reader in {id(reader): reader for entry in donated for reader in entry.readers or ()}.values():
            if reader.late is Late.PYTHON and not reader.has_joined:
                _await(first, reader.after_join)  # from then on its host keeps what it reads
            elif reader.late is not Late.PYTHON and not reader.is_kept:
                _await(first, reader.after_keep)
        if is_python:
            before = self._last_python.pop(first.session, None)
            if before is not None and not before.has_joined:
                _await(first, before.after_join)
            if first.awaited:
                self._last_python[first.session] = first

    def keep(self, promise: Promise[Payload]) -> None:
        """What its nodes do has ended, or will never be done."""
        ready: deque[Promise[Payload]] = deque()
        self._keep(promise, ready)
        self._start(ready)

    def forget(self, session: int) -> None:
        """The session has ended. Its promises are kept as its launches end."""
        self._last_python.pop(session, None)

    def _keep(self, promise: Promise[Payload], ready: deque[Promise[Payload]]) -> None:
        if promise.is_kept:
            return
        promise.is_kept = True
        self._unkept[promise.session] -= 1
        if not self._unkept[promise.session]:
            del self._unkept[promise.session]
        if promise.late is Late.CLIENT:
            ready.extend(self._client_runs.end(promise))
        promise.nodes = ()
        _release(promise.after_keep, ready)
        if not promise.has_joined:
            promise.has_joined = True
            _release(promise.after_join, ready)

    def _start(self, ready: deque[Promise[Payload]]) -> None:
        """Has nodes join that wait for no promise, and then those that waited for these; a chain of them may be as
        long as a session's window.
        """
        while ready:
            promise = ready.popleft()
            if promise.has_joined or (promise.late is Late.CLIENT and not self._client_runs.begin(promise)):
                continue
            promise.has_joined = True
            for node in promise.nodes:
                if not node.dropped:
                    self._join(node)
            _release(promise.after_join, ready)
            if promise.late is None:
                self._keep(promise, ready)


def _await(promise: Promise[Payload], event: list[Promise[Payload]]) -> None:
    promise.awaited += 1
    event.append(promise)


def _release(event: list[Promise[Payload]], ready: deque[Promise[Payload]]) -> None:
    for promise in event:
        promise.awaited -= 1
        if not promise.awaited:
            ready.append(promise)
    event.clear()
