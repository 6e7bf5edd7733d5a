"""Sequential dispatch of a session's nodes: each node is dispatched when all hosts have enqueued the previous one.

This is the fallback for launches that cannot be dispatched ahead, and the baseline for parallel dispatch (section 4.5
of the Pathways paper).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from atoll.launch.scheduler import Scheduler
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang, Payload, QueuedNode


class SequentialDispatch(Generic[Payload]):
    """The node of each session that is being dispatched, and the nodes that wait for it.

    `enqueue` takes the place of that of the scheduler.
    """

    def __init__(self, scheduler: Scheduler[Payload]) -> None:
        self._scheduler = scheduler
        self._current: dict[int, QueuedNode[Payload]] = {}
        self._next: dict[int, deque[QueuedNode[Payload]]] = {}
        self._unacknowledged: dict[int, int] = {}  # number of hosts that have not acknowledged, by sequence
        self._unstarted: dict[int, int] = {}  # number of gangs of current nodes, by node
        self._joined = 0

    def enqueue(self, node: QueuedNode[Payload]) -> None:
        """Have a node join its lines, and wait there for all earlier nodes of its session.

        Its age becomes its position among them.
        """
        self._joined += 1
        node.age = self._joined
        if node.session in self._current:
            self._scheduler.lacks(node, Reason.OWN)
            self._next.setdefault(node.session, deque()).append(node)
        else:
            self._begin(node)
        self._scheduler.enqueue(node)

    def started(self, gang: Gang[Payload], hosts: int) -> None:
        """Note that the gang was sent to `hosts` hosts."""
        self._unacknowledged[gang.sequence] = hosts
        self._unstarted[gang.node.number] -= 1

    def enqueued(self, gang: Gang[Payload]) -> None:
        """Note that a host has enqueued the gang."""
        left = self._unacknowledged.get(gang.sequence, 0) - 1
        if left > 0:
            self._unacknowledged[gang.sequence] = left
        else:
            self.ended(gang)

    def ended(self, gang: Gang[Payload]) -> None:
        """Note that all hosts have enqueued the gang, or that it has ended."""
        self._unacknowledged.pop(gang.sequence, None)
        node = gang.node
        is_dispatched = not any(other.sequence in self._unacknowledged for other in node.gangs)
        if is_dispatched and self._unstarted.get(node.number) == 0:
            self.finish(node)

    def finish(self, node: QueuedNode[Payload]) -> None:
        """Begin the next node of the session, since this one was dispatched or never will be."""
        if self._current.get(node.session) is not node:
            return
        del self._current[node.session], self._unstarted[node.number]
        self._begin_next(node.session)

    def withdraw(self, node: QueuedNode[Payload]) -> None:
        """Forget a dropped node, which others will replace: see `precede`."""
        for gang in node.gangs:
            self._unacknowledged.pop(gang.sequence, None)
        if self._current.get(node.session) is node:
            del self._current[node.session], self._unstarted[node.number]

    def precede(self, nodes: Sequence[QueuedNode[Payload]]) -> None:
        """Dispatch these nodes, in this order, before all nodes of their sessions that are still in line.

        The nodes have the ages of those that they replace.
        """
        by_session: dict[int, list[QueuedNode[Payload]]] = {}
        for node in nodes:
            self._scheduler.lacks(node, Reason.OWN)
            by_session.setdefault(node.session, []).append(node)
        for session, own in by_session.items():
            line = self._next.setdefault(session, deque())
            current = self._current.get(session)
            if current is not None and current.is_pending:
                self._scheduler.lacks(current, Reason.OWN)
                del self._current[session], self._unstarted[current.number]
                own.append(current)
            line.extendleft(reversed(own))
            if session not in self._current:
                self._begin_next(session)

    def forget(self, session: int) -> None:
        """Forget a session that has ended."""
        self._next.pop(session, None)
        node = self._current.pop(session, None)
        if node is not None:
            del self._unstarted[node.number]

    def _begin_next(self, session: int) -> None:
        line = self._next.get(session)
        while line:
            following = line.popleft()
            if following.is_pending:
                self._begin(following)
                self._scheduler.arrived(following, Reason.OWN)
                return
        self._next.pop(session, None)

    def _begin(self, node: QueuedNode[Payload]) -> None:
        self._current[node.session] = node
        self._unstarted[node.number] = len(node.gangs)
