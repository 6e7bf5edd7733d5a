"""What a controller decides: everything that its shell does. `cause` is the number of the event that led to it."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.cluster.usage.usage_records import By, Estimate, Expected, Usage


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all actions. Events are numbered from 1."""

    cause: int


class Send(Action, frozen=True, tag=1):
    """Send a message. One for a connection that is gone is dropped.

    With `in_pieces`, it is large, and what is sent later may overtake it.
    """

    connection: int
    message: Any
    in_pieces: bool = False


class Close(Action, frozen=True, tag=2):
    """Send what is queued, and close. With a `reason`, the peer did what it may not."""

    connection: int
    reason: str = ""


class Name(Action, frozen=True, tag=3):
    """The connection's peer is known: so it is called in errors."""

    connection: int
    name: str


class SetTimer(Action, frozen=True, tag=4):
    """Answer with `TimerEnded` after so many seconds."""

    timer: int
    seconds: float


class ReportReady(Action, frozen=True, tag=5):
    """All hosts have joined, and sessions may open."""


class End(Action, frozen=True, tag=6):
    """End the process, once what was sent is on its way."""


class StoreUsage(Action, frozen=True, tag=7):
    """Keep what was used since the last such action, and how much device time there was."""

    present_ns: int
    usage: tuple[Usage, ...]


class AnswerUsage(Action, frozen=True, tag=8):
    """Send the connection a `UsageReply`: what was used in the last `seconds`, 0 for ever; with a `tenant`, by it."""

    connection: int
    by: By
    seconds: float
    tenant: str | None
    expected: tuple[Expected, ...] = ()


class StoreEstimates(Action, frozen=True, tag=9):
    """Store the duration estimates of gangs."""

    estimates: tuple[Estimate, ...]


class PersistSessions(Action, frozen=True, tag=10):
    """Persist these sessions, each with its connection. The next cluster gets them as `SessionsPersisted`."""

    content: bytes
    sessions: dict[int, int]  # connections, by session
    secrets: dict[int, str]  # by session


class Log(Action, frozen=True, tag=11):
    """Write a warning to the log."""

    text: str


AnyAction = (
    Log
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
