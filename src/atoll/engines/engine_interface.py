"""The interface of engines, which start the hosts of a cluster, and the table of the known engines.

An engine finds machines for an island, starts a worker process per host, reports the end of workers, and ends them.
`atoll.engines.supervisor` and `atoll.engines.island_processes` do the rest for all engines. `atoll.engines.local` is
the simplest engine. `atoll.engines.hosts` is the engine for machines with host agents, and `atoll.engines.ray` starts
such agents with Ray. A new engine is one new file in this directory and one line in `ENGINES`.

The engine process calls the methods on its event loop, and engines make their callbacks there. No method may block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

import msgspec

from atoll.cluster.settings import DEFAULT_PLATFORM, check_known
from atoll.engines.engine_options import EngineOptions
from atoll.errors import Status
from atoll.wire.address import Address

if TYPE_CHECKING:  # a script that starts its own cluster needs the messages only later
    from atoll.protocol.messages import Message


class HostStart(msgspec.Struct, frozen=True):
    """The description of a worker process to start.

    One process serves a host, or all hosts of an island for some kinds of devices (`atoll.devices.device_kinds`);
    `host` is then the first of them.
    """

    island: int
    host: int  # number within the cluster
    rank: int  # number within the island
    hosts: int  # of the island
    devices: int  # per host
    incarnation: int  # rises with each start of the island, so names that contain it are unique
    platform: str = DEFAULT_PLATFORM
    among_islands: bool = False  # whether the cluster has several islands


class HostEnd(msgspec.Struct, frozen=True):
    """The end of a host's worker process."""

    status: int | None  # the exit status or the negative signal number; None if its machine is lost
    text: str  # for messages
    hung: bool = False  # whether it was killed because it hung while it started; the next start may succeed


class HostProcess(Protocol):
    """The worker process of a host.

    Both methods may be called at any time and repeatedly, even after the process has ended.
    """

    def terminate(self) -> None:
        """Ask the process to end."""

    def kill(self) -> None:
        """End the process by force.

        The engine must report the end soon, since the island is not restarted before. If the machine cannot be reached,
        the engine reports the end when the machine's lease expires, since the worker then ends by itself.
        """


class Engine(Protocol):
    """Starts the worker processes of a cluster.

    The class is called with the cluster's `EngineOptions`, and raises ClusterError if it cannot serve the cluster.
    """

    @property
    def agents(self) -> AgentHandler | None:
        """Return the handler of host agents, None if the engine starts workers without agents."""

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        """Find a machine for each of the island's processes, all or none. `starts` describes them, by rank.

        Call `then`, now or later, with the names of the machines by rank, () if they have none. Within `then`, the
        processes are started on these machines; their incarnation differs from that of `starts`.
        """

    def cancel(self, island: int) -> None:
        """Stop the search for machines of the island. Do nothing if there is no search."""

    def release(self, island: int) -> None:
        """Free the machines of an island that will not be restarted and has no processes."""

    def controller_at(self, address: Address) -> None:
        """Connect workers that start from now on to the new controller at this address."""

    async def close(self) -> None:
        """Remove what the engine has elsewhere when the cluster has ended. Return when that is done or fails."""

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        """Start a worker process and return at once. Raise OSError if it cannot be started.

        The engine must call `on_end(end)` once on the event loop when the process has ended for any reason, but not
        before this method has returned. The worker connects to the controller by itself. It must end when the engine
        process ends for any reason.
        """


class AgentHandler(Protocol):
    """Handles the host agents of an engine. All methods are called on the event loop, and none may block."""

    def begin(self, send: Callable[[Message], None]) -> None:
        """Begin to use a controller. `send` sends to it, and through it to the agents.

        This is called again for a controller that does not know this engine. Agents then introduce themselves again.
        """

    def agent_said(self, agent: int, content: bytes) -> None:
        """Handle a message (of `protocol.messages.engine_messages`) of the agent with this connection number."""

    def agent_lost(self, agent: int, reason: str) -> None:
        """Handle the end of an agent's connection. The agent may reconnect."""

    def cut_off(self, is_cut_off: bool) -> None:
        """Handle the loss of the connection to the controller, or its return. Meanwhile, silent agents are not lost."""

    def adopt(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        """Return the worker process that an engine started which is lost. Its agent introduces itself later.

        `on_end(end)` is also called if no agent with this worker connects within a lease.
        """

    def avoid(self, host: int) -> None:
        """Prefer a spare, if there is one, to the machine of this host when its island restarts."""

    def missing(self) -> str:
        """Return what the islands wait for, in sentences; "" if no island waits."""

    def drained(self, status: Status, text: str) -> None:
        """Handle the controller's answer to a DrainRequest."""


class Reports(Protocol):
    """Reports from `IslandProcesses` to the controller. The methods are called on the event loop."""

    def island_starts(self, island: int, incarnation: int, machines: Sequence[str]) -> None:
        """Report that the workers of an incarnation are about to start on these machines."""

    def worker_ended(self, host: int, incarnation: int, end: HostEnd) -> None:
        """Report that a worker has ended unexpectedly. All processes of its island have ended by then."""

    def island_removed(self, island: int, reason: str) -> None:
        """Report that the island will not be restarted."""


ENGINES = {
    "local": "atoll.engines.local:LocalEngine",
    "hosts": "atoll.engines.hosts.hosts_engine:HostsEngine",
    "ray": "atoll.engines.ray.ray_engine:RayEngine",
}


def check_engine(name: str) -> None:
    """Raise SettingsError if there is no engine with this name."""
    check_known("engine", name, ENGINES)


def make_engine(options: EngineOptions) -> Engine:
    """Return the engine of the settings. Raise SettingsError, or ClusterError if it cannot serve the cluster."""
    check_engine(options.settings.engine)
    engine: Engine = resolve_name(ENGINES[options.settings.engine])(options)
    return engine
