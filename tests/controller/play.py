"""A cluster with one session, for tests that list events and the messages that follow."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller.admission import ENGINE_SAYS_SECONDS
from atoll.controller.core import Controller
from atoll.errors import OK, Code, Status
from atoll.ir.program import (
    Call,
    HostBuffer,
    HostToDevice,
    Program,
    single,
)
from atoll.ir.types import ArraySpec, Sharding
from atoll.launch.shared_parts import GANG_WINDOW
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.security.tokens import digest
from atoll.session.registered_programs import in_parts
from atoll.state.session import Session
from tests.controller.dumps import check_dump

BROKEN = Status(Code.INTERNAL, "division by zero")

# Numbers of the flushes after which a cluster's controller is dumped and loaded.
_DUMPED_AFTER = (8, 64, 512)

# Messages in the background, such as heartbeats, which tests do not list.
_BACKGROUND = (m.Ping, m.Peers)


class Cluster:
    """A controller and its connections: from hosts, an engine, an operator and sessions.

    Events take no time. `sent` returns the messages that the controller sends. After some flushes, the controller is
    dumped and loaded. Tests that replace parts of it turn this off with `dumps=False`.
    """

    def __init__(self, topology: str, token: str = "", dumps: bool = True, **settings: Any) -> None:
        self._dumps = dumps
        self.controller = Controller(ClusterSettings(topology, **settings), digest(token))
        self.topology = self.controller.resources.topology
        self.token = token
        self.now = 0.0
        self.actions: list[a.AnyAction] = []  # all actions so far
        self.closed: list[a.Close] = []
        self.events: Counter[str] = Counter()
        self._next = 1
        self._names: dict[int, tuple[str, int]] = {}  # who is at the other end of a connection
        self._hosts: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._timers: list[a.SetTimer] = []
        self._kept: list[a.AnyAction] = []  # for the next `flush`
        self._flushes = 0
        self.event(e.Started(0.0))
        self.engine_connection = self.connect("engine")
        self._names[self.engine_connection] = ("engine", 0)
        self._operator = self.connect("operator")
        self._names[self._operator] = ("operator", 0)

    # ---- connections

    def event(self, event: e.AnyEvent) -> list[a.AnyAction]:
        self.events[type(event).__name__] += 1
        actions = self.controller.handle(event)
        self.controller.launches.validate()
        if type(event) is e.Flush:
            self._flushes += 1
            if self._dumps and self._flushes in _DUMPED_AFTER and gc.isenabled():  # not while objects are counted
                check_dump(self.controller)
        self.actions.extend(actions)
        self.closed.extend(action for action in actions if isinstance(action, a.Close))
        self._timers.extend(action for action in actions if isinstance(action, a.SetTimer))
        return actions

    def connect(
        self,
        role: str,
        pid: int = 1,
        label: str = "",
        host: int = -1,
        token: str | None = None,
        run: NamedRun = UNNAMED,
        process: str = "",
        address: str = "",
    ) -> int:
        """Open a connection that has sent its Hello, and return its number. `token` is the cluster's own by default."""
        number = self._next
        self._next += 1
        self.event(e.ConnectionOpened(self.now, number, f"secret of connection {number}", address=address))
        self.receive(
            number,
            m.Hello(
                m.PROTOCOL,
                role,
                digest(self.token if token is None else token),
                pid,
                "test",
                label,
                host,
                incarnation=pid,
                run=run,
                process=process,
            ),
        )
        return number

    def receive(self, connection: int, message: Any) -> None:
        self.event(e.Received(self.now, connection, message))

    def join(
        self, host: int, address: str = "", pid: int = 0, max_in_flight: int = GANG_WINDOW, process: str = ""
    ) -> None:
        """Let a host's worker join."""
        connection = self.connect("worker", pid or 1000 + host, process=process)
        self._names[connection] = ("host", host)
        self._hosts[host] = connection
        hello = ready(self.controller.resources.topology, host, address or f"unix:/data-{host}")
        compiles_first = self.compiles_first(host)
        self.receive(
            connection, msgspec.structs.replace(hello, max_in_flight=max_in_flight, compiles_first=compiles_first)
        )

    def compiles_first(self, host: int) -> bool:
        """Return whether the next worker of the host finds out by itself if functions need worlds."""
        return False

    def open(
        self,
        pid: int = 42,
        label: str = "script.py",
        token: str | None = None,
        run: NamedRun = UNNAMED,
        address: str = "",
    ) -> Session:
        """Open a session, and return it."""
        before = set(self.controller.sessions)
        connection = self.connect("proxy", pid, label, token=token, run=run, address=address)
        (number,) = set(self.controller.sessions) - before
        self.session_opened(connection, number)
        return self.controller.sessions[number]

    def connection_of(self, session: int) -> int:
        """Return the number of the connection of a session's proxy."""
        return self._sessions[session]

    def session_opened(self, connection: int, session: int) -> None:
        """Record the connection of a session's proxy."""
        self._names[connection] = ("session", session)
        self._sessions[session] = connection

    def close(self, session: int) -> None:
        """Close the connection of the session's proxy."""
        self.event(e.ConnectionLost(self.now, self._sessions[session], "closed"))

    def proxy(self, session: int, message: Any) -> None:
        self.receive(self._sessions[session], message)

    def worker(self, host: int, message: Any) -> None:
        self.receive(self._hosts[host], message)

    def engine(self, message: Any) -> None:
        self.receive(self.engine_connection, message)

    def operator(self, message: Any) -> None:
        self.receive(self._operator, message)

    def lose(self, host: int, reason: str) -> None:
        """Lose the connection to a host's worker, without a report of the engine."""
        self.event(e.ConnectionLost(self.now, self._hosts[host], reason))
        self._kept += self.event(e.Flush(self.now))  # sets the timer
        self.end_timers(ENGINE_SAYS_SECONDS)

    def end_timers(self, seconds: float) -> None:
        """End the timers that were set for `seconds`."""
        ended = [each for each in self._timers if each.seconds == seconds]
        self._timers = [each for each in self._timers if each.seconds != seconds]
        for each in ended:
            self.event(e.TimerEnded(self.now, each.timer))

    def tick(
        self,
        now: float,
        silent: tuple[int, ...] = (),
        silent_sessions: tuple[int, ...] = (),
        running: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Advance to `now`. All hosts and proxies except the silent ones have answered their pings.

        `running` has the sequences of the gangs that run on each host.
        """
        asked, self.now = self.now, now
        for host in list(self.controller.connections.hosts):
            if host not in silent:
                self.worker(host, m.Pong(asked, running=running.get(host, ())))
        for session in list(self.controller.connections.sessions):
            if session not in silent_sessions:
                self.proxy(session, m.Pong())
        self.event(e.Tick(now))

    def name_of(self, connection: int) -> tuple[str, int]:
        """Return the kind and the number of the peer of a connection."""
        return self._names.get(connection, ("unknown", connection))

    # ---- what the controller does

    def flush(self) -> list[a.AnyAction]:
        """Return all actions since the last call. Fail if the controller had a bug in a message that waited."""
        kept, self._kept = self._kept, []
        actions = [*kept, *self.event(self.next_flush())]
        while self.controller.has_work and not self.pauses():
            assert not self.controller.bugs(), self.controller.bugs()[0][0].trace
            actions += self.event(self.next_flush())
        return actions

    def next_flush(self) -> e.Flush:
        return e.Flush(self.now)

    def pauses(self) -> bool:
        """Return whether other events occur before the next flush, although the controller has work."""
        return False

    def sent(self) -> list[tuple[tuple[str, int], Any]]:
        """Return all messages since the last call, with their receivers."""
        sends = [action for action in self.flush() if isinstance(action, a.Send)]
        return [
            (self.name_of(each.connection), each.message)
            for each in sends
            if not isinstance(each.message, _BACKGROUND) and not getattr(each.message, "asks", False)
        ]

    def ask(self, connection: int, message: Any) -> list[Any]:
        """Return the messages that a connection receives in reply to a message."""
        self.flush()
        self.receive(connection, message)
        return [each.message for each in self.flush() if isinstance(each, a.Send) and each.connection == connection]

    def outbox(self) -> list[Any]:
        """Return all messages since the last call."""
        return [message for _, message in self.sent()]


def joined(topology: str, kind: type[Cluster] = Cluster, **settings: Any) -> Cluster:
    """Return a cluster whose workers have all joined, without the messages that they received."""
    cluster = kind(topology, **settings)
    for host in range(cluster.topology.host_count):
        cluster.join(host)
    cluster.flush()
    return cluster


def joining(cluster: Cluster) -> list[tuple[str, int, m.JoinGroup]]:
    """Return the messages so far that put hosts into groups, with their receivers."""
    sends = [action for action in cluster.actions if isinstance(action, a.Send)]
    return [
        (*cluster.name_of(each.connection), each.message) for each in sends if isinstance(each.message, m.JoinGroup)
    ]


def ready(topology: Topology, host: int, address: str) -> m.WorkerReady:
    devices = tuple(
        m.DeviceInfo(i, "null", "cpu", ("device",), "device", (i, 0, 0), 0, i, 0)
        for i in range(topology.shapes[topology.island_of(host)].devices)
    )
    return m.WorkerReady(topology.island_of(host), host, devices, "cpu", "1", address, GANG_WINDOW)


class Play(Cluster):
    """A cluster with one session. Most methods return the messages that the controller sends because of one event."""

    def __init__(self, topology: str = "1x1x2", **settings: Any) -> None:
        super().__init__(topology, **settings)
        for host in range(self.topology.host_count):
            self.join(host)
        self.session = self.open().number
        self.flush()

    def send(self, message: Any) -> list[Any]:
        """Send a message from the session's proxy. Like a real proxy, it sends a large program in parts."""
        messages = in_parts(message.program, message.definition) if type(message) is m.RegisterProgram else (message,)
        for each in messages:
            self.proxy(self.session, each)
        return self.outbox()

    def report(self, host: int, message: Any) -> list[Any]:
        """Send a message from a worker."""
        self.worker(host, message)
        return self.outbox()

    def done(self, *sequences: int, host: int = 0) -> list[Any]:
        return self.report(host, m.Done(tuple((sequence, 0, 1) for sequence in sequences)))

    def join_again(self, *hosts: int) -> list[Any]:
        """Let restarted workers join."""
        for host in hosts:
            self.join(host, f"unix:/data-{host}-again", 2000 + host)
        return self.outbox()

    def drain_and_return(self, island: int) -> None:
        """Close the session, and let an operator drain an island and start it again."""
        self.close(self.session)
        self.operator(m.DrainRequest(island))
        self.engine(m.IslandEnded(island))
        self.operator(m.UndrainRequest(island))
        self.outbox()
        hosts = tuple(self.topology.hosts_of(island))
        self.engine(m.IslandStarts(island, 5, tuple(f"m{host}" for host in hosts)))
        for host in hosts:
            self.join(host, pid=5)
        self.session = self.open().number

    # ---- programs with fixed numbers

    def with_function(self, function: int = 1, devices: tuple[int, ...] = (0,)) -> str:
        """Register and compile a function, and return its name."""
        self.send(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
        hosts = sorted({self.controller.sessions[self.session].devices.locations[d].host for d in devices})
        for host in hosts:
            for message in self.report(host, m.FeedsArrived(self.session, (900 + function,))):
                self.report(host, m.Compiled(message.function, OK, b"", 0.1, False))
        return self.controller.sessions[self.session].functions[function]

    def with_call(self, program: int = 1, *, name: str = "f", arguments: int = 1, **options: Any) -> int:
        """Register a program that calls function 1 on device 0, and return the number of its plan."""
        if 1 not in self.controller.sessions[self.session].functions:
            self.with_function()
        call = Call(1, tuple(range(arguments)), (on(0),), (0,), **options)
        (keep,) = self.send(m.RegisterProgram(program, single(name, (on(0),) * arguments, call)))
        return int(keep.plan)

    def with_put(self, program: int = 2, device: int = 0) -> None:
        buffer = HostBuffer(0, (2,), None, None)
        definition = single("put", (), HostToDevice((buffer,), (on(device),)), feeds=1)
        self.send(m.RegisterProgram(program, definition))

    def array(self, handle: int, device: int = 0) -> None:
        """Make an array on a device, using program 2."""
        if 2 not in self.controller.sessions[self.session].programs:
            self.with_put()
        feed = 10_000 + handle
        self.report(0, m.FeedsArrived(self.session, (feed,)))
        (run,) = self.send(m.Launch(2, (), (handle,), (feed,)))
        self.done(run.sequence)


def on(*devices: int) -> ArraySpec:
    return ArraySpec("float32", (2,), Sharding(devices))


def runs(messages: list[Any]) -> list[m.Run]:
    return [message for message in messages if isinstance(message, m.Run)]


def chain_of(length: int) -> Program:
    """Return a program that calls function 1 on device 0 `length` times, each time on the previous result."""
    nodes = tuple(Call(1, (i,), (on(0),), (0,)) for i in range(length))
    return Program("chain", (on(0),), nodes, (length,))
