"""A whole cluster in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from atoll.cluster.settings import NULL_PLATFORM, ClusterSettings, Dispatch
from atoll.cluster.topology import Topology
from atoll.devices.null.model import DEFAULT, MODELS, NullModel
from atoll.devices.null.null_backend import Collectives
from atoll.errors import ClusterError, Status
from atoll.protocol import messages as m
from atoll.scheduling.policy import Policy
from atoll.session.bare import BareClient
from atoll.session.cluster_session import ClusterSession
from atoll.session.outgoing_messages import Outgoing
from atoll.transfers.inbox import Inbox
from atoll.virtual.clock import VirtualClock
from atoll.virtual.controller_process import ControllerProcess
from atoll.virtual.host_process import HostProcess
from atoll.virtual.simulated_costs import DEFAULT_COSTS, Costs
from atoll.virtual.tasks import Future, Task
from atoll.virtual.virtual_link import VirtualConnection
from atoll.worker.worker_main import introduction

Result = TypeVar("Result")


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
        settings = ClusterSettings(islands, NULL_PLATFORM, dispatch=dispatch, relay_group=0)
        topology = Topology.parse(islands)
        self.clock = VirtualClock()
        self.process = ControllerProcess(settings, self.clock, costs)
        self.controller = self.process.controller
        if policy is not None:
            self.controller.scheduler.use_policy(policy)
        model = costs.limit(model)
        self._inboxes: dict[int, Inbox] = {}
        self._hosts: dict[int, HostProcess] = {}
        for island in range(topology.islands):
            collectives, neighbours = Collectives(), dict[int, Inbox]()
            for rank, number in enumerate(topology.hosts_of(island)):
                connection = self.process.connect("worker", f"host {number}", partial(self._to_host, number))
                self._hosts[number] = HostProcess(
                    number,
                    rank,
                    topology.shapes[island].devices,
                    model,
                    self.clock,
                    costs,
                    collectives,
                    self._inboxes,
                    neighbours,
                    partial(self.process.send, connection),
                )
                self._join(island, number, connection)

    def _join(self, island: int, number: int, connection: int) -> None:
        backend = self._hosts[number].host.backend
        address = f"unix:/simulated-{number}"
        _, ready = introduction(island, number, backend, address)
        self.process.receive_now(connection, ready)

    def _to_host(self, number: int, message: Any) -> None:
        self._hosts[number].handle(message)

    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.clock.now()

    def client(self, label: str = "bare client") -> BareClient:
        """A session of its own."""
        inbox: list[Any] = []  # until the session is there
        handle = inbox.append

        def on_message(message: Any) -> None:
            handle(message)

        connection = self.process.connect("proxy", label, on_message)
        welcome, *_ = inbox
        assert isinstance(welcome, m.Welcome)
        ways = VirtualConnection(
            welcome.session,
            partial(self.process.send, connection),
            self._inboxes,
            partial(self.process.disconnect, connection),
        )
        session = ClusterSession(welcome, Outgoing(ways), lambda on_feed, on_broken: ways, Future)
        session.on_lost = _raise
        handle = session.handle
        return BareClient(session, self.now)

    def run(self, work: Coroutine[Any, Any, Result], patience: float = 3600.0) -> Result:
        """Runs it to its end. Raises what it raises; ClusterError when it takes `patience` seconds of virtual time."""
        return self.run_all([work], patience)[0]

    def run_all(self, works: list[Coroutine[Any, Any, Result]], patience: float = 3600.0) -> list[Result]:
        """Runs them beside one another, all to their ends."""
        tasks = [Task(self.clock, work) for work in works]
        self.clock.run_until(lambda: all(task.done() for task in tasks), self.clock.now() + patience)
        return [task.result() for task in tasks]


def _raise(status: Status) -> None:
    raise ClusterError(f"the controller has closed a session: {status}")
