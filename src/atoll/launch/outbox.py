"""The actions that the controller has decided on, in order.

Frees of buffers are collected and sent at the end, in one message per host. Messages to a host arrive in order, so a
`Free` arrives after the last run that uses the memory. Credits are also collected, per session. If more launches of
the session are in flight, its credits wait until there are several: its proxy needs none while its window is not full.

The hosts of a group get all messages except those in `DIRECT` through their relay: one message for all hosts of the
group that get the same. See `protocol.forwarding`. Pings are sent either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import structs

from atoll.launch.connections import Connections
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.protocol import messages as m
from atoll.protocol.actions import Action, AnyAction, Close, Name, Send, SetPatience
from atoll.protocol.forwarding import DIRECT, Forwarded, RelayTable, encode_forwards, is_only_for, process_relay

# Credits that are returned to a session together. With more, its launches would arrive in bursts for which the
# controller needs more time than hosts have work.
_CREDIT_BATCH = LAUNCH_WINDOW // 32


# Hosts of a process whose last messages are noted one by one. For more, only that of their relay is.
_FEW_HOSTS = 4

_Handles = dict[tuple[int, ...], list[int]]  # by hosts


class Frees:
    """The buffers that hosts may forget, by session. With `delete`, memory is freed even if others refer to it."""

    def __init__(self) -> None:
        self._frees: dict[tuple[int, bool], _Handles] = {}  # by session and delete

    @property
    def is_empty(self) -> bool:
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
        """Remove and yield all frees as (hosts, session, handles, delete). Hosts with equal handles are joined."""
        taken, self._frees = self._frees, {}
        # Deletions come first, since a handle that was forgotten cannot be deleted any more.
        ordered = taken.items() if len(taken) == 1 else sorted(taken.items(), key=lambda item: not item[0][1])
        for (session, delete), frees in ordered:
            for hosts, handles in (frees if len(frees) == 1 else _by_host(frees)).items():
                yield hosts, session, tuple(handles), delete


class Outbox:
    """The actions for the next flush. Messages to a host, session or engine without a connection are dropped.

    Attributes:
      cause: the number of the event that is being handled.
      seconds: the time of that event.
    """

    def __init__(self, connections: Connections) -> None:
        self.cause = 0
        self.seconds = 0.0
        self._connections = connections
        self._hosts = connections.hosts
        self._sessions = connections.sessions
        self._actions: list[AnyAction | Forwarded] = []
        self._last: dict[int, int] = {}  # by host or relay: index of the last message to it, or to its group
        self._last_to_many: dict[int, int] = {}  # by relay of a process: index of the last one for many hosts
        self._frees = Frees()
        self._credits: dict[int, int] = {}  # to return, by session
        self._due: dict[int, None] = {}  # sessions whose credits are returned at the next flush
        self._has_forwarded = False
        self._relays = RelayTable()

    def time(self) -> float:
        """Return the time of the event that is being handled."""
        return self.seconds

    # ---- hosts

    def form_group(self, hosts: tuple[int, ...]) -> None:
        """Have the first of these hosts relay messages to the others, until one of them is forgotten."""
        for host in hosts:
            self.to_host(host, m.JoinGroup(hosts[0], hosts))
        self._relays.form(hosts, hosts[0])

    def join_process(self, host: int, incarnation: int, connection: int) -> None:
        """Have the relay of the host's process, which has this connection, relay messages to the host."""
        self.to_host(host, m.JoinGroup(m.PROCESS_RELAY, ()))
        self.send(connection, m.AddMember(host, incarnation))
        self._relays.form((host,), process_relay(connection))

    def relay_of(self, host: int) -> int | None:
        """Return the number of the relay of a host, or None: see `RelayTable`."""
        return self._relays.of(host)

    def are_behind(self, relay: int, hosts: Iterable[int]) -> bool:
        """Return whether all of these hosts receive messages through a relay."""
        return {*map(self._relays.of, hosts)} <= {relay}

    def hosts_behind(self, relay: int) -> list[int]:
        """Return the hosts that receive messages through a relay."""
        return self._relays.hosts_behind(relay)

    @property
    def has_relays(self) -> bool:
        """Whether some hosts receive messages through relays."""
        return not self._relays.is_empty

    @property
    def has_processes(self) -> bool:
        """Whether some hosts receive messages through the relays of their processes."""
        return self._relays.has_processes

    def to_host(self, host: int, message: Any) -> None:
        connection = self._hosts.get(host)
        if connection is None:
            return
        relay = None if type(message) in DIRECT else self._relays.of(host)
        if relay is None:
            self._last[host] = len(self._actions)
            self._actions.append(Send(self.cause, connection, message))
            return
        last = self._actions[self._last[relay]] if relay >= 0 and relay in self._last else None
        if isinstance(last, Forwarded) and last.message is message:
            last.hosts += (host,)
        else:
            self._forward(relay, (host,), message)

    def to_hosts(self, hosts: tuple[int, ...], message: Any) -> None:
        """Send the same message to several hosts. It is encoded once."""
        if self._relays.is_empty:  # without a call per host
            connections, last, actions = self._hosts, self._last, self._actions
            for host in hosts:
                connection = connections.get(host)
                if connection is not None:
                    last[host] = len(actions)
                    actions.append(Send(self.cause, connection, message))
            return
        for relay, some in self._relays.partition(hosts):
            if relay is not None:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def ask(self, hosts: tuple[int, ...], lease_of: Callable[[tuple[int, ...]], float], now: float) -> None:
        """Send pings to hosts that have relays, which report the answers together.

        `lease_of(hosts)` returns the lease of a ping for these hosts.
        """
        pings: dict[float, m.Ping] = {}  # so that equal ones are encoded once
        for relay, some in self._relays.partition(hosts):
            assert relay is not None
            lease = lease_of(some)
            self._forward(relay, some, pings.setdefault(lease, m.Ping(lease, now)), asks=True)

    def start(self, hosts: tuple[int, ...], run: m.Run, sequence: int) -> None:
        """Start a run on several hosts under this number, which may differ from that of `run`.

        The hosts of a process share a message if they start the same `run`.
        """
        for relay, some in self._relays.partition(hosts):
            if relay is None or relay >= 0:
                self.to_hosts(some, structs.replace(run, sequence=sequence))
                continue
            runs = (sequence,) * len(some)
            last = self._actions[self._last[relay]] if relay in self._last else None
            if isinstance(last, Forwarded) and last.message is run:
                last.hosts += some
                last.runs += runs
                self._last.update(dict.fromkeys(some, self._last[relay]))
            else:
                self._forward(relay, some, run, runs=runs)

    def to_hosts_in_pieces(self, hosts: tuple[int, ...], message: Any) -> None:
        """Send a large message to several hosts in pieces. Later messages to these hosts may overtake it."""
        for relay, some in self._relays.partition(hosts):
            connection = self._hosts.get(some[0])
            if relay is not None:
                self._forward(relay, some, message, in_pieces=True)
            elif connection is not None:
                self._last[some[0]] = len(self._actions)
                self._actions.append(Send(self.cause, connection, message, in_pieces=True))

    def dispatch(self, hosts: tuple[int, ...], session: int, run: int, sequence: int, segments: int) -> None:
        """Have the hosts start the next segments of a run. Dispatches in a row are joined to one message."""
        units = ((sequence, segments),)
        message = None
        for relay, some in self._relays.partition(hosts):
            is_of_process = relay is not None and relay < 0 and len(some) <= _FEW_HOSTS
            index = self._last.get(some[0] if relay is None or is_of_process else relay)  # of the last message there
            last: Any = None if index is None else self._actions[index]
            if is_of_process and index is not None and relay is not None:
                are_last = [self._last.get(host) == index for host in some]
                if not all(are_last) or self._last_to_many.get(relay, -1) > index:
                    last = None
            if last is not None and type(last.message) is m.Dispatch and last.message.run == run and index is not None:
                together = m.Dispatch(session, run, last.message.units + units)
                if relay is None:
                    self._actions[index] = Send(self.cause, last.connection, together)
                    continue
                if last.hosts == some:
                    self._actions[index] = Forwarded(self.cause, relay, some, together)
                    continue
            message = message or m.Dispatch(session, run, units)
            if relay is not None:
                self._forward(relay, some, message)
            else:
                self.to_host(some[0], message)

    def _forward(
        self,
        relay: int,
        hosts: tuple[int, ...],
        message: Any,
        in_pieces: bool = False,
        runs: tuple[int, ...] = (),
        asks: bool = False,
    ) -> None:
        index = len(self._actions)
        self._last[relay] = index
        if relay < 0 and len(hosts) <= _FEW_HOSTS:
            self._last.update(dict.fromkeys(hosts, index))
        elif relay < 0:
            self._last_to_many[relay] = index
        self._actions.append(Forwarded(self.cause, relay, hosts, message, in_pieces, runs, asks))
        self._has_forwarded = True

    # ---- other peers

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
        """Close the connection. Messages of its peer that arrive later are ignored."""
        self._connections.remove(connection)
        self._actions.append(Close(self.cause, connection, reason))

    def name(self, connection: int, name: str) -> None:
        """Let errors and the log name the connection's peer."""
        self._actions.append(Name(self.cause, connection, name))

    def set_patience(self, session: int, seconds: float) -> None:
        """Let the session's proxy wait for `seconds` if the controller is away; 0: as long as usual."""
        connection = self._connections.sessions.get(session)
        if connection is not None:
            self._actions.append(SetPatience(self.cause, connection, seconds))

    def free(self, hosts: tuple[int, ...], session: int, handles: Iterable[int], *, delete: bool = False) -> None:
        """Have the hosts forget these buffers. With `delete`, their memory is freed even if others refer to it."""
        self._frees.add(hosts, session, handles, delete)

    def return_credits(self, session: int, count: int = 1, may_wait: bool = False) -> None:
        """Return credits to the session's window; -1 for a launch that its proxy did not make.

        If `may_wait` is true, the credits wait for those of other launches of the session that are in flight.
        """
        count += self._credits.get(session, 0)
        self._credits[session] = count
        if not may_wait or count >= _CREDIT_BATCH:
            self._due[session] = None

    def return_waiting_credits(self) -> None:
        """Return all credits at the next flush: a large launch may need them before the launches in flight end."""
        self._due.update(dict.fromkeys(self._credits))

    # ---- ends of sessions and hosts

    def forget_session(self, session: int) -> None:
        """Drop the frees and credits of a session that has ended."""
        self._credits.pop(session, None)
        self._due.pop(session, None)
        self._frees.forget_session(session)

    def forget_host(self, host: int) -> None:
        """Drop the messages to a host whose worker is lost, and close its connection."""
        connection = self._hosts.get(host)
        if connection is not None:
            self._actions = [each for each in self._actions if not is_only_for(each, host, connection)]
            self.close(connection)
        self._last.clear()
        self._last_to_many.clear()
        self._relays.forget(host)
        self._frees.forget_host(host)

    # ---- flush

    def flush_frees(self) -> None:
        """Add the messages for all frees now, before later messages that need the memory."""
        if self._frees.is_empty:
            return
        by_hosts: dict[tuple[int, ...], list[m.Free]] = {}
        for hosts, session, handles, delete in self._frees.take():
            by_hosts.setdefault(hosts, []).append(m.Free(session, handles, delete))
        for hosts, frees in by_hosts.items():
            self.to_hosts(hosts, frees[0] if len(frees) == 1 else m.FreeMany(tuple(frees)))

    def take(self) -> list[AnyAction]:
        """Return the actions since the last call, and forget them. Frees are included only after `flush_frees`."""
        if self._due:
            for session in self._due:
                count = self._credits.pop(session, 0)
                if count:
                    self.to_session(session, m.CreditReturned(count))
            self._due.clear()
        actions, self._actions = self._actions, []
        self._last.clear()
        self._last_to_many.clear()
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
