"""A whole cluster in virtual time, as `paper.cluster` has one in real time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.cluster.settings import NULL_PLATFORM, ClusterSettings, Dispatch
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.errors import ClusterError, Status
from atoll.frontends.bare import BareClient
from atoll.frontends.session.session import ClusterSession
from atoll.operate.engines.virtual.clock import VirtualClock
from atoll.operate.engines.virtual.controller_process import ControllerProcess
from atoll.operate.engines.virtual.costs import MEASURED, Costs
from atoll.operate.engines.virtual.host_process import HostProcess
from atoll.operate.engines.virtual.link import VirtualConnection
from atoll.operate.engines.virtual.tasks import Future, Task
from atoll.protocol import messages as m
from atoll.transfers.data_port import Inbox
from atoll.worker.null.backend import Collectives
from atoll.worker.null.model import DEFAULT, MODELS, NullModel

Result = TypeVar("Result")

_PID = 1  # of everybody: there is one process


class SimulatedCluster:
    """All hosts have joined. `run` is the only thing that lets time pass."""

    def __init__(
        self,
        islands: str,
        model: NullModel = MODELS[DEFAULT],
        costs: Costs = MEASURED,
        dispatch: Dispatch = Dispatch.PARALLEL,
    ) -> None:
        settings = ClusterSettings(islands, NULL_PLATFORM, dispatch=dispatch)
        topology = Topology.parse(islands)
        self.clock = VirtualClock()
        self.controller = Controller(topology, settings)
        self.process = ControllerProcess(self.controller, self.clock, costs, self._deliver)
        self._inboxes: dict[int, Inbox] = {}
        self._hosts: dict[int, HostProcess] = {}
        self._sessions: dict[int, ClusterSession] = {}
        for island in range(topology.islands):
            collectives, neighbours = Collectives(), dict[int, Inbox]()
            for rank in range(topology.hosts):
                number = island * topology.hosts + rank
                self._hosts[number] = HostProcess(
                    number,
                    rank,
                    topology.devices,
                    model,
                    self.clock,
                    costs,
                    collectives,
                    self._inboxes,
                    neighbours,
                    self._sender("worker", number),
                )
                self._join(island, number)
        self.process.start()

    def _join(self, island: int, number: int) -> None:
        backend = self._hosts[number].host.backend
        address = f"unix:/simulated-{number}"
        ready = m.WorkerReady(island, number, backend.describe(), backend.platform, backend.platform_version, address)
        self.controller.leases.heard(number, 0.0)
        self.controller.worker_joined(ready, _PID)

    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.clock.now()

    def client(self, label: str = "bare client") -> BareClient:
        """A session of its own."""
        number = self.controller.open_session(_PID, label).number
        welcome: m.Welcome | None = None
        for destination, message in self.controller.take_outbox():
            if isinstance(message, m.Welcome):
                welcome = message
            else:
                self._deliver(destination, message)
        assert welcome is not None
        ways = VirtualConnection(
            number, self._sender("proxy", number), self._inboxes, lambda: self.process.send("session ends", number)
        )
        session = ClusterSession(welcome, ways, lambda on_feed, on_broken: ways, Future)
        session.on_lost = _raise
        self._sessions[number] = session
        return BareClient(session, self.now)

    def run(self, work: Coroutine[Any, Any, Result], patience: float = 3600.0) -> Result:
        """Runs it to its end. Raises what it raises; ClusterError when it takes `patience` seconds of virtual time."""
        return self.run_all([work], patience)[0]

    def run_all(self, works: list[Coroutine[Any, Any, Result]], patience: float = 3600.0) -> list[Result]:
        """Runs them beside one another, all to their ends."""
        tasks = [Task(self.clock, work) for work in works]
        self.clock.run_until(lambda: all(task.done() for task in tasks), self.clock.now() + patience)
        return [task.result() for task in tasks]

    def _sender(self, what: str, who: int) -> Callable[[Any], None]:
        return lambda message: self.process.send(what, who, message)

    def _deliver(self, destination: tuple[str, int], message: Any) -> None:
        kind, number = destination
        if kind == "host":
            self._hosts[number].hear(message)
        elif kind == "session":
            self._sessions[number].handle(message)


def _raise(status: Status) -> None:
    raise ClusterError(f"the controller has closed a session: {status}")
