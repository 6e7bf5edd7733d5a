"""What the controller has decided to do, in order.

Memory that goes is named last, once a host: messages to a host arrive in order, so a `Free` comes after the last run
that uses it. So are credits, once a session; those of a session that has more in flight wait for one another,
since its proxy needs none while there is room in its window.

Hosts of a group get all but pings by way of their relay: one message for all of the group that get the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from atoll.launch.connections import Connections
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.protocol import messages as m
from atoll.protocol.actions import Action, AnyAction, Close, Send
from atoll.protocol.forwarding import DIRECT, Forwarded, RelayTable, encode_forwards, is_only_for

# Of a session's credits, so many go together. With more, its launches would come in bursts that take the controller
# longer than hosts have work for.
_TOGETHER = LAUNCH_WINDOW // 32


# By hosts: the handles.
_Handles = dict[tuple[int, ...], list[int]]


class Frees:
    """What each host may forget, by session; with `delete`, memory goes even while others refer to it."""

    def __init__(self) -> None:
        self._frees: dict[tuple[int, bool], _Handles] = {}  # by session and delete

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._frees

    def add(self, hosts: tuple[int, ...], session: int, handles: Iterable[int], delete: bool) -> None:
        self._frees.setdefault((session, delete), {}).setdefault(hosts, []).extend(handles)

    def forget_session(self, session: int) -> None:
        self._frees.pop((session, False), None)
        self._frees.pop((session, True), None)

    def forget_host(self, host: int) -> None:
        for frees in self._frees.values():
            for hosts in [hosts for hosts in frees if host in hosts]:
                handles = frees.pop(hosts)
                left = tuple(other for other in hosts if other != host)
                if left:
                    frees.setdefault(left, []).extend(handles)

    def take(self) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...], bool]]:
        """(hosts, session, handles, delete) of all. Hosts that may forget the same come together."""
        taken, self._frees = self._frees, {}
        # What is to be deleted first: a handle that is forgotten cannot be deleted any more.
        for (session, delete), frees in sorted(taken.items(), key=lambda item: not item[0][1]):
            for hosts, handles in (frees if len(frees) == 1 else _by_host(frees)).items():
                yield hosts, session, tuple(handles), delete


class Outbox:
    """Actions that leave at the next flush. `cause` is the number of the event that is handled, `seconds` its time.

    What is for somebody who has no connection is dropped.
    """

    def __init__(self, connections: Connections) -> None:
        self.cause = 0
        self.seconds = 0.0
        self._connections = connections
        self._hosts = connections.hosts
        self._sessions = connections.sessions
        self._actions: list[AnyAction | Forwarded] = []
        self._last: dict[int, int] = {}  # by host, or relay: the index of the last message to it, or to its group
        self._frees = Frees()
        self._credits: dict[int, int] = {}  # that sessions get
        self._due: dict[int, None] = {}  # sessions that get theirs now
        self._has_forwarded = False
        self._relays = RelayTable()

    def time(self) -> float:
        """When what is handled now has happened."""
        return self.seconds

    # ---- hosts

    def form_group(self, hosts: tuple[int, ...]) -> None:
        """The first of these hosts relays messages to the others from now on, until one of them is forgotten."""
        for host in hosts:
            self.to_host(host, m.JoinGroup(hosts[0], hosts))
        self._relays.form(hosts)

    def to_host(self, host: int, message: Any) -> None:
        connection = self._hosts.get(host)
        if connection is None:
            return
        relay = None if type(message) in DIRECT else self._relays.of(host)
        if relay is None:
            self._last[host] = len(self._actions)
            self._actions.append(Send(self.cause, connection, message))
            return
        last = self._actions[self._last[relay]] if relay in self._last else None
        if isinstance(last, Forwarded) and last.message is message:
            last.hosts += (host,)
        else:
            self._forward(relay, (host,), message)

    def to_hosts(self, hosts: tuple[int, ...], message: Any) -> None:
        """The same message to many: it is made and encoded once."""
        if self._relays.is_empty:
            for host in hosts:
                self.to_host(host, message)
            return
        for relay, some in self._relays.partition(hosts):
            if relay >= 0:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def to_hosts_in_pieces(self, hosts: tuple[int, ...], message: Any) -> None:
        """The same, for a large message: what is sent to these hosts later may overtake it."""
        for relay, some in self._relays.partition(hosts):
            connection = self._hosts.get(some[0])
            if relay >= 0:
                self._forward(relay, some, message, in_pieces=True)
            elif connection is not None:
                self._last[some[0]] = len(self._actions)
                self._actions.append(Send(self.cause, connection, message, in_pieces=True))

    def dispatch(self, hosts: tuple[int, ...], session: int, run: int, sequence: int, segments: int) -> None:
        """The hosts may start the next segments of a run: one message for many dispatches in a row."""
        units = ((sequence, segments),)
        message = None
        for relay, some in self._relays.partition(hosts):
            index = self._last.get(relay if relay >= 0 else some[0])
            last: Any = None if index is None else self._actions[index]
            if last is not None and type(last.message) is m.Dispatch and last.message.run == run and index is not None:
                together = m.Dispatch(session, run, last.message.units + units)
                if relay < 0:
                    self._actions[index] = Send(self.cause, last.connection, together)
                    continue
                if last.hosts == some:
                    self._actions[index] = Forwarded(self.cause, relay, some, together)
                    continue
            message = message or m.Dispatch(session, run, units)
            if relay >= 0:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def _forward(self, relay: int, hosts: tuple[int, ...], message: Any, in_pieces: bool = False) -> None:
        self._last[relay] = len(self._actions)
        self._actions.append(Forwarded(self.cause, relay, hosts, message, in_pieces))
        self._has_forwarded = True

    # ---- others

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

    def free(self, hosts: tuple[int, ...], session: int, handles: Iterable[int], *, delete: bool = False) -> None:
        """The hosts may forget these buffers; with `delete`, their memory goes even while others refer to it."""
        self._frees.add(hosts, session, handles, delete)

    def return_credits(self, session: int, count: int = 1, may_wait: bool = False) -> None:
        """So much of the session's window is free again; -1 for a launch that its proxy did not make.

        They `may_wait` for others where more of its launches are in flight, whose credits return later.
        """
        count += self._credits.get(session, 0)
        self._credits[session] = count
        if not may_wait or count >= _TOGETHER:
            self._due[session] = None

    def return_waiting_credits(self) -> None:
        """All go now: a large launch may wait for them while what is in flight takes as long as somebody else likes."""
        self._due.update(dict.fromkeys(self._credits))

    # ---- losses

    def forget_session(self, session: int) -> None:
        """The session is over: nothing more is freed or said to it."""
        self._credits.pop(session, None)
        self._due.pop(session, None)
        self._frees.forget_session(session)

    def forget_host(self, host: int) -> None:
        """The host's worker is lost: what was for it is dropped, and nothing that it still says counts."""
        connection = self._hosts.get(host)
        if connection is not None:
            self._actions = [each for each in self._actions if not is_only_for(each, host, connection)]
            self.close(connection)
        self._last.clear()
        self._relays.forget(host)
        self._frees.forget_host(host)

    # ---- leaving

    def flush_frees(self) -> None:
        """Names the memory that goes now: what is sent next needs it."""
        if self._frees.is_empty:
            return
        by_hosts: dict[tuple[int, ...], list[m.Free]] = {}
        for hosts, session, handles, delete in self._frees.take():
            by_hosts.setdefault(hosts, []).append(m.Free(session, handles, delete))
        for hosts, frees in by_hosts.items():
            self.to_hosts(hosts, frees[0] if len(frees) == 1 else m.FreeMany(tuple(frees)))

    def take(self) -> list[AnyAction]:
        """All that was decided since the last time, but for memory that has not been named yet."""
        for session in self._due:
            count = self._credits.pop(session, 0)
            if count:
                self.to_session(session, m.CreditReturned(count))
        self._due.clear()
        actions, self._actions = self._actions, []
        self._last.clear()
        if not self._has_forwarded:
            return actions  # type: ignore[return-value]
        self._has_forwarded = False
        return encode_forwards(actions, self._hosts)


def _by_host(frees: _Handles) -> _Handles:
    handles_of: dict[int, list[int]] = {}
    for hosts, handles in frees.items():
        for host in hosts:
            handles_of.setdefault(host, []).extend(handles)
    together: dict[tuple[int, ...], list[int]] = {}
    for host, handles in handles_of.items():
        together.setdefault(tuple(handles), []).append(host)
    return {tuple(hosts): list(handles) for handles, hosts in together.items()}
