"""A cluster in virtual time with its clients, and their connections to its controller and hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from atoll.cluster.settings import NULL_PLATFORM, ClusterSettings, Dispatch
from atoll.cluster.topology import Topology
from atoll.devices.null.model import DEFAULT, MODELS, NullModel
from atoll.devices.null.null_backend import Collectives
from atoll.errors import ClusterError, Status
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.launch.policy import Policy
from atoll.protocol import messages as m
from atoll.session.bare import BareClient
from atoll.session.cluster_session import ClusterSession
from atoll.session.outgoing_messages import OutgoingMessages
from atoll.session.session_interfaces import CallbackHandler, Unreached
from atoll.transfers.inbox import Inbox
from atoll.virtual.controller_process import ControllerProcess
from atoll.virtual.host_process import VirtualHostProcess
from atoll.virtual.simulated_costs import DEFAULT_COSTS, Costs
from atoll.virtual.virtual_time import Future, Task, VirtualClock
from atoll.worker.worker_main import introduction

Result = TypeVar("Result")


class VirtualCluster:
    """A cluster of null devices whose hosts have all joined. Time passes only in `run` and `run_all`.

    Args:
        islands: The topology as ISLANDSxHOSTSxDEVICES.
        model: Speeds of devices and networks.
        costs: Time that messages and gangs cost the processes.
        dispatch: How the controller dispatches gangs.
        policy: Creates the scheduling policy of each island; None selects the cluster's default.
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
        self.process = ControllerProcess(settings, self.clock, costs, policy)
        self.controller = self.process.controller
        model = costs.limit(model)
        self._inboxes: dict[int, Inbox] = {}
        self._hosts: dict[int, VirtualHostProcess] = {}
        for island in range(topology.islands):
            collectives, neighbors = Collectives(), dict[int, Inbox]()
            for rank, number in enumerate(topology.hosts_of(island)):
                connection = self.process.connect("worker", f"host {number}", partial(self._to_host, number))
                self._hosts[number] = VirtualHostProcess(
                    number,
                    rank,
                    topology.shapes[island].devices,
                    model=model,
                    clock=self.clock,
                    costs=costs,
                    collectives=collectives,
                    inboxes=self._inboxes,
                    neighbors=neighbors,
                    send=partial(self.process.send, connection),
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
        """Return the virtual time in seconds."""
        return self.clock.now()

    def sent_bytes(self, host: int) -> int:
        """Return the bytes that a host has sent to hosts of other islands."""
        return self._hosts[host].host.network.sent_bytes

    def client(self, label: str = "bare client") -> BareClient:
        """Open a new session and return its client."""
        inbox: list[Any] = []  # receives messages until the session exists
        handle = inbox.append

        def on_message(message: Any) -> None:
            handle(message)

        connection = self.process.connect("proxy", label, on_message)
        welcome, *_ = inbox
        assert isinstance(welcome, m.Welcome)
        link = VirtualConnection(
            welcome.session,
            partial(self.process.send, connection),
            self._inboxes,
            partial(self.process.disconnect, connection),
        )
        session = ClusterSession(welcome, OutgoingMessages(link), lambda *_: link, Future, on_lost=_raise)
        handle = session.handle
        return BareClient(session, self.now)

    def run(self, work: Coroutine[Any, Any, Result], patience: float = 3600.0) -> Result:
        """Run `work` to its end and return its result.

        Raises the exceptions of `work`, and ClusterError if it takes more than `patience` seconds of virtual time.
        """
        return self.run_all([work], patience)[0]

    def run_all(self, works: list[Coroutine[Any, Any, Result]], patience: float = 3600.0) -> list[Result]:
        """Run all `works` concurrently to their ends. Otherwise like `run`."""
        tasks = [Task(self.clock, work) for work in works]
        self.clock.run_until(lambda: all(task.done() for task in tasks), self.clock.now() + patience)
        return [task.result() for task in tasks]


def _raise(status: Status) -> None:
    raise ClusterError(f"the controller has closed a session: {status}")


class VirtualConnection:
    """A session's `ControlConnection` and `DataChannels` (see `session.session_interfaces`).

    `send(message)` delivers a message to the controller. Uploaded contents reach the hosts' `inboxes` at once.
    """

    def __init__(
        self,
        session: int,
        send: Callable[[Any], None],
        inboxes: Mapping[int, Inbox],
        on_close: Callable[[], None],
    ) -> None:
        self.send = send
        self._session = session
        self._inboxes = inboxes
        self._on_close: Callable[[], None] | None = on_close

    @property
    def is_closed(self) -> bool:
        return self._on_close is None

    def set_callback_handler(self, handler: CallbackHandler) -> None:
        """Do nothing: hosts call no clients."""

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        """Report that all hosts are reachable."""
        then({})

    def disconnect(self, hosts: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return no launches to resend, because inboxes survive failures of hosts."""
        return ()

    def forget_uploads(self) -> None:
        """Do nothing: uploads are not retained."""

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        for host in hosts:
            self._inboxes[host].put(self._session, feed, b"".join(contents))

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        contents = os.pread(descriptor, nbytes, 0)
        os.close(descriptor)
        self.upload(hosts, feed, [contents])

    def access(self, host: int) -> None:
        return None

    def is_local(self, host: int) -> bool:
        return False

    def read_directly(self, host: int, wanted: ReadWanted) -> bool:
        return False

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Do nothing: null programs make no calls to clients."""

    def close(self) -> None:
        """Close the connection. Idempotent, because both the control and the data side close it."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
