"""What the controller has decided to do, in order.

Memory that goes is named last, once a host and session: messages to a host arrive in order, so a `Free` comes after the
last run that uses it. So are credits, once a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.controller.connections import Connections
from atoll.protocol import messages as m
from atoll.protocol.actions import Action, AnyAction, Close, Send


class Outbox:
    """Actions that leave at the next flush. `cause` is the number of the event that is being handled.

    What is for somebody who has no connection is dropped.
    """

    def __init__(self, connections: Connections) -> None:
        self.cause = 0
        self._connections = connections
        self._hosts = connections.hosts
        self._sessions = connections.sessions
        self._actions: list[AnyAction] = []
        self._last: dict[int, int] = {}  # by host: the index of the last message to it
        self._frees: dict[tuple[int, int, bool], list[int]] = {}
        self._credits: dict[int, int] = {}

    def to_host(self, host: int, message: Any) -> None:
        connection = self._hosts.get(host)
        if connection is not None:
            self._last[host] = len(self._actions)
            self._actions.append(Send(self.cause, connection, message))

    def dispatch(self, host: int, session: int, run: int, sequence: int, segments: int) -> None:
        """The host may start the next segments of a run: one message for many dispatches in a row."""
        index = self._last.get(host)
        last: Any = self._actions[index] if index is not None else None
        if last is not None and type(last.message) is m.Dispatch and last.message.run == run and index is not None:
            together = m.Dispatch(session, run, (*last.message.units, (sequence, segments)))
            self._actions[index] = Send(self.cause, last.connection, together)
        else:
            self.to_host(host, m.Dispatch(session, run, ((sequence, segments),)))

    def to_session(self, session: int, message: Any) -> None:
        connection = self._sessions.get(session)
        if connection is not None:
            self._actions.append(Send(self.cause, connection, message))

    def to_engine(self, message: Any) -> None:
        if self._connections.engine is not None:
            self._actions.append(Send(self.cause, self._connections.engine, message))

    def send(self, connection: int, message: Any) -> None:
        self._actions.append(Send(self.cause, connection, message))

    def add(self, action: Action) -> None:
        self._actions.append(action)  # type: ignore[arg-type]

    def close(self, connection: int, reason: str = "") -> None:
        """Closes the connection: nothing that its peer still sends counts."""
        self._connections.remove(connection)
        self._actions.append(Close(self.cause, connection, reason))

    def free(self, hosts: Iterable[int], session: int, handles: Iterable[int], *, delete: bool = False) -> None:
        """The hosts may forget these buffers; with `delete`, their memory goes even while others refer to it."""
        for host in hosts:
            self._frees.setdefault((host, session, delete), []).extend(handles)

    def return_credits(self, session: int, count: int = 1) -> None:
        """So much of the session's window is free again; -1 for a launch that its proxy did not make."""
        self._credits[session] = self._credits.get(session, 0) + count

    def forget_session(self, session: int) -> None:
        """The session is over: nothing more is freed or said to it."""
        self._credits.pop(session, None)
        for key in [key for key in self._frees if key[1] == session]:
            del self._frees[key]

    def forget_host(self, host: int) -> None:
        """The host's worker is lost: what was for it is dropped, and nothing that it still says counts."""
        connection = self._hosts.get(host)
        if connection is not None:
            self._actions = [each for each in self._actions if type(each) is not Send or each.connection != connection]
            self.close(connection)
        self._last.clear()
        for key in [key for key in self._frees if key[0] == host]:
            del self._frees[key]

    def flush_frees(self) -> None:
        """Names the memory that goes now: what is sent next needs it."""
        # What is to be deleted first: a handle that is forgotten cannot be deleted any more.
        last: tuple[int, list[int], bool] | None = None
        free: m.Free | None = None
        for (host, session, delete), handles in sorted(self._frees.items(), key=lambda item: not item[0][2]):
            if free is None or (session, handles, delete) != last:
                last, free = (session, handles, delete), m.Free(session, tuple(handles), delete)
            self.to_host(host, free)  # the same message for many hosts is encoded once
        self._frees.clear()

    def take(self) -> list[AnyAction]:
        self.flush_frees()
        for session, count in self._credits.items():
            if count:
                self.to_session(session, m.CreditReturned(count))
        self._credits.clear()
        actions, self._actions = self._actions, []
        self._last.clear()
        return actions
