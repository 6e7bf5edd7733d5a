"""Between controller and engine."""

from __future__ import annotations

from atoll.cluster.topology import IslandShape
from atoll.protocol.messages.agent_messages import AgentLost, AgentSays, EngineReport, IslandStarts, TellAgent
from atoll.protocol.messages.opening_messages import Message, Refused
from atoll.protocol.messages.operator_messages import DrainRequest, OperationReply

# ---- engine -> controller


class WorkerEnded(Message, frozen=True, tag=70):
    """A worker of this incarnation has ended by itself; its island is started anew.

    `status` is its exit status (negative: the signal), None where nobody knows: its machine is lost, say.
    """

    host: int
    incarnation: int
    status: int | None
    text: str  # the status as a sentence


class IslandRemoved(Message, frozen=True, tag=71):
    """The island is not started again, and why."""

    island: int
    text: str


class IslandEnded(Message, frozen=True, tag=101):
    """The workers of an island have ended, as they were to."""

    island: int


# ---- controller -> engine


class StartIsland(Message, frozen=True, tag=102):
    """Start the workers of one more island, which is to have that shape; numbers rise by one.

    Without a shape: of one that was ended, once there are machines for it again.
    """

    island: int
    shape: IslandShape | None = None


class EndIsland(Message, frozen=True, tag=103):
    """End the island's workers, and do not start them again."""

    island: int


class RestartIsland(Message, frozen=True, tag=75):
    """Kill the island's workers, and start them again. If there is a spare, it replaces the machine of host `avoid`."""

    island: int
    reason: str
    avoid: int = -1


class RestartExcused(Message, frozen=True, tag=115):
    """Do not count the island's newest restart against its limit: a tenant's program caused it."""

    island: int


FromEngine = WorkerEnded | IslandRemoved | IslandEnded | IslandStarts | EngineReport | TellAgent | DrainRequest
ToEngine = Refused | RestartIsland | RestartExcused | StartIsland | EndIsland | AgentSays | AgentLost | OperationReply
