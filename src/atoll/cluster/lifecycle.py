"""The state machine of islands, and its notifications.

    starting --> ready <--> draining --> drained
        |         ^ |          |           | ^
        |         | v          v           | |
        +--> restarting <------+-----------+ |
        |         |                          |
        +---------+--> removed --------------+

Only `Lifecycle` changes a state. After the change, it calls subscribers in the order in which they subscribed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.errors import Code, Details, Kind, Status


class IslandState(StrEnum):
    """The state of an island. The values appear in reports."""

    STARTING = "starting"  # not all of its hosts have joined yet
    READY = "ready"
    DRAINING = "draining"  # works, while its arrays and slices migrate to other islands
    RESTARTING = "restarting"  # failed, and its workers start again
    REMOVED = "removed"  # failed too often or was not up in time, so its workers are not restarted
    DRAINED = "drained"  # ended by an operator or because its machines left


# The states in which all hosts of an island are connected and working.
WORKING = frozenset({IslandState.READY, IslandState.DRAINING})


class HostState(StrEnum):
    """The state of a host whose worker has joined. If a worker joins again, a new record replaces that of the host."""

    READY = "ready"
    FAILED = "failed"  # with its island


HOST_TRANSITIONS: Mapping[HostState, frozenset[HostState]] = {
    HostState.READY: frozenset({HostState.FAILED}),
    HostState.FAILED: frozenset(),
}


_S = IslandState
TRANSITIONS: Mapping[IslandState, frozenset[IslandState]] = {
    _S.STARTING: frozenset({_S.READY, _S.RESTARTING, _S.REMOVED}),
    _S.READY: frozenset({_S.DRAINING, _S.RESTARTING}),
    _S.DRAINING: frozenset({_S.READY, _S.RESTARTING, _S.DRAINED}),
    _S.RESTARTING: frozenset({_S.READY, _S.REMOVED}),
    _S.REMOVED: frozenset({_S.DRAINED}),
    _S.DRAINED: frozenset({_S.RESTARTING}),
}


@dataclass
class Island(StateMachine[IslandState]):
    """A group of hosts that start and fail together."""

    transitions = TRANSITIONS
    number: int
    state: IslandState = IslandState.STARTING
    restarts: int = 0
    last_failure: Status | None = None
    was_ready: bool = False  # at least once
    incarnation: int = 0  # of its workers; those of earlier incarnations are refused
    machines: tuple[str, ...] = ()  # by rank, if the engine has names for them
    returns: bool = False  # drained, and starts again when there are machines for it
    # By session: functions that its hosts have yet to compile again. Until then, the session starts none of them here.
    needs_recompile: dict[int, set[str]] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Return whether all of its hosts are connected and working."""
        return self.state in WORKING

    @property
    def is_over(self) -> bool:
        """Return whether it will not work again, at least until it has new machines."""
        return self.state in (IslandState.REMOVED, IslandState.DRAINED)

    @property
    def is_drained(self) -> bool:
        return self.state is IslandState.DRAINED

    @property
    def takes_sessions(self) -> bool:
        """Return whether a session that opens now gets its devices."""
        return self.was_ready and self.state in (IslandState.READY, IslandState.RESTARTING)

    @property
    def removal(self) -> Status | None:
        """Return why the island is not restarted; None if it works or restarts."""
        if not self.is_over:
            return None
        return self.last_failure or _explained(
            self.number, Status(Code.DATA_LOSS, f"island {self.number} is {self.state}")
        )

    def _described(self) -> str:
        return f"island {self.number}"


# ---- notifications


class IslandReady(msgspec.Struct, frozen=True):
    """All hosts of the island have joined for the first time."""

    island: int


class IslandFailed(msgspec.Struct, frozen=True):
    """A host of the island has failed, and with it the island. `status` says which host, and why."""

    island: int
    status: Status


class IslandRestarted(msgspec.Struct, frozen=True):
    """All hosts of the island have joined after a restart, with nothing on them."""

    island: int


class IslandRemoved(msgspec.Struct, frozen=True):
    """The island will not be restarted."""

    island: int
    status: Status


class IslandDrained(msgspec.Struct, frozen=True):
    """No session has anything on the island, and its workers must end. `status` says who has drained it."""

    island: int
    status: Status


Notification = IslandReady | IslandFailed | IslandRestarted | IslandRemoved | IslandDrained
N = TypeVar("N", bound=Notification)


class Lifecycle(msgspec.Struct):
    """Changes the states of islands. Methods raise IllegalTransition for a transition that the table does not have."""

    islands: Mapping[int, Island]
    _subscribers: dict[type[Any], list[Callable[[Any], None]]] = msgspec.field(default_factory=dict)

    def subscribe(self, kind: type[N], *calls: Callable[[N], None]) -> None:
        """Call each of `calls` with each notification of this kind, in this order."""
        self._subscribers.setdefault(kind, []).extend(calls)

    def hosts_joined(self, island: int) -> None:
        """Record that all hosts of the island have joined.

        A drain is then over, while a failure is still reported as the last one.
        """
        was = self._change(island, IslandState.READY)
        record = self.islands[island]
        if record.last_failure is not None and not record.last_failure.details.retriable:
            record.last_failure = None
        self._notify(IslandReady(island) if was is IslandState.STARTING else IslandRestarted(island))

    def fail(self, island: int, status: Status) -> None:
        status = _explained(island, status, retriable=True)
        self._change(island, IslandState.RESTARTING)
        self.islands[island].restarts += 1
        self.islands[island].last_failure = status
        self._notify(IslandFailed(island, status))

    def remove(self, island: int, status: Status) -> None:
        status = _explained(island, status)
        self._change(island, IslandState.REMOVED)
        self.islands[island].last_failure = status
        self._notify(IslandRemoved(island, status))

    def begin_drain(self, island: int) -> None:
        self._change(island, IslandState.DRAINING)

    def stop_drain(self, island: int) -> None:
        """Return to READY since the island cannot be drained now. Do nothing if it has failed meanwhile."""
        if self.islands[island].state is IslandState.DRAINING:
            self._change(island, IslandState.READY)

    def end(self, island: int, status: Status) -> None:
        """Record that the island is drained."""
        status = _explained(island, status)
        self._change(island, IslandState.DRAINED)
        self.islands[island].last_failure = status
        self._notify(IslandDrained(island, status))

    def begin_return(self, island: int) -> None:
        """Record that the workers of a drained island are about to start again."""
        self._change(island, IslandState.RESTARTING)
        self.islands[island].returns = False

    def _change(self, island: int, to: IslandState) -> IslandState:
        record = self.islands[island]
        was = record.state
        record.enter(to)
        record.was_ready = record.was_ready or to is IslandState.READY
        return was

    def _notify(self, notification: Notification) -> None:
        for call in self._subscribers.get(type(notification), ()):
            call(notification)


def _explained(island: int, status: Status, retriable: bool = False) -> Status:
    """Return the status with the details of an island's failure. It may name the hosts already."""
    details = status.details
    return status.with_details(Details(Kind.ISLAND, (island,), details.hosts, details.limit, retriable))
