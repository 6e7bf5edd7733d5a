"""The actions that a controller returns, which its shell performs."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.cluster.usage.usage_records import By, Estimate, Expected, Usage


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base class of actions. `cause` is the number of the event that led to the action; events start at 1."""

    cause: int


class Send(Action, frozen=True, tag=1):
    """Send a message. If the connection has ended, drop the message.

    With `in_pieces`, the message is large, and later messages may overtake it.
    """

    connection: int
    message: Any
    in_pieces: bool = False


class Close(Action, frozen=True, tag=2):
    """Send the queued messages and close. A `reason` states the peer's violation of the protocol."""

    connection: int
    reason: str = ""


class Name(Action, frozen=True, tag=3):
    """Set the name of the connection's peer for errors."""

    connection: int
    name: str


class SetTimer(Action, frozen=True, tag=4):
    """Send the event `TimerEnded` after `seconds`."""

    timer: int
    seconds: float


class ReportReady(Action, frozen=True, tag=5):
    """Report that all hosts have joined, so that sessions can open."""


class End(Action, frozen=True, tag=6):
    """End the process after sending the queued messages."""


class StoreUsage(Action, frozen=True, tag=7):
    """Store the usage and the available device time since the last such action."""

    present_ns: int
    usage: tuple[Usage, ...]


class AnswerUsage(Action, frozen=True, tag=8):
    """Send a `UsageReply` about the last `seconds`, or about all time if 0, and about one `tenant` if given."""

    connection: int
    by: By
    seconds: float
    tenant: str | None
    expected: tuple[Expected, ...] = ()


class StoreEstimates(Action, frozen=True, tag=9):
    """Store the duration estimates of gangs."""

    estimates: tuple[Estimate, ...]


class PersistSessions(Action, frozen=True, tag=10):
    """Persist these sessions and their connections, and versions of published arrays.

    The next cluster receives them as `SessionsPersisted`.
    """

    content: bytes
    sessions: dict[int, int]  # connections by session
    secrets: dict[int, str]  # by session
    versions: tuple[tuple[str, str, int], ...] = ()  # tenant, name and number of each


class Log(Action, frozen=True, tag=11):
    """Write an event to the log: a warning, or information. An `island` of -1 and a `session` of 0 mean none."""

    text: str
    event: str = ""  # its kind: see `telemetry.history`
    is_warning: bool = True
    island: int = -1
    session: int = 0
    tenant: str = ""
    actor: str = ""


class SetPatience(Action, frozen=True, tag=12):
    """Let the peer wait for `seconds` after a loss of its socket, because the controller may be away for long.

    With 0 it waits as long as usual. Without a journal, no other controller continues, and nothing is done.
    """

    connection: int
    seconds: float


AnyAction = (
    Log
    | SetPatience
    | Send
    | Close
    | Name
    | SetTimer
    | ReportReady
    | End
    | StoreUsage
    | AnswerUsage
    | StoreEstimates
    | PersistSessions
)
