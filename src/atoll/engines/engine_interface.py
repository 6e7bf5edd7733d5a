"""The seam to whatever starts the hosts of a cluster: this machine, other machines, a job scheduler.

An engine finds the machines for an island, starts the worker process of each of its hosts, reports its end, and ends
it. Everything else is the same for every engine and is in `atoll.engines.supervisor` and
`atoll.engines.island_processes`: the controller, the connection to it, which hosts there are, and when an island is
restarted. `atoll.engines.local` is the simplest engine. `atoll.engines.hosts` is the one for machines that have an
agent each; `atoll.engines.ray` starts these agents by Ray, on top of it.

A new engine is one new file in this directory and one line in `atoll.engines.engine_kinds`.

The methods below are called by the engine process, on the thread of its event loop. None of them may block. An engine
calls back on that thread, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.cluster.settings import DEFAULT_PLATFORM
from atoll.errors import Status
from atoll.protocol.messages import Message
from atoll.wire.address import Address


@dataclass(frozen=True)
class HostStart:
    """One start of the process that serves a host.

    `host` counts through the whole cluster, `rank` within the island, which has so many `hosts` of so many `devices`
    each, of a `platform`. `incarnation` rises with each start of the island, so names that carry it never clash with
    those of a process that is still ending. One process serves all `hosts` of an island where the kind of its devices
    says so (`atoll.devices.device_kinds`); `host` is then the first of them.
    """

    island: int
    host: int
    rank: int
    hosts: int
    devices: int
    incarnation: int
    platform: str = DEFAULT_PLATFORM


@dataclass(frozen=True)
class HostEnd:
    """How a host's worker process has ended: its exit status, or the negative number of the signal that ended it.

    None where its machine is lost, so that nobody knows. `text` says it to a person. `hung`: it was killed since it
    gave no sign of life while it started; the next one may well come through.
    """

    status: int | None
    text: str
    hung: bool = False


class HostProcess(Protocol):
    """A host's worker process, from its start on."""

    def terminate(self) -> None:
        """Asks it to end. May be called at any time and repeatedly, also when the process has ended."""

    def kill(self) -> None:
        """Ends it by force. May be called at any time and repeatedly, also when the process has ended.

        The end has to be reported soon: until it is, the island is not started again. Where the machine cannot be
        reached it is reported when the machine's lease is over, since the process ends by itself then.
        """


class Engine(Protocol):
    """Starts the worker processes of one cluster's hosts.

    The class is called with the cluster's `EngineOptions` and raises ClusterError where it cannot serve that cluster.
    """

    @property
    def agents(self) -> AgentHandler | None:
        """What takes the host agents that connect; None where the engine has none, and starts workers itself."""

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        """Finds a machine for each of the island's processes, all or none; `starts` says what they are to be, by rank.

        Calls `then` once it has them, perhaps at once, with their names by rank (() where they need none). The starts
        that follow, within `then`, are on these machines; they differ from `starts` in their incarnation.
        """

    def cancel(self, island: int) -> None:
        """The island does not wait for machines any more. Does nothing where it does not wait."""

    def release(self, island: int) -> None:
        """The island has ended for good, and none of its processes runs: its machines are free for others."""

    def controller_at(self, address: Address) -> None:
        """The controller is another one, at this address: workers that start from now on are to connect to it."""

    async def close(self) -> None:
        """The cluster has ended. Returns when nothing is left of what the engine has elsewhere, or that cannot be."""

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        """Starts a host's worker process and returns at once.

        `on_end(end)` is to be called once, on the event loop and never before this method has returned, when the
        process has ended for whatever reason. The worker connects to the controller on its own. It must end when the
        engine process ends, however that ends.

        Raises OSError where the process cannot be started.
        """


class AgentHandler(Protocol):
    """What an engine does with host agents. All methods are called on the event loop, and none may block."""

    def begin(self, send: Callable[[Message], None]) -> None:
        """A controller can be reached: `send` takes what is for it, and for the agents by way of it.

        Once more where that is another one, which knows nothing of this engine: agents come to it anew.
        """

    def agent_said(self, agent: int, content: bytes) -> None:
        """A message of the agent at this connection (of `protocol.messages.engine_messages`)."""

    def agent_lost(self, agent: int, reason: str) -> None:
        """Its connection has ended. It may come back on another."""

    def cut_off(self, is_cut_off: bool) -> None:
        """The controller cannot be reached for now, or can be reached again: who was silent meanwhile is not lost."""

    def avoid(self, host: int) -> None:
        """A spare is to replace the machine of this host when its island starts again, if there is one."""

    def missing(self) -> str:
        """What the islands wait for, in sentences; "" where none waits."""

    def drained(self, status: Status, text: str) -> None:
        """The controller's answer to a DrainRequest of the engine's."""


class Reports(Protocol):
    """What the controller learns about hosts. `Island` calls it on the event loop, for any engine."""

    def island_starts(self, island: int, incarnation: int, machines: Sequence[str]) -> None:
        """Its workers are about to start, on these machines. What is of an earlier incarnation is over."""

    def worker_ended(self, host: int, incarnation: int, end: HostEnd) -> None:
        """A worker has ended unasked. Its island's other processes have ended, too; the island is started next."""

    def island_removed(self, island: int, reason: str) -> None:
        """The island is not started again."""
