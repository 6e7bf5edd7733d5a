"""First come, first served: the simplest policy.

A session's next node becomes ready when the one before it is committed, so sessions with many launches in line
alternate, node by node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from atoll.launch.policy import Policy
from atoll.state.object_dumps import Deque, Dump, Ref, dump_of
from atoll.state.queued_nodes import QueuedNode


class FirstComeFirstServed(Policy):
    """Commits the node that has been ready for the longest time."""

    def __init__(self, ready: Iterable[QueuedNode[Any]] = ()) -> None:
        self._ready: deque[QueuedNode[Any]] = deque(ready)

    def add(self, node: QueuedNode[Any]) -> None:
        self._ready.append(node)

    def discard(self, node: QueuedNode[Any]) -> None:
        if self._ready and self._ready[0] is node:
            self._ready.popleft()

    def take(self) -> QueuedNode[Any] | None:
        return self._ready.popleft() if self._ready else None

    def is_like(self, other: Policy) -> bool:
        return isinstance(other, FirstComeFirstServed) and self._ready == other._ready

    def copy(self) -> Policy:
        return type(self)(self._ready)


@dump_of(FirstComeFirstServed, "first come, first served")
class FirstComeDump(Dump):
    """The stored state of the policy: see `atoll.state.object_dumps`."""

    _ready: Deque[Ref[QueuedNode[Any]]] = []
