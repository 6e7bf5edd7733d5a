"""Between host agents and the engine; the controller passes them on, each way, without reading them.

An agent runs on each machine of a cluster whose engine is `hosts`. It dials the controller, and holds one worker.

    agent -> engine   AgentHello first, then FromAgent
    engine -> agent   ToAgent
"""

from __future__ import annotations

import msgspec

from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.topology import RankSlot
from atoll.protocol.messages.opening_messages import Message, Refused

# ---- what the controller sees


class AgentSays(Message, frozen=True, tag=110):
    """Something of an agent's for the engine. `agent` is its connection: the controller fills it in."""

    content: bytes  # of `FromAgent`
    agent: int = 0


class TellAgent(Message, frozen=True, tag=111):
    """Something of the engine's for an agent; with `close`, the last."""

    agent: int
    content: bytes  # of `ToAgent`
    close: bool = False


class AgentLost(Message, frozen=True, tag=112):
    """To the engine: an agent's connection has ended."""

    agent: int
    reason: str


class MachineReport(msgspec.Struct, frozen=True, array_like=True):
    """A machine for `atoll status`: what it is called, where it is, and what its agent does.

    If it holds the worker of a `host` and leaves, `leaves` is the reason, such as "SIGTERM".
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
    """To the controller, whenever it changes: what each island waits for, and the machines that there are."""

    waits: tuple[tuple[int, str], ...]  # (island, a sentence)
    machines: tuple[MachineReport, ...]


class IslandStarts(Message, frozen=True, tag=114):
    """To the controller: an island's workers are about to start. Those of earlier incarnations are refused from now."""

    island: int
    incarnation: int
    machines: tuple[str, ...] = ()  # by rank, where machines have names


# ---- agent -> engine


class AgentHello(Message, frozen=True, tag=120):
    """An agent has connected, for the first time or again.

    `agent` is drawn at random when its process starts. `running` is the incarnation of the worker that it holds, and
    `ended` what became of the last one that has ended, (incarnation, exit status): the report may have been lost.
    """

    agent: str
    machine: str  # the host name, for people
    address: str  # of its machine, as others of the cluster reach it
    version: str
    rank_slot: RankSlot = RankSlot()
    group: str = ""
    devices: dict[str, int] = msgspec.field(default_factory=dict)  # by platform
    memory_bytes: int = 0
    coordinator_address: str = ""  # HOST:PORT that is free: where the coordination service of an island can be
    running: int = 0
    ended: tuple[int, int] = (0, 0)


class AgentWorkerEnded(Message, frozen=True, tag=121):
    """The worker of this incarnation has ended, with this exit status. `coordinator_address`: as in AgentHello.

    `reason` says why, where that is more than the status: it gave no sign of life while it started, say.
    """

    incarnation: int
    status: int
    coordinator_address: str = ""
    reason: str = ""


class AgentAlive(Message, frozen=True, tag=122):
    """The answer to `Renew`."""


class AgentLeaves(Message, frozen=True, tag=123):
    """The machine is about to go: its agent ends in so many seconds, and its worker with it."""

    seconds: float
    reason: str = ""


# ---- engine -> agent


class StartWorker(Message, frozen=True, tag=130):
    """Start a worker. `coordinator_address` is where the hosts of its island meet; "" where there is one only.

    With `bulk_tls`, its data port is with TLS where the controller is. It is killed where it gives no sign of life for
    `lease` seconds while it starts.
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


class EndWorker(Message, frozen=True, tag=131):
    """End the worker of this incarnation; with `force` at once."""

    incarnation: int
    force: bool = False


class Renew(Message, frozen=True, tag=132):
    """The engine is there: an agent that hears nothing for `lease` seconds from now dials again.

    It ends its worker then, or where there is a `grace`, when it has heard nothing for that.
    """

    lease: float
    grace: float = 0.0


class Dismiss(Message, frozen=True, tag=133):
    """The cluster needs this agent no more; with an `error`, it cannot use it at all.

    With `reconnect` it was thought lost: it ends what it holds, and comes anew.
    """

    text: str
    error: bool = False
    reconnect: bool = False


FromAgent = AgentHello | AgentWorkerEnded | AgentAlive | AgentLeaves
ToAgent = StartWorker | EndWorker | Renew | Dismiss
# What an agent reads of its connection.
OfController = Refused | TellAgent

_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_encode = msgspec.msgpack.Encoder().encode


def agent_content(message: FromAgent | ToAgent) -> bytes:
    """For `AgentSays` and `TellAgent`."""
    return _encode(message)


def read_from_agent(content: bytes) -> FromAgent:
    """Raises msgspec.MsgspecError for what no agent sends."""
    return _from_agent.decode(content)  # type: ignore[no-any-return]


def read_to_agent(content: bytes) -> ToAgent:
    """Raises msgspec.MsgspecError for what no engine sends."""
    return _to_agent.decode(content)  # type: ignore[no-any-return]
