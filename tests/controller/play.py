"""One session on a cluster, for tables of events in and messages out."""

from __future__ import annotations

from typing import Any

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.controller.programs.launcher import GANG_WINDOW
from atoll.errors import OK, Code, Status
from atoll.ir.program import (
    Call,
    HostBuffer,
    HostToDevice,
    Program,
    single,
)
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m

BROKEN = Status(Code.INTERNAL, "division by zero")


def joined(topology: str, **settings: Any) -> Controller:
    """A controller whose workers have all joined, without what it told them."""
    parsed = Topology.parse(topology)
    controller = Controller(parsed, ClusterSettings(topology, **settings))
    for host in range(parsed.host_count):
        controller.worker_joined(ready(parsed, host, f"unix:/data-{host}"), 1000 + host)
    controller.take_outbox()
    return controller


def ready(topology: Topology, host: int, address: str) -> m.WorkerReady:
    devices = tuple(
        m.DeviceInfo(i, "null", "cpu", ("device",), "device", (i, 0, 0), 0, i, 0) for i in range(topology.devices)
    )
    return m.WorkerReady(topology.island_of(host), host, devices, "cpu", "1", address, GANG_WINDOW)


class Play:
    """One session on a cluster, for tables: `tell` gives what one event makes the controller say."""

    def __init__(self, topology: str = "1x1x2", **settings: Any) -> None:
        self.controller = joined(topology, **settings)
        self.session = self.controller.open_session(42, "script.py").number
        self.controller.take_outbox()

    def say(self, message: Any) -> list[Any]:
        """The session's proxy sends; the answer without destinations."""
        self.controller.from_proxy(self.session, message)
        return self.outbox()

    def hear(self, host: int, message: Any) -> list[Any]:
        """A worker sends."""
        self.controller.from_worker(host, message)
        return self.outbox()

    def outbox(self) -> list[Any]:
        return [message for _, message in self.controller.take_outbox()]

    def sent(self) -> list[tuple[tuple[str, int], Any]]:
        return self.controller.take_outbox()

    def done(self, *sequences: int, host: int = 0) -> list[Any]:
        return self.hear(host, m.Done(tuple((sequence, 0, 1) for sequence in sequences)))

    def join_again(self, *hosts: int) -> list[Any]:
        """Workers that were started anew join."""
        for host in hosts:
            again = ready(self.controller.resources.topology, host, f"unix:/data-{host}-again")
            self.controller.worker_joined(again, 2000 + host)
        return self.outbox()

    # ---- programs, under fixed numbers

    def with_function(self, function: int = 1, devices: tuple[int, ...] = (0,)) -> str:
        """A compiled function; its name."""
        self.say(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
        hosts = sorted({self.controller.sessions[self.session].devices.locations[d].host for d in devices})
        for host in hosts:
            for message in self.hear(host, m.FeedsArrived(self.session, (900 + function,))):
                self.hear(host, m.Compiled(message.function, OK, b"info", 0.1, False))
        return self.controller.sessions[self.session].functions[function]

    def with_call(self, program: int = 1, *, name: str = "f", arguments: int = 1, **options: Any) -> int:
        """A program that calls function 1 on device 0; its plan's number."""
        if 1 not in self.controller.sessions[self.session].functions:
            self.with_function()
        call = Call(1, tuple(range(arguments)), (on(0),), (0,), **options)
        (keep,) = self.say(m.RegisterProgram(program, single(name, (on(0),) * arguments, call)))
        return int(keep.plan)

    def with_put(self, program: int = 2, device: int = 0) -> None:
        buffer = HostBuffer(0, (2,), None, None)
        body = single("put", (), HostToDevice((buffer,), (on(device),)), feeds=1)
        self.say(m.RegisterProgram(program, body))

    def array(self, handle: int, device: int = 0) -> None:
        """An array that is there, by way of program 2."""
        if 2 not in self.controller.sessions[self.session].programs:
            self.with_put()
        feed = 10_000 + handle
        self.hear(0, m.FeedsArrived(self.session, (feed,)))
        (run,) = self.say(m.Launch(2, (), (handle,), (feed,)))
        self.done(run.sequence)


def on(*devices: int) -> ArraySpec:
    return ArraySpec("float32", (2,), Sharding(devices))


def runs(messages: list[Any]) -> list[m.Run]:
    return [message for message in messages if isinstance(message, m.Run)]


def chain_of(length: int) -> Program:
    """Calls of function 1 on device 0, each on what the one before made."""
    nodes = tuple(Call(1, (i,), (on(0),), (0,)) for i in range(length))
    return Program("chain", (on(0),), nodes, (length,))
