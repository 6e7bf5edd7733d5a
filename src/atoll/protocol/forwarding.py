"""Replaces messages for the hosts of a group by one message to the group's relay, which forwards it. Pure.

The relay of a group is one of its hosts. Several islands in one process share a relay with a separate connection. It
also forwards the starts of gangs of one node, which have the same contents except for their numbers, as one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction, Send

# Messages that a host of a group receives directly. Most pings are sent through the relay, by `Outbox.ask`.
DIRECT = (m.Ping, m.Stop)
# Limit for the cached partitions of sets of hosts. Programs have few different sets.
_MAX_KNOWN = 1024

_encode = msgspec.msgpack.Encoder().encode


class Forwarded:
    """A queued message for hosts of one group. The numbers of the message are relative to the `runs` of the hosts.

    With `asks`, the relay reports the answers of the hosts together.
    """

    __slots__ = ("asks", "cause", "hosts", "in_pieces", "message", "relay", "runs")

    def __init__(
        self,
        cause: int,
        relay: int,
        hosts: tuple[int, ...],
        message: Any,
        in_pieces: bool = False,
        runs: tuple[int, ...] = (),
        asks: bool = False,
    ) -> None:
        self.cause = cause
        self.relay = relay
        self.hosts = hosts
        self.message = message
        self.in_pieces = in_pieces
        self.runs = runs
        self.asks = asks


def is_only_for(action: AnyAction | Forwarded, host: int, connection: int) -> bool:
    """Return whether an action is only for a lost host. Remove that host from a forwarded message for several hosts.

    A message that a lost relay should forward counts as well, because the other hosts of its group are also lost.
    """
    if isinstance(action, Forwarded):
        if action.runs:
            action.runs = tuple(run for run, other in zip(action.runs, action.hosts, strict=True) if other != host)
        action.hosts = tuple(other for other in action.hosts if other != host)
        return action.relay == host or not action.hosts
    return type(action) is Send and action.connection == connection


def process_relay(connection: int) -> int:
    """Return the number of the relay of a process, by its connection. Relays that are hosts have their numbers."""
    return -1 - connection


class RelayTable:
    """The groups of hosts, each identified by its relay."""

    def __init__(self) -> None:
        self._relays: dict[int, int] = {}
        self._known: dict[tuple[int, ...], list[tuple[int | None, tuple[int, ...]]]] = {}
        self.of = self._relays.get  # returns the relay of a host, or None
        self._in_processes = 0  # number of hosts whose relay is that of their process

    @property
    def is_empty(self) -> bool:
        """Whether there are no groups."""
        return not self._relays

    @property
    def has_processes(self) -> bool:
        """Whether some relays are those of processes."""
        return self._in_processes > 0

    def form(self, hosts: tuple[int, ...], relay: int) -> None:
        """Add these hosts, which are in no group, to the group of the relay."""
        self._relays.update(dict.fromkeys(hosts, relay))
        self._in_processes += len(hosts) * (relay < 0)
        self._known.clear()

    def hosts_behind(self, relay: int) -> list[int]:
        """Return the hosts in the group of a relay."""
        return [host for host, its in self._relays.items() if its == relay]

    def forget(self, host: int) -> None:
        self._in_processes -= self._relays.pop(host, 0) < 0
        self._known.clear()

    def partition(self, hosts: tuple[int, ...]) -> list[tuple[int | None, tuple[int, ...]]]:
        """Return the hosts by relay. A host without a relay is separate, with None as its relay."""
        if not self._relays:
            return [(None, (host,)) for host in hosts]
        known = self._known.get(hosts)
        if known is None:
            groups: dict[tuple[int | None, int], list[int]] = {}
            for host in hosts:
                relay = self._relays.get(host)
                groups.setdefault((relay, host if relay is None else -1), []).append(host)
            known = [(relay, tuple(some)) for (relay, _), some in groups.items()]
            if len(self._known) >= _MAX_KNOWN:
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
    for each in _joined(actions):
        if not isinstance(each, Forwarded):
            found.append(each)
            continue
        if each.message is not message:
            message = each.message
            content, units = _encode(message), _units_of(message, bool(each.runs))
        connection = connections.get(each.relay) if each.relay >= 0 else -1 - each.relay
        if connection is not None:  # otherwise, its island is about to be lost
            forward = m.Forward(each.hosts, content, units, each.in_pieces, each.runs, each.asks)
            found.append(Send(each.cause, connection, forward, each.in_pieces))
    return found


class _Open:
    """A message to the relay of a process, to which hosts may still be added. `place` is among all actions."""

    __slots__ = ("forwarded", "hosts", "place", "runs")

    def __init__(self, place: int, forwarded: Forwarded) -> None:
        self.place = place
        self.forwarded = forwarded
        self.hosts: list[int] = []
        self.runs: list[int] = []

    def closed(self) -> Forwarded:
        each = self.forwarded
        hosts, runs = tuple(self.hosts), tuple(self.runs)
        return Forwarded(each.cause, each.relay, hosts, each.message, each.in_pieces, runs, each.asks)


def _joined(actions: Iterable[AnyAction | Forwarded]) -> list[AnyAction | Forwarded]:
    """Return the actions, with equal messages for hosts of one process as one message.

    A host is added to an earlier message only if nothing between the two is for this host, so its order is kept.
    """
    actions = list(actions)
    if not _may_join(actions):  # such as those of joint gangs, of which each process gets one message
        return actions
    found: list[AnyAction | Forwarded] = []
    opened: list[_Open] = []
    newest: dict[tuple[int, Any], _Open] = {}  # by relay and message
    last: dict[int, int] = {}  # place of the last message by host
    for each in actions:
        if not isinstance(each, Forwarded) or each.relay >= 0:
            if type(each) is Send and type(each.message) is m.AddMember:
                last[each.message.host] = len(found)  # the relay drops what it receives for the host before
            found.append(each)
            continue
        if type(each.message) is m.Dispatch:
            each = _relative(each)
        message, hosts = each.message, each.hosts
        key = each.relay, message if type(message) is m.Dispatch else id(message)
        before = newest.get(key)
        if before is None or any([last.get(host, -1) >= before.place for host in hosts]):
            before = newest[key] = _Open(len(found), each)
            opened.append(before)
            found.append(each)
        before.hosts += hosts
        before.runs += each.runs
        last.update(dict.fromkeys(hosts, before.place))
    for before in opened:
        found[before.place] = before.closed()
    return found


def _may_join(actions: Iterable[AnyAction | Forwarded]) -> bool:
    """Return whether the relay of a process may have equal messages."""
    found: set[tuple[int, int]] = set()
    for each in actions:
        if type(each) is Forwarded and each.relay < 0:
            key = each.relay, 0 if type(each.message) is m.Dispatch else id(each.message)
            if key in found:
                return True
            found.add(key)
    return False


def _relative(dispatch: Forwarded) -> Forwarded:
    """Return a queued `Dispatch` with numbers relative to its run, so that those of other runs may be equal."""
    message, hosts = dispatch.message, dispatch.hosts
    units = tuple([(sequence - message.run, segments) for sequence, segments in message.units])
    relative = m.Dispatch(message.session, 0, units)
    return Forwarded(dispatch.cause, dispatch.relay, hosts, relative, runs=(message.run,) * len(hosts))


def _units_of(message: Any, is_relative: bool) -> tuple[int, ...]:
    """Return the dispatch units that a message starts, without delegated runs, whose hosts report their progress."""
    if type(message) is m.Run:
        return () if message.ahead else (0,) if is_relative else (message.sequence,)
    if type(message) is m.Dispatch:
        return tuple(sequence for sequence, _ in message.units)
    return ()
