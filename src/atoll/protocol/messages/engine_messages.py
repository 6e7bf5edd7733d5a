"""Messages between the controller, the engine and its host agents.

A host agent runs on each machine of a cluster whose engine is `hosts`. It dials the controller and runs one worker. The
controller forwards the messages between agents and the engine without decoding them:

    agent -> engine   AgentHello first, then FromAgent
    engine -> agent   ToAgent

On the machine of a standby controller, a spare engine waits for the loss of the engine, and then takes its role.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.lifecycle import WORKING, IslandState
from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import IslandShape, RankSlot
from atoll.decodable import decodable
from atoll.protocol.messages.opening_messages import Message, Refused
from atoll.protocol.messages.operator_messages import DrainRequest, OperationReply

# ---- engine -> controller


class WorkerEnded(Message, frozen=True, tag=70):
    """Report that a worker of this incarnation has ended unexpectedly. The engine restarts its island.

    `status` is the exit status (negative: the signal), or None if it is unknown, for example if the machine is lost.
    """

    host: int
    incarnation: int
    status: int | None
    text: str  # the status as a sentence


class IslandNotRestarted(Message, frozen=True, tag=71):
    """Report that the island will not be started again, and why."""

    island: int
    text: str


class IslandEnded(Message, frozen=True, tag=101):
    """Report that the workers of an island have ended as requested."""

    island: int


# ---- controller -> engine


class StartIsland(Message, frozen=True, tag=102):
    """Start the workers of an additional island of this shape. Island numbers are consecutive.

    Without a shape, start an ended island again once machines are available for it.
    """

    island: int
    shape: IslandShape | None = None


class EndIsland(Message, frozen=True, tag=103):
    """End the island's workers, and do not start them again."""

    island: int


class RestartIsland(Message, frozen=True, tag=75):
    """Kill and restart the island's workers. A spare machine, if available, replaces the machine of host `avoid`."""

    island: int
    reason: str
    avoid: int = -1


class RestartExcused(Message, frozen=True, tag=115):
    """Do not count the island's newest restart against its limit, because a tenant's program caused it."""

    island: int


class KnownIsland(msgspec.Struct, frozen=True, array_like=True):
    """The state of an island, for a new engine. `incarnation` is the last one, 0 if it has not started yet."""

    island: int
    shape: IslandShape
    state: IslandState
    incarnation: int
    machines: tuple[str, ...] = ()
    returns: bool = False  # drained, and starts again when there are machines for it

    @property
    def runs(self) -> bool:
        """Return whether all of its workers had joined."""
        return self.state in WORKING

    @property
    def is_over(self) -> bool:
        return self.state in (IslandState.REMOVED, IslandState.DRAINED)


class BecomeEngine(Message, frozen=True, tag=116):
    """Make a spare engine the engine, because the former one is lost. The workers of working islands still run."""

    settings: ClusterSettings
    islands: tuple[KnownIsland, ...]


# ---- forwarded messages of agents, and reports about machines


class AgentSays(Message, frozen=True, tag=110):
    """A message of an agent for the engine. The controller sets `agent` to the agent's connection."""

    content: bytes  # an encoded `FromAgent`
    agent: int = 0


class TellAgent(Message, frozen=True, tag=111):
    """A message of the engine for an agent. If `close`, it is the last one."""

    agent: int
    content: bytes  # an encoded `ToAgent`
    close: bool = False


class AgentLost(Message, frozen=True, tag=112):
    """Report to the engine that an agent's connection has ended."""

    agent: int
    reason: str


class MachineReport(msgspec.Struct, frozen=True, array_like=True):
    """A machine and the state of its agent, for `atoll status`.

    If the machine runs the worker of `host` and is leaving, `leaves` is the reason, such as "SIGTERM".
    """

    name: str
    address: str
    state: str
    group: str
    devices: dict[str, int]
    memory_bytes: int
    host: int = -1
    leaves: str = ""


class EngineReport(Message, frozen=True, tag=113):
    """Report to the controller, after each change, what islands wait for and which machines are available."""

    waits: tuple[tuple[int, str], ...]  # (island, a sentence)
    machines: tuple[MachineReport, ...]


class IslandStarts(Message, frozen=True, tag=114):
    """Report that an island's workers start. The controller refuses workers of earlier incarnations from now on."""

    island: int
    incarnation: int
    machines: tuple[str, ...] = ()  # names by rank, if machines have names


