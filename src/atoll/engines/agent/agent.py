"""The host agent, which reconnects to the controller for as long as it runs, and holds one worker.

Invariants: an agent holds at most one worker. A worker ends with its agent. It also ends when the agent's lease and
its grace have passed without a message of the cluster: then another machine may have replaced this one.

An agent that was away when its cluster ended learns of that from nobody. So it ends after `away_seconds` without a
message of the cluster, unless it waits for the next cluster. An agent that has not joined yet waits without a limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll._version import __version__
from atoll.cluster.directories import sockets_bases
from atoll.cluster.processes.client_directories import HOST_DIRECTORIES, sweep
from atoll.cluster.processes.leases import Leases
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.machine_memory import machine_memory
from atoll.cluster.processes.process_runtime import StopEvent
from atoll.engines.agent.agent_options import AgentOptions
from atoll.engines.agent.local_worker import LocalWorker
from atoll.engines.worker_command import WorkerPlace
from atoll.errors import AccessError, AtollError, ClusterError, Code, ConnectError, Status
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.retries import Reasons, Retry
from atoll.security.access import identity_for, token_for
from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.resumption.link_messages import AlternateAddresses, AnyLinkMessage
from atoll.wire.resumption.peer_addresses import PeerAddresses
from atoll.wire.sockets import NEXT_SECONDS, free_address
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 30.0  # after refusals, which last until someone changes the configuration
_CONNECT_SECONDS = 10.0
EVERYWHERE = ("0.0.0.0", "::")
_LEASE_LOOKS = 0.25  # seconds between two checks of the lease
_END_SECONDS = 2.0  # for a worker to end before it is killed
_ENGINE = 0  # the only peer of the leases
_FINAL = (Code.UNAUTHENTICATED, Code.FAILED_PRECONDITION)  # refusals that are not retried


class HostAgent:
    """A host agent. All methods are called on the event loop.

    `on_joined()` is called each time the agent has joined the cluster, and `on_event(text)` for all other events that a
    user who watches the agent wants to know.
    """

    def __init__(
        self,
        options: AgentOptions,
        cache_directory: str,
        on_joined: Callable[[], None],
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._options = options
        self._cache_directory = cache_directory
        self._on_joined = on_joined
        self._on_event = on_event
        self._host = ""  # the host that its worker serves, for messages
        self._host_devices = ""
        self._serves = (-1, -1)  # island and rank of that host
        self._loop = asyncio.get_running_loop()
        self._id = os.urandom(16).hex()
        self._link: Connection | None = None
        self._identity: Identity | None = None
        self._addresses = PeerAddresses(options.controller)
        self._has_engine_message = False  # whether the engine has sent a message on this connection
        self._lost = asyncio.Event()  # set when the connection is lost
        self._over = asyncio.Event()  # set when the agent ends
        self._problem: AtollError | None = None
        self._leases = Leases(period=_LEASE_LOOKS)
        self._graces = Leases(period=_LEASE_LOOKS)
        self._aways = Leases(options.away_seconds, period=_LEASE_LOOKS)
        self._worker = LocalWorker(options.devices, self._worker_ready, self._worker_ended)
        self._controller = self._dialed = options.controller
        self._address = ""  # of this machine, for others
        self._bind = ""  # address at which the worker listens
        self._collectives = ""  # address at which the hosts of its island reach this one
        self._leaving = False
        self._retry = Retry(_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        self._is_refused = False  # in the latest attempt
        self._problems = Reasons(_log)

    # ---- life cycle

    async def run(self, stop: asyncio.Event) -> None:
        """Run until the cluster ends, or until `stop` is set and the agent has left. No worker is left then.

        Raise AtollError if the cluster refuses the agent.
        """
        if self._options.parent:
            watch_in_loop(self._options.parent, self._parent_ended)
        for base in sockets_bases():
            sweep(base, HOST_DIRECTORIES)
        leaving = self._loop.create_task(self._leave(stop))
        looking = self._loop.create_task(self._look_at_lease())
        try:
            while not self._over.is_set():
                await self._connect()
        finally:
            leaving.cancel()
            looking.cancel()
            await self._worker.end(_END_SECONDS)
            if self._link is not None:
                self._link.close()
        if self._problem is not None:
            raise self._problem

    def _parent_ended(self) -> None:
        text = f"the process {self._options.parent} that started its agent has ended"
        self._on_event(f"{text}: this host agent ends")
        if self._worker.runs:
            self._tell(m.AgentLeaves(0.0, text))
        self._end()

    async def _connect(self) -> None:
        """Try each address of the controller until one leads to the engine. Return when that connection is lost."""
        addresses = self._addresses.in_turn
        seconds = NEXT_SECONDS if len(addresses) > 1 else _CONNECT_SECONDS
        for address in addresses:
            await self._connect_to(address, seconds)
            if self._over.is_set():
                return
            if not self._is_refused:
                self._retry.reset()  # the controller may start at any time
            await self._sleep(self._retry.next_pause())
            if self._has_engine_message:
                self._addresses.answered(address)
                return

    async def _connect_to(self, controller: Address, seconds: float) -> None:
        self._lost.clear()
        self._has_engine_message = self._is_refused = False
        try:
            if self._identity is None:
                name = f"the host agent of {self._options.machine}"
                joined = self._addresses.of_one(controller)
                self._identity = await asyncio.to_thread(identity_for, joined, Role.HOST, name)
            link = await connect(
                controller,
                m.OfController,
                self._handle,
                self._link_lost,
                name="the Atoll controller",
                on_link=self._handle_link,
                timeout=seconds,
                identity=self._identity,
            )
        except AccessError as error:
            had_identity, self._identity = self._identity is not None, None
            if not (had_identity or self._options.stays):  # otherwise retry: the join token may change
                self._end(error)
            else:
                self._note_problem(str(error))
                self._is_refused = True
            return
        except ConnectError as error:
            self._note_problem(str(error))
            return
        self._link = link
        self._find_addresses(link, controller)
        token = token_for(controller, Role.HOST)
        link.send(m.Hello(m.PROTOCOL, "agent", token, os.getpid(), __version__, self._options.machine))
        self._introduce()
        silence = self._loop.call_later(self._leases.seconds, self._end_if_silent)
        await self._lost.wait()
        silence.cancel()
        self._is_refused |= link.is_broken
        link.close()
        self._link = None

    def _handle_link(self, message: AnyLinkMessage) -> None:
        if isinstance(message, AlternateAddresses):
            self._addresses.replace_alternates(message, self._identity)

    def _end_if_silent(self) -> None:
        """Disconnect from a controller, or a former one, that accepts connections but has no engine."""
        if not self._has_engine_message:
            self._note_problem("the cluster is silent")
            self._lost.set()

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return

    def _note_problem(self, text: str) -> None:
        self._problems.log(f"{text}; trying again")

    def _find_addresses(self, link: Connection, dialed: Address) -> None:
        options = self._options
        self._dialed = dialed
        here = link.local_host
        # If there are several addresses, or a name with several, use the one that has answered.
        if link.peer_host:
            self._controller = replace(options.controller, host=link.peer_host, port=link.peer_port, others=())
        self._address = options.advertise or here
        self._bind = options.listen or (here if not options.advertise else EVERYWHERE[":" in here])
        self._collectives = options.coordinator_address or self._address

    def _introduce(self) -> None:
        self._tell(
            m.AgentHello(
                self._id,
                self._options.machine,
                self._address,
                __version__,
                self._options.rank_slot,
                self._options.group,
                {platform: len(names) for platform, names in self._options.devices.items()},
                machine_memory(),
                self._coordinator_address(),
                self._worker.incarnation,
                self._worker.last_end,
                self._serves,
            )
        )

    def _coordinator_address(self) -> str:
        """Return a free address for the coordination service of an island whose first host this is."""
        try:
            return free_address(self._collectives)
        except OSError as error:
            text = f"nothing can listen at {self._collectives} on this machine: {error.strerror or error}"
            self._end(ClusterError(f"{text}; choose an address of this machine with --coordinator-address"))
            return ""

    def _tell(self, message: m.AgentHello | m.AgentWorkerEnded | m.AgentAlive | m.AgentLeaves) -> None:
        if self._link is not None:
            self._link.send(m.AgentSays(m.agent_content(message)))

    def _link_lost(self, reason: str) -> None:
        self._note_problem(reason)
        self._lost.set()

    def _end(self, problem: AtollError | None = None) -> None:
        self._problem = problem
        self._over.set()
        self._lost.set()

    # ---- messages

    def _handle(self, message: Any) -> None:
        match message:
            case m.Refused(status=status):
                self._refused(status)
            case m.TellAgent(content=content):
                self._do(m.read_to_agent(content))

    def _refused(self, status: Status) -> None:
        if status.code in _FINAL:
            self._end(ClusterError(f"the cluster refuses this host: {status.message}"))
        else:
            self._note_problem(status.message)
            self._is_refused = not status.details.retriable
            self._lost.set()

    def _do(self, message: Any) -> None:
        match message:
            case m.StartWorker():
                self._start(message)
            case m.EndWorker(incarnation=self._worker.incarnation, force=True):
                self._worker.kill()
            case m.EndWorker(incarnation=self._worker.incarnation):
                self._worker.terminate()
            case m.Renew(lease=lease, grace=grace):
                self._joined()
                self._leases.seconds, self._graces.seconds = lease, max(lease, grace)
                self._leases.renew(_ENGINE, self._loop.time())
                self._graces.renew(_ENGINE, self._loop.time())
                self._aways.seconds = max(self._options.away_seconds, self._graces.seconds)
                self._aways.renew(_ENGINE, self._loop.time())
                self._tell(m.AgentAlive())
            case m.Dismiss():
                self._dismissed(message)

    def _joined(self) -> None:
        if not self._has_engine_message:
            self._has_engine_message = True
            self._worker.controller_is_at(self._dialed, self._controller)
        if self._problems or not self._leases.has(_ENGINE):
            self._problems.solved()
            self._on_joined()

    def _dismissed(self, message: m.Dismiss) -> None:
        if message.error:
            self._end(ClusterError(f"the cluster refuses this host: {message.text}"))
        elif message.reconnect or (self._options.stays and not self._leaving):
            self._note_problem(message.text or "this machine was thought lost")
            self._leases.forget(_ENGINE)  # do not report its silence from now on
            self._graces.forget(_ENGINE)
            self._worker.kill()
            self._lost.set()
        else:
            self._on_event(f"{message.text}: this host agent ends")
            self._end()

    # ---- worker

    def _start(self, start: m.StartWorker) -> None:
        if self._worker.runs:  # an outdated worker, or there would be no new one
            _log.error("the worker of the earlier incarnation %d still runs: killing it", self._worker.incarnation)
            self._worker.kill()
            self._tell(m.AgentWorkerEnded(start.incarnation, 1, self._coordinator_address()))
            return
        bulk = Address(host=self._bind, tls=self._options.controller.tls and start.bulk_tls)
        # A standby may have taken over by the time the worker dials.
        elsewhere = tuple(each for each in self._addresses.in_turn if each != self._dialed)
        place = WorkerPlace(
            str(replace(self._controller, others=elsewhere)),
            str(bulk),
            self._cache_directory,
            self._address,
            start.coordinator_address,
            self._collectives,
            sandbox=self._options.sandbox,
        )
        self._host, self._serves = f"host {start.host} of island {start.island}", (start.island, start.rank)
        self._host_devices = counted(start.devices, f"{start.platform} device")
        self._on_event(f"this machine is {self._host} (rank {start.rank} of {start.hosts}): its worker starts")
        self._worker.start(start, place, (self._dialed, self._controller, *elsewhere))

    def _worker_ready(self) -> None:
        self._on_event(f"the worker of {self._host} is ready, with {self._host_devices}")

    def _worker_ended(self, reason: str) -> None:
        self._on_event(f"the worker of {self._host} has ended: {reason}")
        self._tell(m.AgentWorkerEnded(*self._worker.last_end, self._coordinator_address(), reason))

    async def _look_at_lease(self) -> None:
        while True:
            await asyncio.sleep(_LEASE_LOOKS)
            now = self._loop.time()
            if self._leases.expired(now):
                self._leases.forget(_ENGINE)
                self._note_problem("the cluster is silent")
                self._lost.set()
            if self._graces.expired(now):
                self._graces.forget(_ENGINE)
                if self._worker.runs:
                    _log.error("the cluster is silent: ending the worker of this host")
                self._worker.kill()
            if self._aways.expired(now) and not self._options.stays:
                self._end(self._cluster_ended())
                return

    def _cluster_ended(self) -> ClusterError:
        addresses = " and ".join(map(str, self._addresses.in_turn))
        text = f"no controller of the cluster has served this host at {addresses} for {self._aways.seconds:.0f} s, so "
        return ClusterError(
            f"{text}the cluster has probably ended: run the command again if it continues, and with --stay if this "
            "machine is to wait for the next cluster"
        )

    # ---- leaving

    async def _leave(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, and then end the agent. First give the cluster the grace time to move the worker's data."""
        await stop.wait()
        self._leaving = True
        reason = (stop.reason if isinstance(stop, StopEvent) else "") or "it was asked to end"
        if not self._worker.runs or self._link is None:
            self._on_event(f"{reason}: this host agent ends")
            self._end()
            return
        grace = self._options.grace_seconds
        self._on_event(f"{reason}: leaving; the cluster has {grace:.0f} s to move what is on {self._host}")
        self._tell(m.AgentLeaves(grace, reason))
        await self._sleep(self._options.grace_seconds)
        if not self._over.is_set():
            self._on_event(f"{grace:.0f} s are over: this host agent ends")
        self._worker.kill()
        self._end()


async def run_agents(
    agents: Sequence[AgentOptions],
    cache_directory: str,
    on_joined: Callable[[AgentOptions], None],
    stop: asyncio.Event,
    on_event: Callable[[AgentOptions, str], None] = lambda agent, text: None,
) -> None:
    """Run the host agents of a machine until they end. Raise AtollError if the cluster refuses one of them."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in agents:
                agent = HostAgent(each, cache_directory, partial(on_joined, each), partial(on_event, each))
                group.create_task(agent.run(stop))
    except* (AtollError, msgspec.MsgspecError) as errors:
        raise _first(errors) from None


def _first(errors: BaseExceptionGroup[BaseException]) -> AtollError:
    error = errors.exceptions[0]
    if isinstance(error, AtollError):
        return error
    return ClusterError(f"the engine sent a message that this host agent does not understand: {error}")
