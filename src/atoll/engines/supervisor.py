"""The supervisor of a cluster's engine process, which runs its controller and its islands.

If a worker ends, `IslandProcesses` restarts its island without a decision of the controller, and the supervisor reports
the end. The controller decides to add or end islands, and to restart an island whose workers still run, for example
after a hang. The supervisor does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from atoll._version import __version__
from atoll.cluster.environment_variables import TOKEN
from atoll.cluster.moved_controllers import record_controller
from atoll.cluster.state_machine import StateMachine
from atoll.cluster.topology import IslandShape, Topology
from atoll.controller_process.controller_options import ControllerOptions
from atoll.devices.device_kinds import check_platform, kind_of
from atoll.engines.controller_child import ControllerChild
from atoll.engines.end_notice import serve_end_notice
from atoll.engines.engine_identity import EngineIdentity
from atoll.engines.engine_interface import Engine, HostEnd, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.island_processes import IslandProcesses
from atoll.engines.worker_command import check_kind
from atoll.errors import AccessError, AtollError, ClusterError, ConnectError, SettingsError
from atoll.protocol.messages import (
    PROTOCOL,
    AgentLost,
    AgentSays,
    ClusterEnds,
    Dismiss,
    EndIsland,
    Hello,
    IslandEnded,
    IslandNotRestarted,
    IslandStarts,
    KnownIsland,
    OperationReply,
    Refused,
    RestartExcused,
    RestartIsland,
    StartIsland,
    TellAgent,
    ToEngine,
    WorkerEnded,
    agent_content,
)
from atoll.retries import Retry
from atoll.security.access import token_for
from atoll.security.roles import Role
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.resumption.dialed_connection import DialedConnection, dial

_log = logging.getLogger(__name__)

_END_SECONDS = 1.0
_ASKED = "an operator ended it (`atoll down`)"
DIAL_RETRY_SECONDS = 0.02
_LISTEN_SECONDS = 20.0  # less than `start_engine.START_GRACE_SECONDS`


class SupervisorState(enum.Enum):
    STARTING = enum.auto()
    UP = enum.auto()  # all hosts have joined, or `stop` was set before
    ENDING = enum.auto()  # an operator has asked the controller to end
    REFUSED = enum.auto()  # the controller has another engine, whose workers it uses
    REPLACED = enum.auto()  # the cluster is left to another controller and its engine


_S = SupervisorState

# The states that may follow each state. The comments name the methods or messages that cause the transitions.
TRANSITIONS: Mapping[SupervisorState, frozenset[SupervisorState]] = {
    # `start`, `take_over`; `ClusterEnds`; `start`, if `Refused` has arrived; `controller_replaced`
    _S.STARTING: frozenset({_S.UP, _S.ENDING, _S.REFUSED, _S.REPLACED}),
    # `ClusterEnds`; `Refused`; `controller_replaced`
    _S.UP: frozenset({_S.ENDING, _S.REFUSED, _S.REPLACED}),
    # `controller_replaced`, since another controller may take over before `stop` is set
    _S.ENDING: frozenset({_S.REPLACED}),
    _S.REFUSED: frozenset({_S.REPLACED}),
    _S.REPLACED: frozenset(),
}


class Supervisor(StateMachine[SupervisorState]):
    """Runs a cluster with an engine.

    Call `start`, wait until `stop` is set, then call `end`. The supervisor sets `stop` itself when the controller or
    the connection to it ends. The constructor raises ClusterError for invalid settings.

    If a `controller` is given, which runs already, call `take_over` in place of `start`.
    """

    transitions = TRANSITIONS

    def __init__(
        self, options: EngineOptions, engine: Engine, stop: asyncio.Event, controller: ControllerChild | None = None
    ) -> None:
        self._options = options
        self._engine = engine
        self._stop = stop
        # Higher than that of an earlier cluster at this address, since agents may still have workers of that cluster.
        self._first_incarnation = int(time.time()) if engine.agents is not None else 0
        self._topology = options.settings.topology
        self._address = parse_address(options.controller_address)
        self._last_address = self._address  # of the controller
        self._islands = [self._island(number) for number in range(self._topology.islands)]
        self._controller = controller or ControllerChild(
            self._controller_options(), self._ready, self.controller_ended, self.controller_replaced
        )
        self._identity = EngineIdentity(options.directory, "the engine")
        self._link: DialedConnection | None = None
        self._refusal = ""  # why a controller has refused this engine
        self.state = SupervisorState.STARTING
        self._reason = ""
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()  # keeps tasks alive: the event loop has only weak references

    @property
    def reason(self) -> str:
        """The reason for which this supervisor has set `stop`, or ""."""
        return self._reason

    @property
    def was_asked(self) -> bool:
        """Whether it has set `stop` because an operator has ended the cluster."""
        return self._controller.was_asked or self.state is SupervisorState.ENDING

    @property
    def leaves(self) -> bool:
        """Whether it has set `stop` to leave the cluster to another controller and its engine."""
        return self.state is SupervisorState.REPLACED

    # ---- start and end

    async def start(self) -> None:
        """Return when the cluster is up or `stop` is set. Raise ClusterError or AccessError if it does not start."""
        check_may_listen(self._address, TOKEN.text())
        linking = asyncio.get_running_loop().create_task(self._connect())
        try:
            self._controller.start()
            for island in self._islands if self._engine.agents is None else ():
                island.start()
            await self._until_up(linking)
            if not self._stop.is_set():
                await linking
        except OSError as error:
            raise ClusterError(f"the cluster did not start: {error}") from None
        finally:
            linking.cancel()
        if self.state is SupervisorState.STARTING:
            self.enter(SupervisorState.REFUSED if self._refusal else SupervisorState.UP)

    def take_over(self, link: DialedConnection, islands: Sequence[KnownIsland]) -> None:
        """Take the role of an engine that is lost, with the connection of a spare engine. Adopt what still runs."""
        agents = self._engine.agents
        assert agents is not None
        self._link = link
        agents.begin(link.send)
        self._topology = Topology(tuple(each.shape for each in islands))
        self._islands = [self._island(each.island, restarts=not each.is_over) for each in islands]
        for island, known in zip(self._islands, islands, strict=True):
            if known.runs:
                island.adopt(known.incarnation, known.machines, agents.adopt)
            elif not known.is_over or known.returns:
                island.start()
        self.enter(SupervisorState.UP)
        self._up.set_result(None)

    async def _connect(self) -> None:
        await self._dial(self._address, math.inf)
        if self._engine.agents is not None:
            for island in self._islands:
                island.start()

    async def _dial(self, address: Address, seconds: float) -> None:
        """Connect to the controller at `address` as its engine. Retry for `seconds`, since it may be starting.

        Raise AccessError, or ConnectError after that time.
        """
        options = self._options
        retry = Retry(DIAL_RETRY_SECONDS, patience=seconds)
        self._link = link = await dial_as(
            "engine", options, address, self._identity, retry, self.handle, self.link_lost, self.cut_off
        )
        if self._engine.agents is not None:
            self._engine.agents.begin(link.send)

    def cut_off(self, is_cut_off: bool) -> None:
        """Handle the loss of the controller's connection, or its return, which may be to another controller."""
        if self._link is not None and not is_cut_off:
            self._controller_is_at(self._link.address)
        if self._engine.agents is not None:
            self._engine.agents.cut_off(is_cut_off)

    def link_lost(self, reason: str) -> None:
        """Handle the end of the connection to the controller, which cannot be resumed."""
        if self.state is SupervisorState.STARTING:  # `controller_ended` handles the end of the controller
            return
        where = self._link.refused_at if self._link is not None else None
        if self.state is SupervisorState.REFUSED:
            self._reason = f"the controller at {self._link and self._link.address} refuses it: {self._refusal}"
            self._stop.set()
            return
        if self._engine.agents is None or where in (None, self._address) or self._stop.is_set():
            for island in self._islands:
                island.expect_end()
            # Usually the controller has ended, and its exit status has the reason.
            self._reason = self._reason or f"the engine lost the controller: {reason}"
            asyncio.get_running_loop().call_later(_END_SECONDS, self._stop.set)
            return
        _log.warning("%s: this engine registers there", reason)
        self._do(self._register_at(where))

    async def _register_at(self, where: Address) -> None:
        """Register as a new engine at a standby that has taken over without the latest state of the controller.

        The standby does not know what this engine did since it was cut off, and messages to it may be lost. So this
        engine reports what runs, and agents introduce themselves again.
        """
        try:
            await self._dial(where, self._options.settings.grace_seconds)
        except (AccessError, ConnectError) as error:
            _log.error("%s", error)
            self._reason = str(error)
            self._stop.set()
            return
        _log.warning("this engine has registered at %s", where)
        self._controller_is_at(where)
        for island in self._islands:
            island.report()

    def _controller_is_at(self, address: Address) -> None:
        """Use the controller at `address` from now on. Commands on this machine find the address in a file."""
        if address == self._last_address:
            return
        self._last_address = address
        _log.warning("the controller of this cluster is at %s now", address)
        self._engine.controller_at(address)
        record_controller(self._options.directory, str(address))

    async def end(self) -> None:
        """End all processes, the controller first, so that no worker looks lost."""
        if self._link is not None:
            self._link.close()
        self._identity.close()
        for island in self._islands:
            island.expect_end()
        await self._controller.end()
        if self._engine.agents is None:  # otherwise the agents end their workers
            await asyncio.gather(*(island.end(_END_SECONDS) for island in self._islands))
        if self.state is not SupervisorState.REFUSED:  # otherwise the workers are those of the other engine
            await self._engine.close()
        has_failed = self.state is SupervisorState.UP and bool(self._reason) and not self.was_asked
        if has_failed and self._options.settings.grace_seconds:
            with contextlib.suppress(OSError, AtollError):  # the address is not free, and peers get no answer
                # The next cluster with the journal continues sessions on disk, whose proxies wait for it.
                spares = self._options.settings.suspended_seconds if self._options.journal else 0.0
                await serve_end_notice(self._address, self._options.directory, self._reason, spares)

    def _controller_options(self) -> ControllerOptions:
        return ControllerOptions(
            str(self._address),
            self._options.settings,
            os.getpid(),
            directory=self._options.directory,
            usage_file=self._options.usage_file,
            cache_directory=self._options.cache_directory,
            journal=self._options.journal,
            lease=self._options.lease,
            continues=self._options.continues,
        )

    async def _until_up(self, linking: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._options.settings.start_seconds
        stopped = loop.create_task(self._stop.wait())
        either: set[asyncio.Future[Any]] = {self._up, stopped}
        try:
            if self._engine.agents is not None:  # hosts have all of `seconds`, from when the controller listens
                await asyncio.wait({*either, linking}, timeout=_LISTEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._up.done():
            self._up.result()
            return
        self._up.cancel()
        if not self._stop.is_set():
            raise ClusterError(f"the cluster was not up within {seconds:.0f} s: {self._missing()}")

    def _missing(self) -> str:
        if self._link is None:
            return f"its controller does not listen at {self._address}"
        hosts = self._engine.agents.missing() if self._engine.agents is not None else ""
        return hosts or "not all of its workers have devices yet (`ATOLL_WAIT` or `--wait` sets how long to wait)"

    def _ready(self) -> None:
        """Note that all hosts have joined. From now on, an island restarts if one of its workers ends."""
        if self._up.done():
            return
        self._up.set_result(None)
        if not self._stop.is_set():
            for island in self._islands:
                island.allow_restarts()

    def _fail(self, text: str) -> None:
        """Fail the start of the cluster. Do nothing when it is up."""
        if not self._up.done():
            self._up.set_exception(self._controller.start_error("the cluster", text))

    def controller_ended(self, text: str) -> None:
        """Set `stop`, with this reason, since the controller has ended and is not restarted."""
        self._fail(text)
        if not self._stop.is_set():
            self._reason = _ASKED if self._controller.was_asked else text
        self._stop.set()

    def controller_replaced(self, text: str) -> None:
        """Serve the controller that has taken over from that of this process, which has ended.

        If this engine leaves clusters to others, set `stop`. Its machine can then follow the other controller.
        """
        if self._options.leaves and not self._stop.is_set():
            self._fail(text)
            self.enter(SupervisorState.REPLACED)
            self._reason = text
            self._stop.set()

    # ---- islands

    def _island(self, number: int, *, restarts: bool = False) -> IslandProcesses:
        return IslandProcesses(
            number,
            partial(self._starts, number),
            self._engine,
            self,
            # Machines may leave before the cluster is up.
            restarts=restarts or self._engine.agents is not None,
            incarnation=self._first_incarnation,
        )

    def _starts(self, island: int, incarnation: int) -> list[HostStart]:
        shape, first = self._topology.shapes[island], self._topology.first_host(island)
        processes = 1 if kind_of(shape.platform).process_per_island else shape.hosts
        own = shape.hosts, shape.devices, incarnation, shape.platform, self._topology.islands > 1
        return [HostStart(island, first + rank, rank, *own) for rank in range(processes)]

    def island_starts(self, island: int, incarnation: int, machines: Sequence[str]) -> None:
        if self._link is not None:
            self._link.send(IslandStarts(island, incarnation, tuple(machines)))

    def worker_ended(self, host: int, incarnation: int, end: HostEnd) -> None:
        if self._engine.agents is None and not end.hung:
            self._fail(f"the worker of host {host} ended: {end.text}")
        if self._link is not None:
            self._link.send(WorkerEnded(host, incarnation, end.status, end.text))

    def island_removed(self, island: int, reason: str) -> None:
        self._fail(f"island {island} is not restarted: {reason}")
        if self._link is not None:
            self._link.send(IslandNotRestarted(island, reason))

    # ---- messages of the controller

    def handle(self, message: Any) -> None:
        """Handle a message of the controller."""
        match message:
            case Refused(status=status):  # the connection ends next
                _log.error("the controller refuses this engine: %s", status.message)
                self._refusal = status.message
                if self.state is SupervisorState.UP:
                    self.enter(SupervisorState.REFUSED)
            case RestartIsland(island=island, reason=reason, avoid=avoid):
                _log.warning("restarting island %d: %s", island, reason)
                if avoid >= 0 and self._engine.agents is not None:
                    self._engine.agents.avoid(avoid)
                self._islands[island].restart()
            case RestartExcused(island=island):
                self._islands[island].excuse()
            case StartIsland(island=island, shape=shape):
                self._start_island(island, shape)
            case EndIsland(island=island):
                self._do(self._end_island(self._islands[island]))
            case ClusterEnds():
                self._reason = self._reason or _ASKED
                if self.state in (SupervisorState.STARTING, SupervisorState.UP):
                    self.enter(SupervisorState.ENDING)
            case AgentSays() | AgentLost() | OperationReply():
                self._handle_of_agent(message)

    def _handle_of_agent(self, message: AgentSays | AgentLost | OperationReply) -> None:
        agents = self._engine.agents
        match message:
            case AgentSays(agent=agent, content=content) if agents is not None:
                agents.agent_said(agent, content)
            case AgentSays(agent=agent) if self._link is not None:
                engine = self._options.settings.engine
                text = f"this cluster's engine is {engine!r}, which takes no hosts: start it with `--engine hosts`"
                self._link.send(TellAgent(agent, agent_content(Dismiss(text, error=True)), close=True))
            case AgentLost(agent=agent, reason=reason) if agents is not None:
                agents.agent_lost(agent, reason)
            case OperationReply(status=status, text=text) if agents is not None:
                agents.drained(status, text)

    def _start_island(self, number: int, shape: IslandShape | None) -> None:
        """Start an additional island, or one that was ended if `shape` is None."""
        if shape is None:
            self._do(self._return_island(self._islands[number]))
        elif number == len(self._islands):
            self._topology = self._topology.with_island(shape)
            self._islands.append(self._island(number, restarts=True))
            try:
                check_platform(shape.platform)
                check_kind(shape.platform)
            except SettingsError as error:
                self.island_removed(number, str(error))
            else:
                self._start_added(self._islands[number])

    def _start_added(self, island: IslandProcesses) -> None:
        try:
            island.start()
        except OSError as error:
            self.island_removed(island.number, f"its workers cannot be started: {error}")

    async def _return_island(self, island: IslandProcesses) -> None:
        await island.end(_END_SECONDS)  # in case a process still runs
        island.allow_restarts()
        self._start_added(island)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_island(self, island: IslandProcesses) -> None:
        await island.end(_END_SECONDS)
        if self._link is not None:
            self._link.send(IslandEnded(island.number))


async def dial_as(
    role: str,
    options: EngineOptions,
    address: Address,
    identity: EngineIdentity,
    retry: Retry,
    on_message: Callable[[Any], None],
    on_lost: Callable[[str], None],
    on_cut_off: Callable[[bool], None],
) -> DialedConnection:
    """Connect to the controller at `address` with this role, "engine" or "spare engine".

    The connection uses `identity`, also to reconnect, if the cluster's own controller uses TLS. Raise AccessError, or
    ConnectError if `retry` ends.
    """
    own = parse_address(options.controller_address)
    reach = partial(
        dial,
        address,
        ToEngine,
        on_message,
        on_lost,
        name="the controller",
        patience=retry.seconds_left,
        identity=identity.get() if own.tls else None,
        on_away=partial(on_cut_off, True),
        on_back=partial(on_cut_off, False),
        on_silence=on_cut_off,  # messages of agents pass through the controller
    )
    link = await retry.call_async(reach, ConnectError, unless=AccessError)
    engine = options.settings.engine
    token = token_for(own, Role.ENGINE)
    link.send(Hello(PROTOCOL, role, token, os.getpid(), __version__, engine, resumes=True, redials=True))
    return link