# ---- agent -> engine


class AgentHello(Message, frozen=True, tag=120):
    """Introduce an agent that has connected, for the first time or again.

    `agent` is a random identifier of the agent's process. `running` is the incarnation of its worker, and `serves` the
    (island, rank) of that. `ended` is the (incarnation, exit status) of the last worker that has ended, because that
    report may have been lost.
    """

    agent: str
    machine: str  # host name for users
    address: str  # of the machine, for other machines of the cluster
    version: str
    rank_slot: RankSlot = RankSlot()
    group: str = ""
    devices: dict[str, int] = msgspec.field(default_factory=dict)  # by platform
    memory_bytes: int = 0
    coordinator_address: str = ""  # a free HOST:PORT at which the coordination service of an island can listen
    running: int = 0
    ended: tuple[int, int] = (0, 0)
    serves: tuple[int, int] = (-1, -1)


class AgentWorkerEnded(Message, frozen=True, tag=121):
    """Report that the worker of this incarnation has ended. `coordinator_address` is as in AgentHello.

    `reason` explains the end if the exit status does not, for example if the worker did not respond while it started.
    """

    incarnation: int
    status: int
    coordinator_address: str = ""
    reason: str = ""


class AgentAlive(Message, frozen=True, tag=122):
    """Answer `Renew`."""


class AgentLeaves(Message, frozen=True, tag=123):
    """Announce that the machine leaves: the agent and its worker end in `seconds`."""

    seconds: float
    reason: str = ""


# ---- engine -> agent


class StartWorker(Message, frozen=True, tag=130):
    """Start a worker. The coordination service of its island listens at `coordinator_address`; "" for one host.

    With `bulk_tls`, its data port uses TLS if the controller does. The agent kills the worker if it does not respond
    for `lease` seconds while it starts.
    """

    incarnation: int
    island: int
    host: int
    rank: int
    hosts: int
    devices: int
    platform: str
    coordinator_address: str
    bulk_tls: bool = True
    lease: float = LEASE_SECONDS
    among_islands: bool = False  # whether the cluster has several islands


class EndWorker(Message, frozen=True, tag=131):
    """End the worker of this incarnation. With `force`, kill it at once."""

    incarnation: int
    force: bool = False


class Renew(Message, frozen=True, tag=132):
    """Renew the lease of an agent. If it receives nothing for `lease` seconds, it dials again.

    If it receives nothing for `grace` seconds, and not less than `lease`, it ends its worker.
    """

    lease: float
    grace: float = 0.0


class Dismiss(Message, frozen=True, tag=133):
    """Dismiss an agent that the cluster does not need, or if `error`, cannot use.

    With `reconnect`, the engine had given up the agent. The agent then ends its worker and connects again.
    """

    text: str
    error: bool = False
    reconnect: bool = False


class ClusterEnds(Message, frozen=True, tag=201):
    """Report that the controller was asked to end, and ends with the cluster. This is its last message."""


FromEngine = WorkerEnded | IslandNotRestarted | IslandEnded | IslandStarts | EngineReport | TellAgent | DrainRequest
ToEngine = (
    Refused
    | RestartIsland
    | RestartExcused
    | StartIsland
    | EndIsland
    | AgentSays
    | AgentLost
    | OperationReply
    | BecomeEngine
    | ClusterEnds
)
FromAgent = AgentHello | AgentWorkerEnded | AgentAlive | AgentLeaves
ToAgent = StartWorker | EndWorker | Renew | Dismiss
# Messages that an agent receives on its connection.
OfController = Refused | TellAgent

_from_agent = msgspec.msgpack.Decoder(decodable(FromAgent))
_to_agent = msgspec.msgpack.Decoder(decodable(ToAgent))
_encode = msgspec.msgpack.Encoder().encode


def agent_content(message: FromAgent | ToAgent) -> bytes:
    """Encode a message as the content of `AgentSays` or `TellAgent`."""
    return _encode(message)


def read_from_agent(content: bytes) -> FromAgent:
    """Decode the content of `AgentSays`. Raise msgspec.MsgspecError if it is invalid."""
    return _from_agent.decode(content)  # type: ignore[no-any-return]


def read_to_agent(content: bytes) -> ToAgent:
    """Decode the content of `TellAgent`. Raise msgspec.MsgspecError if it is invalid."""
    return _to_agent.decode(content)  # type: ignore[no-any-return]
