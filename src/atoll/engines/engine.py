"""The seam to whatever starts the hosts of a cluster: this machine, other machines, a job scheduler.

An engine starts the worker process of a host, reports its end, and ends it. Everything else is the same for every
engine and is in `atoll.engines.supervisor` and `atoll.engines.island`: the controller, the connection
to it, which hosts there are, and when an island is restarted. `atoll.engines.local` is the simplest engine.

A new engine is one new file in this folder and one line in `atoll.engines.kinds`.

The methods below are called by the engine process, on the thread of its event loop. None of them may block. An engine
calls back on that thread, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HostStart:
    """One start of the process that serves a host.

    `host` counts through the whole cluster, `rank` within the island, which has so many `hosts` of so many `devices`
    each. `incarnation` rises with each start of the island, so names that carry it never clash with those of a process
    that is still ending. One process serves all `hosts` of an
    island where the kind of its devices says so (`atoll.devices.kinds`); `host` is then the first of them.
    """

    island: int
    host: int
    rank: int
    hosts: int
    devices: int
    incarnation: int


class HostProcess(Protocol):
    """A host's worker process, from its start on."""

    @property
    def pid(self) -> int:
        """Its number on the machine that it runs on: the worker gives the same one to the controller."""

    def terminate(self) -> None:
        """Asks it to end. May be called at any time and repeatedly, also when the process has ended."""

    def kill(self) -> None:
        """Ends it by force. May be called at any time and repeatedly, also when the process has ended.

        The end has to be reported within a second or so: until it is, the island is not started again.
        """


class Engine(Protocol):
    """Starts the worker processes of one cluster's hosts.

    The class is called with the cluster's `EngineOptions` and raises ClusterError where it cannot serve that cluster.
    """

    def start_host(self, start: HostStart, on_end: Callable[[int], None]) -> HostProcess:
        """Starts a host's worker process and returns at once.

        `on_end(status)` is to be called once, on the event loop and never before this method has returned, when the
        process has ended for whatever reason: the exit status, or the negative number of the signal that ended it. The
        worker connects to the controller on its own. It must end when the engine process ends, however that ends.

        Raises OSError where the process cannot be started.
        """


class Reports(Protocol):
    """What the controller learns about hosts. `Island` calls it on the event loop, for any engine."""

    def worker_ended(self, host: int, pid: int, status: int) -> None:
        """A worker has ended unasked. Its island's other processes have ended, too; the island is started next."""

    def island_given_up(self, island: int, reason: str) -> None:
        """The island is not started again."""
