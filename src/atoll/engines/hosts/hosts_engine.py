"""The engine `hosts`: machines join the cluster with host agents that are started there.

An island starts when there is a machine for each of its hosts. Surplus machines are spares, which replace machines that
are lost. The messages of agents pass through the controller, so agents need to reach only its address.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count

from atoll._version import __version__
from atoll.cluster.processes.child import describe_exit
from atoll.cluster.processes.leases import PING_SECONDS, Leases
from atoll.cluster.settings import OnOff
from atoll.cluster.topology import RankSlot
from atoll.engines.engine_interface import AgentHandler, HostEnd, HostProcess, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts.host_agents import AdoptedWorker, Agent
from atoll.engines.hosts.rank_assignment import Candidate, assign_ranks, pending_reason
from atoll.engines.worker_command import check_kinds
from atoll.errors import Status
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.wire.address import Address, check_reached_by_hosts, parse_address
from atoll.wire.framing import NO_MESSAGE

_log = logging.getLogger(__name__)

AWAY_SECONDS = 2.0  # for an agent to reconnect; usually its process has ended
_PINGS = 8  # per lease, at least
DRAIN_RETRY_SECONDS = 3.0


class HostsEngine:
    """The engine for machines that run host agents: an `Engine` and an `AgentHandler`."""

    def __init__(self, options: EngineOptions) -> None:
        self._settings = options.settings
        check_kinds(self._settings)
        check_reached_by_hosts(parse_address(options.controller_address))
        self._agents: dict[str, Agent] = {}
        self._connections: dict[int, Agent] = {}
        self._numbers = count(1)
        seconds = self._settings.lease_seconds
        self._leases = Leases(seconds, min(PING_SECONDS, seconds / _PINGS))
        self._waiting: dict[int, tuple[Sequence[HostStart], Callable[[Sequence[str]], None]]] = {}  # by island
        self._placed: dict[int, list[Agent]] = {}  # by island, by rank
        self._starts: dict[int, Sequence[HostStart]] = {}  # by island, if it was placed
        self._avoided: dict[int, Agent] = {}  # by island: the agent that its next placement prefers least
        self._adopted: dict[tuple[int, int], AdoptedWorker] = {}  # by island and rank, until the agent connects
        self._drains = MachineDrains()
        self._is_cut_off = False  # from the controller, and so from all agents
        self._left: set[int] = set()  # islands drained because a machine leaves: other islands are placed first
        self._send: Callable[[m.Message], None] = lambda message: None
        self._has_begun = False
        self._reported: m.EngineReport | None = None

    @property
    def agents(self) -> AgentHandler:
        return self

    # ---- islands

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        self._waiting[island] = starts, then
        self._form()

    def cancel(self, island: int) -> None:
        self._waiting.pop(island, None)
        self._report()

    def release(self, island: int) -> None:
        """Do nothing: an agent without a worker is free."""

    def controller_at(self, address: Address) -> None:
        """Do nothing: agents know the addresses of the standbys."""

    async def close(self) -> None:
        """Do nothing: the controller notifies all agents of the end of the cluster."""

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        agents = self._placed[start.island]
        agent = agents[start.rank]
        coordinator_address = agents[0].coordinator_address if len(agents) > 1 else ""
        message = m.StartWorker(
            start.incarnation,
            start.island,
            start.host,
            start.rank,
            start.hosts,
            start.devices,
            start.platform,
            coordinator_address,
            self._settings.bulk_tls is OnOff.ON,
            self._settings.lease_seconds,
            start.among_islands,
        )
        return agent.start(message, on_end)

    def adopt(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        adopted = self._adopted[start.island, start.rank] = AdoptedWorker(start, on_end)
        self._starts[start.island] = (*self._starts.get(start.island, ()), start)
        self._placed.setdefault(start.island, [])
        asyncio.get_running_loop().call_later(self._leases.seconds, self._expect_adopted, adopted)
        return adopted

    def _expect_adopted(self, adopted: AdoptedWorker) -> None:
        place = adopted.start.island, adopted.start.rank
        if self._adopted.get(place) is not adopted:
            return
        if self._is_cut_off:
            asyncio.get_running_loop().call_later(self._leases.seconds, self._expect_adopted, adopted)
            return
        del self._adopted[place]
        adopted.ended(HostEnd(None, "its host agent did not connect after the loss of the engine"))

    def _adopt_worker_of(self, agent: Agent, hello: m.AgentHello) -> AdoptedWorker | None:
        """Adopt the worker of an agent that has connected for the first time, if a lost engine started it.

        Return the worker if it has ended. The caller reports the end.
        """
        adopted = self._adopted.get(hello.serves)
        if adopted is None or adopted.start.incarnation not in (hello.running, hello.ended[0]):
            return None
        del self._adopted[hello.serves]
        if not hello.running:
            return adopted
        self._placed[adopted.start.island].append(agent)
        adopted.held_by(agent)
        return None

    def _form(self) -> None:
        """Start the islands that have a machine for each host."""
        for island in sorted(self._waiting, key=lambda each: (each in self._left, each)):
            starts, then = self._waiting[island]
            chosen = [each for each in self._chosen(starts) if each is not None]
            if len(chosen) == len(starts):
                del self._waiting[island]
                self._left.discard(island)
                avoided = self._avoided.pop(island, None)
                if avoided is not None and avoided.hello.agent not in {each.agent for each in chosen}:
                    avoided.served = None  # so it is not the first choice at the next placement
                self._starts[island] = starts
                agents = self._placed[island] = [self._agents[each.agent] for each in chosen]
                then([each.hello.machine for each in agents for _ in range(starts[0].hosts // len(starts))])
        self._report()

    def _chosen(self, starts: Sequence[HostStart]) -> list[Candidate | None]:
        island = starts[0].island
        free = self._free(starts[0])
        avoided = self._avoided.get(island)
        if avoided is not None:
            last = [replace(each, served=None) for each in free if each.agent == avoided.hello.agent]
            free = [each for each in free if each.agent != avoided.hello.agent] + last
        return assign_ranks(island, [each.host for each in starts], free)

    def avoid(self, host: int) -> None:
        for island, agents in self._placed.items():
            for agent in agents:
                if agent.host == host and agent.worker is not None:
                    self._avoided[island] = agent

    def _has_spares(self, island: int) -> bool:
        """Return whether the island could start now on machines that stay."""
        starts = self._starts.get(island)
        if starts is None:
            return False
        own = [each.candidate for each in self._placed[island] if not each.leaves and each.connection is not None]
        chosen = assign_ranks(island, [each.host for each in starts], [*own, *self._free(starts[0])])
        return all(each is not None for each in chosen)

    def _free(self, start: HostStart) -> list[Candidate]:
        """Return the free machines with enough devices for the host, in the order in which they joined."""
        return [each.candidate for each in self._agents.values() if each.is_free and not _problem(each, start)]

    # ---- status

    def missing(self) -> str:
        return "; ".join(f"island {island} {text}" for island, text in self._waits())

    def _waits(self) -> list[tuple[int, str]]:
        waits = []
        for island, (starts, _) in sorted(self._waiting.items()):
            free, chosen = self._free(starts[0]), self._chosen(starts)
            idle = [each for each in self._agents.values() if each.is_free]
            problems = [problem for each in idle if (problem := _problem(each, starts[0]))]
            text = pending_reason(chosen, [each for each in free if each not in chosen])
            away = [each.name for each in self._agents.values() if each.connection is None]
            if away:
                text += f"; {', '.join(away)} cannot be reached now"
            waits.append((island, "; ".join([text, *problems])))
        return waits

    def _report(self) -> None:
        """Send the controller what `atoll status` shows, if it has changed."""
        wanted = self._wanted()
        machines = tuple(self._machine(each, wanted) for each in self._agents.values())
        report = m.EngineReport(tuple(self._waits()), machines)
        if report != self._reported:
            self._reported = report
            self._send(report)

    def _machine(self, agent: Agent, wanted: Mapping[str, int]) -> m.MachineReport:
        """Return the report of an agent: numbered among those of its machine, with the use of a free one."""
        twins = [each for each in self._agents.values() if each.hello.machine == agent.hello.machine]
        name = f"{agent.hello.machine} ({twins.index(agent) + 1} of {len(twins)})" if len(twins) > 1 else ""
        state = ""
        if agent.is_free and not self._has_place(agent.hello.rank_slot):
            state = f"free, but no island has a place for it: it asks for {agent.hello.rank_slot}"
        elif agent.is_free and agent.hello.agent in wanted:
            state = f"waits for the other hosts of island {wanted[agent.hello.agent]}"
        return agent.report(name, state)

    def _wanted(self) -> dict[str, int]:
        """Return the first island that waits for more machines and would use this one, by the agent of a machine."""
        waiting = sorted(self._waiting.items(), reverse=True)
        return {each.agent: island for island, (starts, _) in waiting for each in self._chosen(starts) if each}

    def _has_place(self, rank_slot: RankSlot) -> bool:
        """Return whether a host of an island can be at the rank slot, or of an island that was not placed yet."""
        known = {**self._starts, **{island: starts for island, (starts, _) in self._waiting.items()}}
        if len(known) < self._settings.topology.islands:
            return True
        return any(
            rank_slot.fits(each.island, each.host, starts[0].host) for starts in known.values() for each in starts
        )

    # ---- agents

    def begin(self, send: Callable[[m.Message], None]) -> None:
        self._send = send
        self._reported = None
        self._connections.clear()  # these were of an earlier controller
        for agent in self._agents.values():
            agent.connection = None
        self.cut_off(is_cut_off=False)
        self._report()
        if not self._has_begun:
            self._has_begun = True
            self._tick()

    def agent_said(self, agent: int, content: bytes) -> None:
        known = self._connections.get(agent)
        try:
            message = m.read_from_agent(content)
        except NO_MESSAGE as error:
            _log.error("a host agent sent an invalid message: %s", error)
            self._refuse(agent, "the host agent sent an invalid message")
            return
        if known is None:
            if isinstance(message, m.AgentHello):
                self._came(agent, message)
            return
        self._leases.renew(known.number, asyncio.get_running_loop().time())
        match message:
            case m.AgentWorkerEnded():
                known.coordinator_address = message.coordinator_address
                text = message.reason or describe_exit(message.status)
                end = HostEnd(None, known.departure) if known.leaves else HostEnd(message.status, text)
                known.ended(message.incarnation, end)
                self._form()
                self._dismiss_if_done(known)
            case m.AgentLeaves(seconds=seconds, reason=reason):
                self._leaves(known, seconds, reason or "its agent was asked to end")

    def _came(self, connection: int, hello: m.AgentHello) -> None:
        if hello.version != __version__:
            text = f"this cluster runs atoll {__version__}, but {hello.machine} has {hello.version}: install the same"
            self._refuse(connection, text)
            return
        agent = self._agents.get(hello.agent)
        ended: AdoptedWorker | None = None
        if agent is None:
            agent = self._agents[hello.agent] = Agent(
                next(self._numbers), hello, connection, lambda message: self._send(message)
            )
            ended = self._adopt_worker_of(agent, hello)
        elif agent.connection is not None:
            self._connections.pop(agent.connection, None)
        self._connections[connection] = agent
        self._leases.renew(agent.number, asyncio.get_running_loop().time())
        agent.came(hello, connection)
        agent.tell(self._renewal(agent))  # first, since it tells the agent that it has joined
        if ended is not None:  # last, since the island may start its next worker on this agent at once
            ended.ended(HostEnd(hello.ended[1], describe_exit(hello.ended[1])))
        self._form()

    def agent_lost(self, agent: int, reason: str) -> None:
        known = self._connections.pop(agent, None)
        if known is None or known.connection != agent:
            return
        known.connection = None
        if known.worker is None and not known.foreign:
            self._forget(known, f"{known.name} has left: {reason}")
            return
        _log.warning("the host agent on %s is away: %s", known.name, reason)
        asyncio.get_running_loop().call_later(min(AWAY_SECONDS, self._leases.seconds), self._still_away, known)
        self._report()

    def _still_away(self, agent: Agent) -> None:
        if self._is_cut_off:
            asyncio.get_running_loop().call_later(AWAY_SECONDS, self._still_away, agent)
        elif agent.connection is None:
            self._forget(agent, f"the host agent on {agent.name} has ended or cannot reach the controller")

    def _forget(self, agent: Agent, reason: str) -> None:
        """Treat the machine of an agent as lost. The agent can join again, as a new one."""
        if self._agents.get(agent.hello.agent) is not agent:
            return
        _log.warning("%s", reason)
        del self._agents[agent.hello.agent]
        self._leases.forget(agent.number)
        if agent.connection is not None:
            self._connections.pop(agent.connection, None)
            agent.tell(m.Dismiss("", reconnect=True), last=True)
            agent.connection = None
        if agent.worker is not None:
            agent.ended(agent.worker.incarnation, HostEnd(None, agent.departure if agent.leaves else reason))
        self._form()

    def cut_off(self, is_cut_off: bool) -> None:
        self._is_cut_off = is_cut_off
        for agent in self._agents.values():
            self._leases.renew(agent.number, asyncio.get_running_loop().time())

    def _refuse(self, connection: int, text: str) -> None:
        self._send(m.TellAgent(connection, m.agent_content(m.Dismiss(text, error=True)), close=True))

    def _tick(self) -> None:
        asyncio.get_running_loop().call_later(self._leases.period, self._tick)
        if self._is_cut_off:
            return
        now = asyncio.get_running_loop().time()
        silent = set(self._leases.expired(now))
        for agent in list(self._agents.values()):
            if agent.number in silent:
                seconds = f"{self._leases.seconds:.0f} s"
                self._forget(agent, f"the host agent on {agent.name} sent nothing for {seconds}")
            else:
                agent.tell(self._renewal(agent))
        for island in self._drains.due(now, self._left_by_machines()):
            self._ask_to_drain(island)

    def _renewal(self, agent: Agent) -> m.Renew:
        left = self._leases.left(agent.number, asyncio.get_running_loop().time())
        return m.Renew(round(left, 1), self._settings.grace_seconds)

    # ---- machines that leave

    def _leaves(self, agent: Agent, seconds: float, reason: str) -> None:
        """Ask to drain the island of an agent whose machine leaves. If it cannot be drained, it runs to the end."""
        agent.leaves = reason
        if agent.worker is not None and agent.served is not None:
            island = agent.served[0]
            when = f"in {seconds:.0f} s" if math.isfinite(seconds) else "soon"
            _log.warning("%s leaves %s (%s): it is host %d of island %d", agent.name, when, reason, agent.host, island)
            self._report()  # first, so the controller knows the reason if the worker ends now
            if seconds > 0 and self._drains.ask(island):
                self._ask_to_drain(island)
        self._dismiss_if_done(agent)
        self._report()

    def _ask_to_drain(self, island: int) -> None:
        self._left.add(island)
        self._send(m.DrainRequest(island, returns=True, has_spares=self._has_spares(island)))

    def _left_by_machines(self) -> set[int]:
        """Return the islands with a worker on a machine that leaves."""
        leaving = (each for each in self._agents.values() if each.leaves and each.worker is not None)
        return {each.served[0] for each in leaving if each.served is not None}

    def host_leaves(self, island: int, rank: int, seconds: float) -> None:
        """Treat the machine of the agent with this rank slot as leaving in `seconds`. Repeated calls do nothing."""
        for agent in list(self._agents.values()):
            if agent.hello.rank_slot == RankSlot(island, rank) and not agent.leaves:
                self._leaves(agent, seconds, "its node is drained")

    def drained(self, status: Status, text: str) -> None:
        island, refusal = self._drains.answered(status, asyncio.get_running_loop().time())
        if not status.ok:
            self._left.discard(island)
        if refusal:
            _log.warning("cannot drain island %d now: %s; trying again while there is time", island, refusal)

    def _dismiss_if_done(self, agent: Agent) -> None:
        if agent.leaves and agent.worker is None and not agent.foreign:
            agent.tell(m.Dismiss("its work is done"))


def _problem(agent: Agent, start: HostStart) -> str:
    """Return why the machine of an agent has too few devices for the host, "" if it has enough."""
    platform, needed = start.platform, start.devices
    has = agent.hello.devices.get(platform)
    if has is None or has >= needed:
        return ""
    return f"{agent.hello.machine} has {counted(has, f'{platform} device')} of the {needed} that a host needs"


class MachineDrains:
    """The drains that an engine requests from the controller because machines leave. Pure.

    A drain is refused while no other island can take what is on the island. That can change before the machine leaves,
    so a refused drain is requested again while a machine that leaves holds a worker of the island. The controller
    answers the requests in order.
    """

    def __init__(self) -> None:
        self._asked: deque[int] = deque()  # islands
        self._refused: dict[int, tuple[float, str]] = {}  # by island: the time, from the caller's clock, and the reason

    def ask(self, island: int) -> bool:
        """Record a request. Return False, and do not send it, if a request is not answered yet."""
        if island in self._asked:
            return False
        self._asked.append(island)
        return True

    def answered(self, status: Status, now: float) -> tuple[int, str]:
        """Record an answer. Return its island, and the reason if it was refused for another reason than before."""
        island = self._asked.popleft()
        _, before = self._refused.pop(island, (0.0, ""))
        if status.ok:
            return island, ""
        self._refused[island] = now, status.message
        return island, status.message if status.message != before else ""

    def due(self, now: float, leaving: Collection[int]) -> list[int]:
        """Return the islands among `leaving` whose drains are due again, and record the requests."""
        self._refused = {island: refused for island, refused in self._refused.items() if island in leaving}
        late = [island for island, (at, _) in self._refused.items() if now - at >= DRAIN_RETRY_SECONDS]
        return [island for island in late if self.ask(island)]
