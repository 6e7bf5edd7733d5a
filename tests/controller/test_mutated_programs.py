"""Mutate some messages of correct sessions at random, and check that the controller and the other sessions continue."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.controller.faults import NothingChangedError
from atoll.errors import OK, AtollError, Code, Status
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Report,
    Transfer,
    single,
)
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import dumped
from tests.controller.play import Cluster
from tests.controller.test_tenants import ROOT
from tests.thoroughness import examples, longer

EVE = TenantSettings("eve", token_hash("eve"), publish=("*",), subscribe=("victim/*",))
VICTIM = TenantSettings("victim", token_hash("victim"), publish=("*",), subscribe=("eve/*",))
STEPS = 120
NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    255,
    1 << 31,
    (1 << 48) - 1,
    1 << 48,
    1 << 60,
    1 << 61,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
TEXTS = ("", "x", "/", "victim/a", "../a", "a" * 5000, "\x00\x1b[2J", "token", "opaque", "float32", "int4", "bool")


class Hostile(Cluster):
    """Cluster with sessions of eve, one of which acts at random, and a session of a victim that works."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        topology = rng.choice(("1x1x2", "2x1x2", "3x1x1", "2x2x1", "2x1x1"))
        super().__init__(
            topology,
            token="cluster",
            dumps=False,
            tenants=(EVE, VICTIM, ROOT),
            device_memory=rng.choice((0, 0, 64, 200)),
            joint_islands=rng.choice((2, 0)),
            delegate_after_seconds=rng.choice((None, 0.0, 1.0)),
        )
        for host in range(self.topology.host_count):
            self.join(host)
        self._operator = self.connect("operator", token="root")
        self.numbers = iter(range(1, 1 << 20))
        self.requests: list[Any] = []  # from the controller to hosts
        self.runs: dict[int, list[int]] = {}  # sequence numbers, by host
        self.sources: list[tuple[int, int, int]] = []  # session, host and feed of functions
        self.known_of: dict[int, dict[str, list[int]]] = {}
        self.victim = self.open(token="victim").number
        self.eves = [self.begin() for _ in range(2)]
        self.take(self.flush())

    def begin(self) -> int:
        """Open a session, and give it functions, programs and arrays."""
        self.session = self.open(token="eve").number
        self.known_of[self.session] = {kind: [] for kind in ("handle", "program", "function", "feed", "reader")}
        for _ in range(3):
            self.send(self.function())
        self.work()
        for spec in [*(self.spec() for _ in range(3)), self.scalar()]:
            number = self.new("program")
            self.send(m.RegisterProgram(number, put(spec)))
            for _ in range(2):
                self.send(m.Launch(number, (), (self.new("handle"),), (self.new("feed"),), contents=bytes(48)))
        for _ in range(4):
            self.send(m.RegisterProgram(self.new("program"), self.program()))
        self.work()
        return self.session

    @property
    def known(self) -> dict[str, list[int]]:
        return self.known_of[self.session]

    def send(self, message: Any) -> None:
        if self.session in self.controller.sessions and self.session in self.controller.connections.sessions:
            self.proxy(self.session, message)

    def work(self) -> None:
        """Let the hosts do all the work that they can."""
        for _ in range(4):
            self.take(self.flush())
            self.arrive()
            self.take(self.flush())
            self.compile()
            for host in list(self.runs):
                self.end(host, len(self.runs[host]))

    # ---- messages

    def some(self, kind: str) -> int:
        known = self.known[kind]
        return self.rng.choice(known[-12:]) if known and self.rng.random() < 0.97 else self.rng.randrange(20)

    def new(self, kind: str) -> int:
        number = next(self.numbers)
        self.known[kind].append(number)
        return number

    def spec(self) -> ArraySpec:
        devices = sorted(self.locations)
        count = min(self.rng.choice((1, 1, 2, 3)), len(devices))
        start = self.rng.randrange(len(devices) - count + 1)
        chosen = tuple(devices[start : start + count])
        if self.rng.random() < 0.5:
            return ArraySpec("float32", (12,), Sharding(chosen, Tiled((count,), tuple(range(count)))))
        return ArraySpec("float32", (12,), Sharding(chosen))

    def scalar(self) -> ArraySpec:
        return ArraySpec("int32", (), Sharding((self.rng.choice(sorted(self.locations)),)))

    def function(self) -> m.RegisterFunction:
        feed, devices = self.new("feed"), self.spec().sharding.devices
        for device in devices:
            self.sources.append((self.session, self.locations[device].host, feed))
        content = f"content {self.rng.randrange(3)}"
        return m.RegisterFunction(self.new("function"), content, feed, (devices,), runs_apart=self.rng.random() < 0.7)

    def call(self, spec: ArraySpec, donates: float) -> Call:
        """Return a call of a function, either on its own devices or on others."""
        session = self.controller.sessions.get(self.session)
        functions = {} if session is None else session.function_requests
        fitting = [
            number for number, each in functions.items() if each.assignment == (spec.sharding.devices,)
        ] or self.known["function"]
        function = self.rng.choice(fitting) if fitting else 1
        donated = (0,) if self.rng.random() < donates else ()
        return Call(function, (0,), (spec,), spec.sharding.devices, donated=donated)

    @property
    def locations(self) -> dict[int, Any]:
        session = self.controller.sessions.get(self.session)
        return dict(session.devices.locations) if session is not None else {0: None}

    def node(self, spec: ArraySpec) -> tuple[Any, int]:
        """Return a node whose argument is value 0 of this type, and the number of its results."""
        rng, devices = self.rng, spec.sharding.devices
        call = self.call(spec, 0.4)
        match rng.randrange(8):
            case 0 | 1:
                return call, 1
            case 2 | 3:
                return Transfer((0,), (self.spec(),), rng.random() < 0.3, reshard=True), 1
            case 4:
                whole = (0, len(devices), 1)
                return Rearrange((0,), (spec,), (Mapping(0, 0, whole, whole),), rng.random() < 0.3), 1
            case 5:
                return DeviceToHost((0,), 0, None), 1
            case 6:
                return msgspec.structs.replace(call, inputs=(0, 0), outputs=(spec, spec), donated=(0, 1)), 2
            case _:
                token = ArraySpec("token", (), Sharding(devices))
                return msgspec.structs.replace(call, outputs=(spec, token)), 2

    def program(self) -> Program:
        rng = self.rng
        if rng.random() < 0.15:
            scalar = self.scalar()
            if rng.random() < 0.5:
                return Program("report", (scalar,), (Report((0,)),), ())
            return Program("carry", (self.spec(), scalar), (Report((1,)),), ())
        spec = self.spec()
        if rng.random() < 0.2:
            return put(spec)
        node, count = self.node(spec)
        nodes, results = [node], tuple(range(1, 1 + count))
        if count == 1 and not isinstance(node, DeviceToHost) and rng.random() < 0.4:
            (out,) = node.outputs
            donates = () if rng.random() < 0.5 else (0,)
            nodes.append(msgspec.structs.replace(self.call(out, 0.0), inputs=(1,), donated=donates))
            results = (2,)
        return Program("f", (spec,), tuple(nodes), results, 1 if isinstance(node, DeviceToHost) else 0)

    def launch(self) -> m.Launch:
        rng, session = self.rng, self.controller.sessions.get(self.session)
        number = self.some("program")
        definition = None if session is None else session.definitions.get(number)
        if session is None or definition is None:
            return m.Launch(number, (self.some("handle"),), (self.new("handle"),), ())
        arguments = []
        for spec in definition.arguments:
            entries = session.directory.entries.items()
            fitting = [
                handle for handle, each in entries if each.spec == spec and handle < 1 << 30 and not each.consumed
            ]
            arguments.append(rng.choice(fitting) if fitting else self.some("handle"))
        return m.Launch(
            number,
            tuple(arguments),
            tuple(self.new("handle") for _ in definition.results),
            tuple(self.new("feed") for _ in range(definition.feeds)),
            released=(self.some("handle"),) if rng.random() < 0.1 else (),
            contents=bytes(48) if definition.feeds == 1 and rng.random() < 0.3 else None,
            wait=next(self.numbers) if rng.random() < 0.1 and len(definition.results) else 0,
        )

    def message(self) -> Any:
        rng, some, new = self.rng, self.some, self.new
        match rng.randrange(30):
            case 0 | 1:
                return self.function()
            case 2 | 3 | 4 | 5:
                return m.RegisterProgram(new("program"), self.program())
            case 6 | 7 | 8 | 9 | 10 | 11 | 12:
                return self.launch()
            case 13:
                return m.Release((some("handle"),), rng.random() < 0.3)
            case 14:
                return m.Await(next(self.numbers), (some("handle"), some("handle")))
            case 15:
                return m.MakeError((new("handle"),), Status(Code.INTERNAL, "broken"))
            case 16:
                handle = some("handle")
                return m.Publish(
                    next(self.numbers),
                    rng.choice(("a", "b")),
                    rng.randint(1, 3),
                    (handle,),
                    ("w",),
                    replicas=rng.randint(1, 2),
                )
            case 17:
                return m.OpenVersion(
                    next(self.numbers), rng.choice(("a", "b", "victim/a", "eve/a")), seconds=rng.choice((0.0, 5.0))
                )
            case 18 | 19:
                count = rng.randint(1, 2)
                return m.ReadVersion(
                    some("reader"),
                    rng.randrange(2),
                    tuple(self.spec() for _ in range(count)),
                    tuple(new("handle") for _ in range(count)),
                    rng.random() < 0.2,
                )
            case 20:
                return m.CloseVersion(some("reader"))
            case 21:
                return rng.choice((m.ReleaseProgram(some("program")), m.ReleaseFunction(some("function"))))
            case 22:
                return m.RegisterSwitch(new("program"), some("program"), (some("program"), some("program")))
            case 23:
                return m.RegisterLoop(
                    new("program"), rng.randrange(2), some("program"), some("program"), some("program"), some("program")
                )
            case 24:
                return m.Query(
                    next(self.numbers),
                    rng.choice((m.QueryKind.LAYOUT, m.QueryKind.COST, m.QueryKind.MEMORY, m.QueryKind.PROFILE)),
                    rng.choice(sorted(self.locations)),
                    rng.choice((-1, some("function"))),
                    b"",
                )
            case 25:
                return m.AddSlice(next(self.numbers), SliceRequest(rng.randint(1, 2), exclusive=rng.random() < 0.3))
            case 26:
                return rng.choice(
                    (
                        m.ReleaseSlice(rng.randint(1, 3)),
                        m.Quiesced(rng.randint(1, 3)),
                        m.LeavesIslands(),
                        m.FailOnLoss(),
                    )
                )
            case 27:
                return m.FailureAcknowledged(
                    tuple(range(self.topology.host_count)), ((0, some("feed")),), (some("feed"),)
                )
            case 28:
                return rng.choice(
                    (
                        m.Pong(self.now, rng.randrange(1 << 40)),
                        m.CallsRecorded(rng.randint(1, 2), self.now, rng.randrange(1 << 40), b""),
                        m.HandlesReported(rng.randint(1, 2), {some("handle"): False}),
                    )
                )
            case _:
                return m.Recompile(some("function"), new("feed"))

    # ---- mutations

    def mutated(self, message: Any) -> Any:
        """Return the message with one change, or the same message if the changed one cannot be encoded."""
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        places: list[tuple[Any, Any]] = []

        def walk(value: Any) -> None:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for key, each in items:
                if not (isinstance(value, dict) and key == "type"):
                    places.append((value, key))
                walk(each)

        plain = _lists(plain)
        walk(plain)
        if not places:
            return message
        holder, key = self.rng.choice(places)
        holder[key] = self.changed(holder[key])
        try:
            return msgspec.convert(plain, type(message))
        except (msgspec.ValidationError, TypeError, OverflowError):
            return message

    def changed(self, value: Any) -> Any:
        rng = self.rng
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            known = self.known[rng.choice(sorted(self.known))]
            return rng.choice((value + 1, value - 1, rng.choice(NUMBERS), rng.choice(known) if known else 0))
        if isinstance(value, float):
            return rng.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
        if isinstance(value, str):
            return rng.choice(TEXTS)
        if isinstance(value, bytes):
            return rng.choice((b"", b"\xc1" * 9, bytes(5000)))
        if value is None:
            return rng.choice((0, "", b"", [], {}))
        if isinstance(value, list):
            choice = rng.randrange(6)
            if choice == 0 or not value:
                return []
            if choice == 1:
                return [*value, rng.choice(value)]
            if choice == 2:
                return value[1:]
            if choice == 3:
                return value[::-1]
            if choice == 4:
                return value * 40
            return [*value, *value]
        return value

    # ---- the world

    def take(self, actions: list[a.AnyAction]) -> None:
        for action in actions:
            if not isinstance(action, a.Send):
                continue
            kind, number = self.name_of(action.connection)
            message = action.message
            if kind == "host":
                if isinstance(message, m.Run):
                    self.runs.setdefault(number, []).append(message.sequence)
                elif isinstance(message, m.Compile | m.WorkerQuery):
                    self.requests.append((number, message))
            elif isinstance(message, m.Quiesce) and self.rng.random() < 0.8 and number in self.controller.sessions:
                self.proxy(number, m.Quiesced(message.migration))
            elif isinstance(message, m.VersionOpened) and message.status.ok and number in self.known_of:
                self.known_of[number]["reader"].append(message.reader)

    def arrive(self) -> None:
        """Let bytes of clients arrive at hosts."""
        for number, host, feed in self.sources:
            if number in self.controller.sessions and host in self.controller.connections.hosts:
                self.worker(host, m.FeedsArrived(number, (feed,)))
        self.sources = []
        for number in self.known_of:
            if number in self.controller.sessions:
                for host, feed in list(self.controller.sessions[number].feeds.awaited):
                    if host in self.controller.connections.hosts:
                        self.worker(host, m.FeedsArrived(number, (feed,)))

    def compile(self) -> None:
        requests, self.requests = self.requests, []
        for number, request in requests:
            if number not in self.controller.connections.hosts:
                continue
            if isinstance(request, m.Compile):
                self.worker(number, m.Compiled(request.function, OK, b"", 0.1, False))
            else:
                self.worker(number, m.WorkerAnswer(request.session, request.query, OK, b""))

    def end(self, host: int, count: int) -> None:
        """End gangs on a host, in order. Some of them fail."""
        for _ in range(count):
            if not self.runs.get(host) or host not in self.controller.connections.hosts:
                return
            sequence = self.runs[host].pop(0)
            gang = self.controller.launches.in_flight.get(sequence)
            if gang is not None and gang.run.spec.kind == "report":
                self.worker(host, m.ValueReported(sequence, self.rng.randrange(2)))
            if self.rng.random() < 0.03:
                self.worker(host, m.Failed(sequence, Status(Code.INTERNAL, "it failed")))
            else:
                self.worker(host, m.Done(((sequence, 0, 1000),)))

    def host_acts(self) -> None:
        hosts = list(self.controller.connections.hosts)
        if not hosts:
            return
        match self.rng.randrange(6):
            case 0:
                self.arrive()
            case 1:
                self.compile()
            case _:
                self.end(self.rng.choice(hosts), self.rng.randint(1, 3))

    def world_acts(self) -> None:
        rng = self.rng
        match rng.randrange(14):
            case 0:
                self.now += rng.choice((0.1, 1.0, 3.0))
                self.event(e.Tick(self.now))
            case 1:
                hosts = list(self.controller.connections.hosts)
                if hosts and rng.random() < 0.4:
                    host = rng.choice(hosts)
                    island = self.topology.island_of(host)
                    self.lose(host, "it burnt")
                    for each in self.topology.hosts_of(island):
                        self.runs.pop(each, None)
            case 2:
                for host in range(self.topology.host_count):
                    if host not in self.controller.connections.hosts:
                        self.join(host, f"unix:/again-{next(self.numbers)}", 3000 + next(self.numbers))
            case 3:
                self.operator(
                    rng.choice((m.CheckRequest(), m.StatusRequest(), m.RecordRequest(5.0), m.TraceRequest(recording=1)))
                )
            case 4:
                if self.session in self.controller.sessions:
                    self.operator(rng.choice((m.SuspendRequest(self.session), m.ResumeRequest(self.session))))
            case 5:
                self.operator(rng.choice((m.DrainRequest(0), m.UndrainRequest(0))))
            case 6:
                if self.session in self.controller.sessions and rng.random() < 0.2:
                    self.close(self.session)
            case 7:
                self.proxy_of_victim()
            case 8:
                self.operator(m.RemoveArraysRequest("eve/a"))
            case _:
                for _ in range(3):
                    self.host_acts()

    def proxy_of_victim(self) -> None:
        if self.victim in self.controller.sessions:
            self.proxy(self.victim, m.OpenVersion(next(self.numbers), "eve/a", seconds=5.0))

    def step(self) -> None:
        self.session = self.rng.choice(self.eves)
        if self.session not in self.controller.sessions:
            try:
                begun = self.begin()
            except ValueError:  # refused: no island can accept a session now
                return
            self.eves = [begun, *(each for each in self.eves if each in self.controller.sessions)]
            return
        if self.rng.random() < 0.5:
            self.world_acts()
        if self.session not in self.controller.sessions:
            return
        message = self.message()
        if self.rng.random() < 0.06:
            message = self.mutated(message)
        self.send(message)
        if self.rng.random() < 0.7:
            self.take(self.flush())

    def receive(self, connection: int, message: Any) -> None:
        try:
            super().receive(connection, message)
        except NothingChangedError:
            raise
        except AtollError:
            self.event(e.ConnectionLost(self.now, connection, "it was refused"))


def put(spec: ArraySpec) -> Program:
    return single("put", (), HostToDevice((HostBuffer(0, spec.shape, None, None),), (spec,)), feeds=1)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def run(seed: int) -> Hostile:
    play = Hostile(seed)
    for _ in range(STEPS):
        play.step()
    play.take(play.flush())
    assert play.victim in play.controller.sessions
    play.controller.launches.validate()
    play.controller.published.reads.validate()
    play.controller.published.names.validate()
    assert contradictions(play.controller) == []
    dumped(play.controller)
    return play


@longer
@pytest.mark.parametrize("seed", range(examples(40)))
def test_the_controller_continues_whatever_a_session_sends(seed: int) -> None:
    run(seed)
