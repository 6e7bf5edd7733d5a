"""A whole cluster in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.cluster.settings import NULL_PLATFORM, ClusterSettings, Dispatch
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.frontends.bare import BareClient
from atoll.operate.engines.virtual.clock import VirtualClock
from atoll.operate.engines.virtual.controller_process import ControllerProcess
from atoll.operate.engines.virtual.costs import DEFAULT_COSTS, Costs
from atoll.operate.engines.virtual.host_process import HostProcess
from atoll.operate.engines.virtual.link import SimulatedLink
from atoll.operate.engines.virtual.tasks import Future, Task
from atoll.protocol import messages as m
from atoll.scheduling.scheduler import Policy
from atoll.transfers.data_port import Inbox
from atoll.worker.null.backend import Collectives
from atoll.worker.null.model import DEFAULT, MODELS, NullModel

Result = TypeVar("Result")

_PID = 1  # of everybody: there is one process


class VirtualCluster:
    """A cluster of null devices whose hosts have all joined. `run` is the only thing that lets time pass.

    `islands` is ISLANDSxHOSTSxDEVICES, `model` says how fast devices and networks are, and `costs` what the processes
    take. `policy` makes the policy of each island; the cluster's default if None.
    """

    def __init__(
        self,
        islands: str,
        model: NullModel = MODELS[DEFAULT],
        costs: Costs = DEFAULT_COSTS,
        dispatch: Dispatch = Dispatch.PARALLEL,
        policy: Callable[[], Policy] | None = None,
    ) -> None:
        settings = ClusterSettings(islands, NULL_PLATFORM, dispatch=dispatch)
        topology = Topology.parse(islands)
        self.clock = VirtualClock()
        self.controller = Controller(topology, settings)
        if policy is not None:
            self.controller.scheduler.use_policy(policy)
        model = costs.limit(model)
        self.process = ControllerProcess(self.controller, self.clock, costs, self._deliver)
        self._inboxes: dict[int, Inbox] = {}
        self._hosts: dict[int, HostProcess] = {}
        self._links: dict[int, SimulatedLink] = {}
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
        link = SimulatedLink(
            welcome, self._sender("proxy", number), self._inboxes, lambda: self.process.send("session ends", number)
        )
        self._links[number] = link
        return BareClient(link, Future, self.now)

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
            self._hosts[number].handle(message)
        elif kind == "session":
            self._links[number].hear(message)
