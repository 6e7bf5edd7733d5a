"""The host agents that an engine knows, and the worker that each of them holds.

Invariant: an agent is given a worker only while it holds none, of this cluster or of any other. One that is silent for
its lease is forgotten, and by then it has ended its worker itself: what it is told with each ping is how long it may
still trust the engine, counted from when the engine last heard of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.cluster.processes.local_process import describe_exit
from atoll.engines.engine_interface import HostEnd
from atoll.engines.hosts.rank_assignment import Candidate
from atoll.protocol import messages as m

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentWorker:
    """A worker that an agent holds; see `atoll.engines.engine_interface.HostProcess`."""

    agent: Agent
    incarnation: int
    on_end: Callable[[HostEnd], None]
    is_killed: bool = False

    def terminate(self) -> None:
        self.agent.tell(m.EndWorker(self.incarnation))

    def kill(self) -> None:
        """Where the agent is away, it hears it when it is back."""
        self.is_killed = True
        self.agent.tell(m.EndWorker(self.incarnation, force=True))


@dataclass(eq=False)
class Agent:
    """A host agent. `connection` is None while it is away; it may come back until its lease is over."""

    number: int  # among all that have come: for leases
    hello: m.AgentHello
    connection: int | None
    send: Callable[[m.Message], None] = field(repr=False)
    worker: AgentWorker | None = None
    foreign: int = 0  # the incarnation of a worker that it holds and that nobody wants
    coordinator_address: str = ""
    served: tuple[int, int] | None = None
    doing: str = ""  # such as "host 1, incarnation 3"
    host: int = -1  # that its worker serves
    leaves: str = ""  # the reason, if its machine is about to go

    @property
    def is_free(self) -> bool:
        return self.connection is not None and self.worker is None and not self.foreign and not self.leaves

    @property
    def name(self) -> str:
        """For people: its machine and where that is."""
        return f"{self.hello.machine} ({self.hello.address})"

    @property
    def candidate(self) -> Candidate:
        hello = self.hello
        return Candidate(hello.agent, hello.machine, hello.rank_slot, hello.group, self.served)

    @property
    def state(self) -> str:
        """What it does, for people."""
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
        """The reason for the loss of its worker, if its machine leaves: "m2 left: SIGTERM"."""
        return f"{self.hello.machine} left: {self.leaves}"

    def report(self, name: str = "", state: str = "") -> m.MachineReport:
        """Return what `atoll status` shows; `name` and `state` are better ones, if the engine knows them."""
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
        self.worker = AgentWorker(self, message.incarnation, on_end)
        self.served, self.host = (message.island, message.rank), message.host
        self.doing = f"host {message.host} of island {message.island}"
        self.tell(message)
        return self.worker

    def ended(self, incarnation: int, end: HostEnd) -> None:
        """Its worker of this incarnation has ended. Does nothing where that is known."""
        if self.foreign == incarnation:
            self.foreign = 0
        worker = self.worker
        if worker is not None and worker.incarnation == incarnation:
            self.worker = None
            worker.on_end(end)

    def came(self, hello: m.AgentHello, connection: int) -> None:
        """It has connected, for the first time or again, and says what it holds."""
        self.hello, self.connection, self.coordinator_address = hello, connection, hello.coordinator_address
        expected = self.worker.incarnation if self.worker is not None else 0
        self.foreign = hello.running if hello.running != expected else 0
        if self.foreign:
            _log.warning("%s holds a worker of incarnation %d, which is over", self.name, hello.running)
            self.tell(m.EndWorker(hello.running, force=True))
        if self.worker is not None and self.worker.is_killed and hello.running == expected:
            self.worker.kill()
        if not expected or hello.running == expected:
            return
        incarnation, status = hello.ended
        if incarnation == expected:
            end = HostEnd(status, describe_exit(status))
        else:  # it never got the start
            end = HostEnd(None, f"{self.name} has lost its connection while the worker was started")
        self.ended(expected, end)  # the last thing here: the island may start its next worker at once, on this agent
