"""The host agents that an engine knows, each with at most one worker.

Invariant: the engine gives an agent a worker only while the agent holds none, of this cluster or of another. Each ping
tells the agent how much of its lease is left, counted from the last message that the engine received from it. So when
the engine forgets a silent agent, the agent has already ended its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.cluster.processes.child import describe_exit
from atoll.engines.engine_interface import HostEnd, HostStart
from atoll.engines.hosts.rank_assignment import Candidate
from atoll.protocol import messages as m

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentWorker:
    """The worker of a host agent, as a `HostProcess`."""

    agent: Agent
    incarnation: int
    on_end: Callable[[HostEnd], None]
    is_killed: bool = False

    def terminate(self) -> None:
        self.agent.tell(m.EndWorker(self.incarnation))

    def kill(self) -> None:
        self.is_killed = True  # a disconnected agent gets the message when it reconnects
        self.agent.tell(m.EndWorker(self.incarnation, force=True))


class AdoptedWorker:
    """The worker that a lost engine started for `start`, as a `HostProcess`. Its agent may connect at any time."""

    def __init__(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> None:
        self.start = start
        self._on_end = on_end
        self._worker: AgentWorker | None = None
        self._is_killed = False  # before its agent has connected

    def terminate(self) -> None:
        if self._worker is None:
            self._is_killed = True
        else:
            self._worker.terminate()

    def kill(self) -> None:
        if self._worker is None:
            self._is_killed = True
        else:
            self._worker.kill()

    def held_by(self, agent: Agent) -> None:
        """Record that this agent holds the worker. `Agent.came`, which is called next, kills a killed worker."""
        self._worker = AgentWorker(agent, self.start.incarnation, self._on_end, self._is_killed)
        agent.adopt(self._worker, self.start)

    def ended(self, end: HostEnd) -> None:
        """Report the end of a worker that no agent holds."""
        self._on_end(end)


@dataclass(eq=False)
class Agent:
    """A host agent. `connection` is None while it is disconnected; it can reconnect until its lease expires."""

    number: int  # unique, for leases
    hello: m.AgentHello
    connection: int | None
    send: Callable[[m.Message], None] = field(repr=False)
    worker: AgentWorker | None = None
    foreign: int = 0  # the incarnation of a worker that it holds and has to end
    coordinator_address: str = ""
    served: tuple[int, int] | None = None
    doing: str = ""  # such as "host 1 of island 0"
    host: int = -1  # the host that its worker serves
    leaves: str = ""  # the reason, if its machine is about to leave

    @property
    def is_free(self) -> bool:
        return self.connection is not None and self.worker is None and not self.foreign and not self.leaves

    @property
    def name(self) -> str:
        """Return its machine and the address of that, for messages."""
        return f"{self.hello.machine} ({self.hello.address})"

    @property
    def candidate(self) -> Candidate:
        hello = self.hello
        return Candidate(hello.agent, hello.machine, hello.rank_slot, hello.group, self.served)

    @property
    def state(self) -> str:
        """Return what the agent does, for messages."""
        if self.connection is None:
            return f"away ({self.doing})" if self.worker is not None else "away"
        if self.worker is not None:
            return f"leaves ({self.doing})" if self.leaves else self.doing
        if self.foreign:
            return "ends a worker that is over"
        return "leaves" if self.leaves else "free"

    def tell(self, message: m.StartWorker | m.EndWorker | m.Renew | m.Dismiss, *, last: bool = False) -> None:
        if self.connection is not None:
            self.send(m.TellAgent(self.connection, m.agent_content(message), last))

    @property
    def departure(self) -> str:
        """Return the reason for the end of its worker if its machine leaves, such as "m2 left: SIGTERM"."""
        return f"{self.hello.machine} left: {self.leaves}"

    def report(self, name: str = "", state: str = "") -> m.MachineReport:
        """Return what `atoll status` shows. `name` and `state` replace those of the agent if they are not ""."""
        hello, host = self.hello, self.host if self.worker is not None else -1
        return m.MachineReport(
            name or hello.machine,
            hello.address,
            state or self.state,
            hello.group,
            hello.devices,
            hello.memory_bytes,
            host,
            self.leaves,
        )

    # ---- its worker

    def start(self, message: m.StartWorker, on_end: Callable[[HostEnd], None]) -> AgentWorker:
        worker = AgentWorker(self, message.incarnation, on_end)
        self.adopt(worker, message)
        self.tell(message)
        return worker

    def adopt(self, worker: AgentWorker, start: HostStart | m.StartWorker) -> None:
        """Record that the agent holds a worker, which serves the host of `start`."""
        self.worker = worker
        self.served, self.host = (start.island, start.rank), start.host
        self.doing = f"host {start.host} of island {start.island}"

    def ended(self, incarnation: int, end: HostEnd) -> None:
        """Record the end of the worker of this incarnation. Do nothing if the end is known."""
        if self.foreign == incarnation:
            self.foreign = 0
        worker = self.worker
        if worker is not None and worker.incarnation == incarnation:
            self.worker = None
            worker.on_end(end)

    def came(self, hello: m.AgentHello, connection: int) -> None:
        """Record that the agent has connected or reconnected, and reconcile the worker that it reports."""
        self.hello, self.connection, self.coordinator_address = hello, connection, hello.coordinator_address
        expected = self.worker.incarnation if self.worker is not None else 0
        self.foreign = hello.running if hello.running != expected else 0
        if self.foreign:
            _log.warning("%s holds a worker of the earlier incarnation %d: ending it", self.name, hello.running)
            self.tell(m.EndWorker(hello.running, force=True))
        if self.worker is not None and self.worker.is_killed and hello.running == expected:
            self.worker.kill()
        if not expected or hello.running == expected:
            return
        incarnation, status = hello.ended
        if incarnation == expected:
            end = HostEnd(status, describe_exit(status))
        else:  # it never received the start message
            end = HostEnd(None, f"{self.name} lost its connection while the worker was started")
        self.ended(expected, end)  # last, since the island may start its next worker on this agent at once
