"""Replaces messages for the hosts of a group by one message to the group's relay, which forwards it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction, Send

# Messages that a host of a group receives directly, so that it detects whether the controller is alive.
DIRECT = (m.Ping, m.Stop)
# Limit for the cached partitions of sets of hosts. Programs have few different sets.
_MOST_KNOWN = 1024

_encode = msgspec.msgpack.Encoder().encode


class Forwarded:
    """A queued message for hosts of one group."""

    __slots__ = ("cause", "hosts", "in_pieces", "message", "relay")

    def __init__(self, cause: int, relay: int, hosts: tuple[int, ...], message: Any, in_pieces: bool = False) -> None:
        self.cause = cause
        self.relay = relay
        self.hosts = hosts
        self.message = message
        self.in_pieces = in_pieces


def is_only_for(action: AnyAction | Forwarded, host: int, connection: int) -> bool:
    """Return whether an action is only for a lost host. Remove that host from a forwarded message for several hosts.

    A message that a lost relay should forward counts as well, because the other hosts of its group are also lost.
    """
    if isinstance(action, Forwarded):
        action.hosts = tuple(other for other in action.hosts if other != host)
        return action.relay == host or not action.hosts
    return type(action) is Send and action.connection == connection


class RelayTable:
    """The groups of hosts, each identified by its relay."""

    def __init__(self) -> None:
        self._relays: dict[int, int] = {}
        self._known: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
        self.of = self._relays.get  # returns the relay of a host, or None

    @property
    def is_empty(self) -> bool:
        """Whether there are no groups."""
        return not self._relays

    def form(self, hosts: tuple[int, ...]) -> None:
        """Form a group. The first of the hosts is its relay."""
        self._relays.update(dict.fromkeys(hosts, hosts[0]))
        self._known.clear()

    def forget(self, host: int) -> None:
        self._relays.pop(host, None)
        self._known.clear()

    def partition(self, hosts: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the hosts by relay. A host without a relay is separate, with -1 as its relay."""
        if not self._relays:
            return [(-1, (host,)) for host in hosts]
        known = self._known.get(hosts)
        if known is None:
            groups: dict[int, list[int]] = {}
            for host in hosts:
                groups.setdefault(self._relays.get(host, -1 - host), []).append(host)
            known = [(max(relay, -1), tuple(some)) for relay, some in groups.items()]
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[hosts] = known
        return known


def encode_forwards(actions: Iterable[AnyAction | Forwarded], connections: Mapping[int, int]) -> list[AnyAction]:
    """Return the actions with a `Forward` to the relay for each forwarded message. `connections` are by host.

    Consecutive copies of one message are encoded once.
    """
    found: list[AnyAction] = []
    message, content = None, b""
    units: tuple[int, ...] = ()
    for each in actions:
        if not isinstance(each, Forwarded):
            found.append(each)
            continue
        if each.message is not message:
            message = each.message
            content, units = _encode(message), _units_of(message)
        connection = connections.get(each.relay)
        if connection is not None:  # otherwise, its island is about to be lost
            forward = m.Forward(each.hosts, content, units, each.in_pieces)
            found.append(Send(each.cause, connection, forward, each.in_pieces))
    return found


def _units_of(message: Any) -> tuple[int, ...]:
    """Return the dispatch units that a message starts."""
    if type(message) is m.Run:
        return (message.sequence,)
    if type(message) is m.Dispatch:
        return tuple(sequence for sequence, _ in message.units)
    return ()
