"""What the controller has decided to send, in order.

Memory that goes is named last, once a host and session: messages to a host arrive in order, so a `Free` comes after the
last run that uses it. So is the room for more launches, once a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.protocol import messages as m

# ("host", number), ("session", number), ("operator", number) or ("engine", 0)
Destination = tuple[str, int]


class Outbox:
    """Messages for hosts and sessions; the shell takes and sends them after each batch of events."""

    def __init__(self) -> None:
        self._messages: list[tuple[Destination, Any]] = []
        self._last: dict[int, int] = {}  # by host, the place of the last message for it
        self._frees: dict[tuple[int, int, bool], list[int]] = {}
        self._retired: dict[int, int] = {}

    def to_host(self, host: int, message: Any) -> None:
        self._last[host] = len(self._messages)
        self._messages.append((("host", host), message))

    def go(self, host: int, session: int, run: int, sequence: int, segments: int) -> None:
        """The turn of a run's next legs has come: one message for many turns in a row."""
        place = self._last.get(host)
        last = self._messages[place][1] if place is not None else None
        if type(last) is m.Dispatch and last.run == run and place is not None:
            self._messages[place] = (("host", host), m.Dispatch(session, run, (*last.turns, (sequence, segments))))
        else:
            self.to_host(host, m.Dispatch(session, run, ((sequence, segments),)))

    def to_engine(self, message: Any) -> None:
        self._messages.append((("engine", 0), message))

    def to_session(self, session: int, message: Any) -> None:
        self._messages.append((("session", session), message))

    def to_operator(self, operator: int, message: Any) -> None:
        self._messages.append((("operator", operator), message))

    def free(self, hosts: Iterable[int], session: int, handles: Iterable[int], *, delete: bool = False) -> None:
        """The hosts may forget these buffers; with `delete`, their memory goes whoever else refers to it."""
        for host in hosts:
            self._frees.setdefault((host, session, delete), []).extend(handles)

    def retire(self, session: int, count: int = 1) -> None:
        """So much of the session's window is free again; with -1, a launch that its proxy did not make has come."""
        self._retired[session] = self._retired.get(session, 0) + count

    def forget_session(self, session: int) -> None:
        """The session is over: nothing more need be freed or told."""
        self._retired.pop(session, None)
        for key in [key for key in self._frees if key[1] == session]:
            del self._frees[key]

    def forget_host(self, host: int) -> None:
        """The host's worker is gone: what was for it is for nobody."""
        self._messages = [each for each in self._messages if each[0] != ("host", host)]
        self._last.clear()
        for key in [key for key in self._frees if key[0] == host]:
            del self._frees[key]

    def flush_frees(self) -> None:
        """Names the memory that goes now: what is sent next needs its room."""
        # What is to be deleted first: a handle that is forgotten cannot be deleted any more.
        for (host, session, delete), handles in sorted(self._frees.items(), key=lambda item: not item[0][2]):
            self.to_host(host, m.Free(session, tuple(handles), delete))
        self._frees.clear()

    def take(self) -> list[tuple[Destination, Any]]:
        self.flush_frees()
        for session, count in self._retired.items():
            if count:
                self.to_session(session, m.CreditReturned(count))
        self._retired.clear()
        messages, self._messages = self._messages, []
        self._last.clear()
        return messages
