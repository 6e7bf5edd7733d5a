"""What the controller has decided to do, in order.

Memory that goes is named last, once a host and session: messages to a host arrive in order, so a `Free` comes after the
last run that uses it. So are credits, once a session.

Hosts of a group get all but pings by way of their relay: one message for all of the group that get the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from atoll.controller.connections import Connections
from atoll.protocol import messages as m
from atoll.protocol.actions import Action, AnyAction, Close, Send

# What a host gets directly also where it is in a group: what tells it whether the controller is there.
_DIRECT = (m.Ping, m.Stop)
# Partitions by groups that are remembered: programs have few sets of hosts.
_MOST_PARTITIONS = 1024

_encode = msgspec.msgpack.Encoder().encode


class _Forwarded:
    """A message for hosts of one group, until it leaves."""

    __slots__ = ("cause", "hosts", "message", "relay")

    def __init__(self, cause: int, relay: int, hosts: tuple[int, ...], message: Any) -> None:
        self.cause = cause
        self.relay = relay
        self.hosts = hosts
        self.message = message


class Outbox:
    """Actions that leave at the next flush. `cause` is the number of the event that is being handled.

    What is for somebody who has no connection is dropped.
    """

    def __init__(self, connections: Connections) -> None:
        self.cause = 0
        self._connections = connections
        self._hosts = connections.hosts
        self._sessions = connections.sessions
        self._actions: list[AnyAction | _Forwarded] = []
        self._last: dict[int, int] = {}  # by host, or relay: the index of the last message to it, or to its group
        self._frees: dict[tuple[int, bool], dict[tuple[int, ...], list[int]]] = {}  # by session and delete; by hosts
        self._credits: dict[int, int] = {}
        self._has_forwarded = False
        self._relays: dict[int, int] = {}  # by host, where it is in a group
        self._partitions: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}

    # ---- hosts

    def form_group(self, hosts: tuple[int, ...]) -> None:
        """The first of these hosts relays messages to the others from now on, until one of them is forgotten."""
        for host in hosts:
            self.to_host(host, m.JoinGroup(hosts[0], hosts))
        self._relays.update(dict.fromkeys(hosts, hosts[0]))
        self._partitions.clear()

    def to_host(self, host: int, message: Any) -> None:
        connection = self._hosts.get(host)
        if connection is None:
            return
        relay = self._relays.get(host)
        if type(message) in _DIRECT:
            self._actions.append(Send(self.cause, connection, message))
        elif relay is None:
            self._last[host] = len(self._actions)
            self._actions.append(Send(self.cause, connection, message))
        else:
            last = self._last_forwarded(relay)
            if last is not None and last.message is message:
                last.hosts += (host,)
            else:
                self._forward(relay, (host,), message)

    def to_hosts(self, hosts: tuple[int, ...], message: Any) -> None:
        """The same message to many: it is made and encoded once."""
        for relay, some in self._by_relay(hosts):
            if relay >= 0:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def dispatch(self, hosts: tuple[int, ...], session: int, run: int, sequence: int, segments: int) -> None:
        """The hosts may start the next segments of a run: one message for many dispatches in a row."""
        units = ((sequence, segments),)
        message = None
        for relay, some in self._by_relay(hosts):
            index = self._last.get(relay if relay >= 0 else some[0])
            last: Any = None if index is None else self._actions[index]
            if last is not None and type(last.message) is m.Dispatch and last.message.run == run and index is not None:
                together = m.Dispatch(session, run, last.message.units + units)
                if relay < 0:
                    self._actions[index] = Send(self.cause, last.connection, together)
                    continue
                if last.hosts == some:
                    self._actions[index] = _Forwarded(self.cause, relay, some, together)
                    continue
            message = message or m.Dispatch(session, run, units)
            if relay >= 0:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def _by_relay(self, hosts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """The hosts by their relays; each that has none by itself, with -1."""
        if not self._relays:
            return [(-1, (host,)) for host in hosts]
        known = self._partitions.get(hosts)
        if known is None:
            groups: dict[int, list[int]] = {}
            for host in hosts:
                groups.setdefault(self._relays.get(host, -1 - host), []).append(host)
            known = [(max(relay, -1), tuple(some)) for relay, some in groups.items()]
            if len(self._partitions) >= _MOST_PARTITIONS:
                self._partitions.clear()
            self._partitions[hosts] = known
        return known

    def _last_forwarded(self, relay: int) -> _Forwarded | None:
        index = self._last.get(relay)
        last = None if index is None else self._actions[index]
        return last if isinstance(last, _Forwarded) else None

    def _forward(self, relay: int, hosts: tuple[int, ...], message: Any) -> None:
        self._last[relay] = len(self._actions)
        self._actions.append(_Forwarded(self.cause, relay, hosts, message))
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
        self._frees.setdefault((session, delete), {}).setdefault(hosts, []).extend(handles)

    def return_credits(self, session: int, count: int = 1) -> None:
        """So much of the session's window is free again; -1 for a launch that its proxy did not make."""
        self._credits[session] = self._credits.get(session, 0) + count

    # ---- losses

    def forget_session(self, session: int) -> None:
        """The session is over: nothing more is freed or said to it."""
        self._credits.pop(session, None)
        for key in [key for key in self._frees if key[0] == session]:
            del self._frees[key]

    def forget_host(self, host: int) -> None:
        """The host's worker is lost: what was for it is dropped, and nothing that it still says counts."""
        connection = self._hosts.get(host)
        if connection is not None:
            self._actions = [each for each in self._actions if not self._is_for(each, host, connection)]
            self.close(connection)
        self._last.clear()
        self._relays.pop(host, None)
        self._partitions.clear()
        for frees in self._frees.values():
            for hosts in [hosts for hosts in frees if host in hosts]:
                handles = frees.pop(hosts)
                left = tuple(other for other in hosts if other != host)
                if left:
                    frees.setdefault(left, []).extend(handles)

    @staticmethod
    def _is_for(action: AnyAction | _Forwarded, host: int, connection: int) -> bool:
        """Whether it is for that host, and no other. What is forwarded by a lost relay is for others that are lost."""
        if isinstance(action, _Forwarded):
            action.hosts = tuple(other for other in action.hosts if other != host)
            return action.relay == host or not action.hosts
        return type(action) is Send and action.connection == connection

    # ---- leaving

    def flush_frees(self) -> None:
        """Names the memory that goes now: what is sent next needs it."""
        # What is to be deleted first: a handle that is forgotten cannot be deleted any more.
        for (session, delete), frees in sorted(self._frees.items(), key=lambda item: not item[0][1]):
            if len(frees) > 1:
                frees = _by_host(frees)
            for hosts, handles in frees.items():
                self.to_hosts(hosts, m.Free(session, tuple(handles), delete))
        self._frees.clear()

    def take(self) -> list[AnyAction]:
        self.flush_frees()
        for session, count in self._credits.items():
            if count:
                self.to_session(session, m.CreditReturned(count))
        self._credits.clear()
        actions, self._actions = self._actions, []
        self._last.clear()
        if not self._has_forwarded:
            return actions  # type: ignore[return-value]
        self._has_forwarded = False
        return self._sealed(actions)

    def _sealed(self, actions: list[AnyAction | _Forwarded]) -> list[AnyAction]:
        sealed: list[AnyAction] = []
        message, content = None, b""
        units: tuple[int, ...] = ()
        for each in actions:
            if not isinstance(each, _Forwarded):
                sealed.append(each)
                continue
            if each.message is not message:
                message = each.message
                content, units = _encode(message), _units_of(message)
            connection = self._hosts.get(each.relay)
            if connection is not None:  # else its island is about to be lost
                sealed.append(Send(each.cause, connection, m.Forward(each.hosts, content, units)))
        return sealed


def _units_of(message: Any) -> tuple[int, ...]:
    """The dispatch units that a message starts."""
    if type(message) is m.Run:
        return (message.sequence,)
    if type(message) is m.Dispatch:
        return tuple(sequence for sequence, _ in message.units)
    return ()


def _by_host(frees: dict[tuple[int, ...], list[int]]) -> dict[tuple[int, ...], list[int]]:
    """What each host may forget, once: the hosts that may forget the same together."""
    handles_of: dict[int, list[int]] = {}
    for hosts, handles in frees.items():
        for host in hosts:
            handles_of.setdefault(host, []).extend(handles)
    together: dict[tuple[int, ...], list[int]] = {}
    for host, handles in handles_of.items():
        together.setdefault(tuple(handles), []).append(host)
    return {tuple(hosts): list(handles) for handles, hosts in together.items()}
