"""Random clients whose functions run on several islands, and the model hosts that form worlds for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

from atoll.errors import OK, Code, Status
from atoll.ir import plan as p
from atoll.ir.types import ArraySpec
from atoll.protocol import messages as m
from atoll.state.compiled_functions import hosts_of
from tests.controller.model_host import ModelHost, ModelRun
from tests.controller.world import Client, World

_BROKEN = Status(Code.UNKNOWN, "the connections of the world were closed")
CANNOT_JOIN = Status(Code.DATA_LOSS, "this host cannot join the world")


class SpanningHost(ModelHost):
    """Model host that joins worlds.

    A function of a world is compiled when all hosts of the world have joined. A run of it ends when it has begun on all
    hosts of the same world, or fails when the world is closed. If `joins` returns False, the host cannot join a world.
    """

    def __init__(
        self,
        number: int,
        members: dict[int, set[int]],
        note_sent: Callable[[int], None],
        note_begin: Callable[[int], None],
        joins: Callable[[], bool],
    ) -> None:
        super().__init__(number)
        self.joins = joins
        self.refused: deque[int] = deque()  # worlds that it cannot join, to be reported
        self.note_sent = note_sent  # of a sequence
        self.note_begin = note_begin  # of a collective
        self.members = members  # hosts that have joined, by world
        self.ranks: dict[int, int] = {}  # worlds that this host is in or joins
        self.served: deque[int] = deque()  # worlds to report
        self.world_of: dict[str, int] = {}  # by function
        self.joining: list[str] = []  # functions that wait for their world
        self.moving: set[str] = set()  # functions that wait for the next version of their world
        self.failed: list[tuple[str, Status]] = []  # functions to report
        self.begun_in: dict[int, int] = {}  # worlds, by sequence
        self.broken: set[int] = set()  # sequences of collectives that fail because their world was closed

    def finish(self, index: int) -> Any:
        sequence, problem = self.running[index]
        self.running[index] = sequence, _BROKEN if sequence in self.broken else problem
        return super().finish(index)

    @property
    def has_report(self) -> bool:
        """Return whether `report_next` has something."""
        return bool(self.refused or self.served or self.failed or any(map(self.has_joined, self.joining)))

    def has_joined(self, function: str) -> bool:
        world = self.world_of[function]
        return len(self.members.get(world, ())) == self.ranks.get(world, -1)

    def take(self, message: Any) -> None:
        match message:
            case m.Compile(function=function, world=world) if function in self.joining:
                self.world_of[function] = world
            case m.Compile(function=function, world=world) if world:
                self.functions.add(function)
                self.world_of[function] = world
                self.joining.append(function)
            case m.JoinWorld(world=world) if not self.joins():
                self.refused.append(world)
            case m.JoinWorld(world=world, ranks=ranks, address=address):
                self.ranks[world] = ranks
                self.members.setdefault(world, set()).add(self.number)
                if not address:
                    self.served.append(world)
                self.go_on()
            case m.CloseWorld():
                self.close(message)
                self.go_on()
            case m.DropFunction(function=function) if function in self.joining:
                self.joining.remove(function)
                super().take(message)
            case m.Run(sequence=sequence):
                self.note_sent(sequence)
                super().take(message)
            case m.Dispatch(units=units):
                for sequence, _ in units:
                    self.note_sent(sequence)
                super().take(message)
            case _:
                super().take(message)

    def close(self, message: m.CloseWorld) -> None:
        self.ranks.pop(message.world, None)
        self.members.get(message.world, set()).discard(self.number)
        for function in [name for name, world in self.world_of.items() if world == message.world]:
            if function in self.joining:
                self.joining.remove(function)
                self.failed.append((function, message.status))
                self.functions.discard(function)
            elif message.successor and function in self.functions:
                self.world_of[function] = message.successor
                self.moving.add(function)
                continue
            self.functions.discard(function)
            self.moving.discard(function)
            del self.world_of[function]

    def report_next(self) -> Any:
        """Return the next report about worlds, or None."""
        if self.refused:
            return m.WorldFailed(self.refused.popleft(), CANNOT_JOIN)
        if self.served:
            return m.WorldServed(self.served.popleft(), f"unix:/world-of-{self.number}")
        if self.failed:
            function, status = self.failed.pop()
            return m.Compiled(function, status, b"", 0.0, False)
        for function in filter(self.has_joined, self.joining):
            self.joining.remove(function)
            return m.Compiled(function, OK, b"", 0.0, False)
        return None

    def run_segment(self, state: ModelRun, segment: p.Segment, sequence: int) -> Iterator[int]:
        """Also wait while a function of the segment moves to another world, and fail if the function has lost its
        world.
        """
        called = [step.function for step in segment.steps if isinstance(step, p.Execute)]
        if segment.collective and called:
            while state.problem is None and self.collective[0] != sequence:
                yield -1
            for function in called:
                while function in self.moving and not self.has_joined(function):
                    yield -1
                self.moving.discard(function)
                if function not in self.functions:
                    state.problem = state.problem or Status(Code.NOT_FOUND, f"function {function} is not on this host")
        yield from super().run_segment(state, segment, sequence)
        if segment.collective and called and state.problem is None:
            self.begun_in[sequence] = self.world_of.get(called[0], 0)
            self.note_begin(sequence)


class SpanningClient(Client):
    """Client that calls functions on devices of any islands, and sends their sources again to all of their hosts."""

    def island_spec(self) -> ArraySpec:
        return self.spec()

    def has_function(self, devices: tuple[int, ...]) -> bool:
        locations = self.world.controller.sessions[self.number].devices.locations
        return devices in self.functions or not {locations[each].island for each in devices} & self.world.down

    def handle(self, message: Any) -> None:
        match message:
            case m.FunctionReady(function=function, status=status) if not status.ok:
                self.functions = {devices: each for devices, each in self.functions.items() if each != function}
            case m.SendSources(functions=functions):
                for function, hosts in functions:
                    if function in self.functions.values():
                        feed = self.fresh()
                        self.send(m.Recompile(function, feed))
                        self.uploads.extend((host, feed) for host in hosts)
            case m.HostsRestarted(hosts=addresses):
                back = {host for host, _ in addresses}
                self.lost -= back
                locations = self.world.controller.sessions[self.number].devices.locations
                for devices, function in self.functions.items():
                    hosts = {locations[device].host for device in devices}
                    if hosts & back:
                        feed = self.fresh()
                        self.send(m.Recompile(function, feed))
                        self.uploads.extend((host, feed) for host in sorted(hosts))
            case _:
                super().handle(message)


class SpanningWorld(World):
    """Records on each host in which order the collectives begin.

    A host cannot join a world with the probability `refusals`.
    """

    kind_of_client = SpanningClient

    def __init__(self, *arguments: Any, refusals: float = 0.0, **settings: Any) -> None:
        self.refusals = refusals
        self.members: dict[int, set[int]] = {}
        # The number of a gang's node and the node's gangs as (sequence, hosts), by the sequence of the gang.
        self.nodes: dict[int, tuple[int, list[tuple[int, tuple[int, ...]]]]] = {}
        self.orders: list[list[int]] = []  # numbers of nodes, by incarnation of a host
        super().__init__(*arguments, **settings)

    def host_of(self, number: int) -> ModelHost:
        return SpanningHost(*self.members_of(number))

    def members_of(self, number: int) -> tuple[Any, ...]:
        """Return the arguments of a `SpanningHost`."""
        order: list[int] = []
        self.orders.append(order)
        for each in self.members.values():
            each.discard(number)

        def note_sent(sequence: int) -> None:
            gang = self.controller.launches.in_flight.get(sequence)
            if gang is not None:
                gangs = [(each.sequence, each.run.spec.hosts) for each in gang.node.gangs]
                self.nodes[sequence] = gang.node.number, gangs

        def note_begin(sequence: int) -> None:
            node, _ = self.nodes[sequence]
            assert node not in order, "each gang begins once"
            order.append(node)

        def joins() -> bool:
            is_refused = bool(self.refusals) and self.rng.random() < self.refusals
            self.has_lost = self.has_lost or is_refused
            return not is_refused

        return number, self.members, note_sent, note_begin, joins

    def compile(self, session: int, function: int, feed: int) -> None:
        name = self.controller.sessions[session].functions[function]
        hosts = sorted(hosts_of(self.controller.functions.locations[name]))
        if len({self.controller.resources.hosts[host].island for host in hosts}) == 1:
            super().compile(session, function, feed)
        else:
            for host in hosts:
                self.cluster.worker(host, m.FeedsArrived(session, (feed,)))
            self.deliver()
            while self.report_worlds():
                pass

    def ended(self, host: ModelHost) -> list[int]:
        assert isinstance(host, SpanningHost)
        found = [index for index in super().ended(host) if not host.begun_in.get(host.running[index][0])]
        for index, (sequence, _) in enumerate(host.running):
            world = host.begun_in.get(sequence, 0)
            if not world:
                continue
            peers = [(self.hosts[each], number) for number, hosts in self.nodes[sequence][1] for each in hosts]
            if all(isinstance(peer, SpanningHost) and peer.begun_in.get(each) == world for peer, each in peers):
                found.append(index)
            elif world not in host.ranks:
                host.broken.add(sequence)
                found.append(index)
        return found

    def work(self) -> bool:
        is_about_worlds = self.rng.random() < 0.5 and self.report_worlds()
        return is_about_worlds or super().work() or self.report_worlds()

    def report_worlds(self) -> bool:
        """Let a host report about a world or its functions. Return whether any host had a report."""
        hosts = [host for host in self.hosts.values() if isinstance(host, SpanningHost) and host.has_report]
        if hosts:
            host = self.rng.choice(hosts)
            self.groups[host.number].report(host.report_next())
            self.deliver()
        return bool(hosts)

    def check_orders(self) -> None:
        """Fail if hosts began the collectives in contradictory orders."""
        before: dict[int, set[int]] = {}
        for order in self.orders:
            for one, other in pairwise(order):
                before.setdefault(other, set()).add(one)
        TopologicalSorter(before).prepare()  # raises CycleError
