"""Between controller and the commands of whoever runs a cluster."""

from __future__ import annotations

from atoll.errors import Status
from atoll.transport.messages.opening import Message, Refused


class AskStatus(Message, frozen=True, tag=80):
    pass


class AskStop(Message, frozen=True, tag=81):
    pass


class Report(Message, frozen=True, tag=82):
    """The answer to AskStatus: JSON."""

    body: bytes


class AskDump(Message, frozen=True, tag=84):
    pass


class Dump(Message, frozen=True, tag=85):
    """The answer to AskDump: the controller's event log, a line of JSON each."""

    body: bytes


class AskTrace(Message, frozen=True, tag=86):
    since: int  # spans that ended before, in nanoseconds of their hosts' clocks, are left out


class TraceOf(Message, frozen=True, tag=87):
    """The answer to AskTrace: msgpack of a list of `controller.trace.Span`."""

    body: bytes


class AskRemap(Message, frozen=True, tag=97):
    """Move a slice to an island; to these devices of it, by their numbers in the report, or to any."""

    session: int
    slice: int
    island: int
    devices: tuple[int, ...] = ()


class AskAddIsland(Message, frozen=True, tag=99):
    """Start one more island like the others."""


class AskDrain(Message, frozen=True, tag=100):
    """Move all that is on the island to others, and end its workers."""

    island: int


class Told(Message, frozen=True, tag=98):
    """The answer to a request of an operator, when it is done or refused: a sentence."""

    status: Status
    text: str


class Stopping(Message, frozen=True, tag=83):
    """The answer to AskStop."""


FromOperator = AskRemap | AskAddIsland | AskDrain | AskStatus | AskDump | AskTrace | AskStop
ToOperator = Refused | Report | Dump | TraceOf | Told | Stopping
