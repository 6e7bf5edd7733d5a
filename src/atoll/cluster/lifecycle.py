"""The life of an island: one state machine, and what it notifies others of.

    starting --> ready <--> draining --> drained
        |         ^ |          |           | ^
        |         | v          v           | |
        +--> restarting <------+-----------+ |
        |         |                          |
        +---------+--> removed --------------+

Only `Lifecycle` changes a state. Subscribers are called in the order in which they subscribed, after the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from atoll.errors import Code, Status


class IslandState(StrEnum):
    """The words are those of the report."""

    STARTING = "starting"  # not all of its hosts have joined yet
    READY = "ready"
    DRAINING = "draining"  # it works; what is on it is being moved to others
    RESTARTING = "restarting"  # it failed, and its workers start again
    REMOVED = "removed"  # its workers are not started again: it failed too often, or was not up in time
    DRAINED = "drained"  # its operator has ended it


class HostState(StrEnum):
    READY = "ready"
    FAILED = "failed"


_S = IslandState
TRANSITIONS: Mapping[IslandState, frozenset[IslandState]] = {
    _S.STARTING: frozenset({_S.READY, _S.RESTARTING, _S.REMOVED}),
    _S.READY: frozenset({_S.DRAINING, _S.RESTARTING}),
    _S.DRAINING: frozenset({_S.READY, _S.RESTARTING, _S.DRAINED}),
    _S.RESTARTING: frozenset({_S.READY, _S.REMOVED}),
    _S.REMOVED: frozenset({_S.DRAINED}),
    _S.DRAINED: frozenset({_S.RESTARTING}),
}


class IllegalTransition(RuntimeError):
    """A defect: an island cannot go from this state to that."""


@dataclass
class Island:
    """Hosts that start, and fail, together."""

    number: int
    state: IslandState = IslandState.STARTING
    restarts: int = 0
    last_failure: Status | None = None
    was_ready: bool = False  # at least once
    incarnation: int = 0  # of its workers: those of earlier ones are not let in
    machines: tuple[str, ...] = ()  # by rank, where the engine has names for them
    returns: bool = False  # drained since a machine left: it comes back when there are machines for it again

    @property
    def works(self) -> bool:
        """Whether all of its hosts are there."""
        return self.state in (IslandState.READY, IslandState.DRAINING)

    @property
    def is_over(self) -> bool:
        """Whether it will not work again, or not before there are machines for it again."""
        return self.state in (IslandState.REMOVED, IslandState.DRAINED)

    @property
    def is_drained(self) -> bool:
        return self.state is IslandState.DRAINED

    @property
    def takes_sessions(self) -> bool:
        """Whether a session that opens now gets its devices."""
        return self.was_ready and self.state in (IslandState.READY, IslandState.RESTARTING)

    @property
    def removal(self) -> Status | None:
        """Return why the island is not restarted; None if it works or restarts."""
        if not self.is_over:
            return None
        return self.last_failure or Status(Code.DATA_LOSS, f"island {self.number} is {self.state}")


# ---- notifications


@dataclass(frozen=True, slots=True)
class IslandReady:
    """All of its hosts have joined, for the first time."""

    island: int


@dataclass(frozen=True, slots=True)
class IslandFailed:
    """A host of the island has failed, and with it the island. `status` says which host, and why."""

    island: int
    status: Status


@dataclass(frozen=True, slots=True)
class IslandRestarted:
    """All hosts of the island have joined after a restart, with nothing on them."""

    island: int


@dataclass(frozen=True, slots=True)
class IslandRemoved:
    """The island is not restarted."""

    island: int
    status: Status


@dataclass(frozen=True, slots=True)
class IslandDrained:
    """Nothing of any session is there, and its workers are to end."""

    island: int


Notification = IslandReady | IslandFailed | IslandRestarted | IslandRemoved | IslandDrained
N = TypeVar("N", bound=Notification)


@dataclass
class Lifecycle:
    """Changes the states of islands. Every method raises IllegalTransition where the table has no such change."""

    islands: Mapping[int, Island]
    _subscribers: dict[type[Any], list[Callable[[Any], None]]] = field(default_factory=dict)

    def subscribe(self, kind: type[N], call: Callable[[N], None]) -> None:
        """Has `call(notification)` called at each notification of this kind."""
        self._subscribers.setdefault(kind, []).append(call)

    def hosts_joined(self, island: int) -> None:
        """The last of the island's hosts has joined."""
        was = self._change(island, IslandState.READY)
        self._notify(IslandReady(island) if was is IslandState.STARTING else IslandRestarted(island))

    def fail(self, island: int, status: Status) -> None:
        self._change(island, IslandState.RESTARTING)
        self.islands[island].restarts += 1
        self.islands[island].last_failure = status
        self._notify(IslandFailed(island, status))

    def remove(self, island: int, status: Status) -> None:
        self._change(island, IslandState.REMOVED)
        self.islands[island].last_failure = status
        self._notify(IslandRemoved(island, status))

    def begin_drain(self, island: int) -> None:
        self._change(island, IslandState.DRAINING)

    def stop_drain(self, island: int) -> None:
        """It cannot be drained now. Does nothing where it was lost meanwhile."""
        if self.islands[island].state is IslandState.DRAINING:
            self._change(island, IslandState.READY)

    def end(self, island: int, status: Status) -> None:
        """Its operator does without it from now on."""
        self._change(island, IslandState.DRAINED)
        self.islands[island].last_failure = status
        self._notify(IslandDrained(island))

    def begin_return(self, island: int) -> None:
        """There are machines for a drained island again, and its workers are about to start."""
        self._change(island, IslandState.RESTARTING)
        self.islands[island].returns = False

    def _change(self, island: int, to: IslandState) -> IslandState:
        record = self.islands[island]
        was = record.state
        if to not in TRANSITIONS[was]:
            raise IllegalTransition(f"island {island} cannot go from {was.name} to {to.name}")
        record.state = to
        record.was_ready = record.was_ready or to is IslandState.READY
        return was

    def _notify(self, notification: Notification) -> None:
        for call in self._subscribers.get(type(notification), ()):
            call(notification)
