"""Hosts that find out whether functions over islands need a world. The first workers of some hosts do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.errors import OK
from atoll.ir import plan as p
from atoll.protocol import messages as m
from tests.controller.model_host import ModelHost, ModelRun
from tests.controller.play import Cluster
from tests.controller.spanning_world import SpanningHost, SpanningWorld


def is_apart(function: str) -> bool:
    """Return whether the islands of a function do not communicate. `function` is its name, which is a hash."""
    return int(function, 16) % 2 == 0


class CompilingHost(SpanningHost):
    """A host that compiles functions over islands first.

    If the islands of a function do not communicate, each runs its part by itself. If the function was compiled for a
    world, it is dropped with that world.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asking: list[str] = []  # functions that need a world, to be reported
        self.apart: set[str] = set()  # compiled functions whose islands do not communicate
        self.ready: list[str] = []  # functions of these, to be reported

    @property
    def has_report(self) -> bool:
        return bool(self.asking or self.ready) or super().has_report

    def take(self, message: Any) -> None:
        match message:
            case m.Compile(function=function, islands=islands, world=world) if islands and is_apart(function):
                if function in self.functions and function not in self.apart:
                    super().take(message)  # an earlier worker that does not compile first has compiled it
                    return
                self.functions.add(function)
                self.apart.add(function)
                if world and function not in self.world_of:
                    self.world_of[function] = world
                    self.joining.append(function)
                else:
                    self.ready.append(function)
            case m.Compile(function=function, islands=islands, world=0) if islands:
                if function in self.functions and function in self.world_of and function not in self.joining:
                    self.ready.append(function)
                else:
                    self.asking.append(function)
            case m.LoadInWorld(function=function, world=world):
                super().take(m.Compile(function, 0, 0, (), world=world))
            case m.DropFunction(function=function):
                for waiting in (self.asking, self.ready):
                    while function in waiting:
                        waiting.remove(function)
                self.apart.discard(function)
                super().take(message)
            case _:
                super().take(message)

    def close(self, message: m.CloseWorld) -> None:
        super().close(message)
        self.apart &= self.functions

    def report_next(self) -> Any:
        if self.asking:
            return m.NeedsWorld(self.asking.pop())
        if self.ready:
            function = self.ready.pop()
            return m.Compiled(function, OK, b"", 0.0, True, is_apart=function in self.apart)
        found = super().report_next()
        if type(found) is m.Compiled and found.status.ok and found.function in self.apart:
            return m.Compiled(found.function, OK, b"", 0.0, False, is_apart=True)
        return found

    def run_segment(self, state: ModelRun, segment: p.Segment, sequence: int) -> Iterator[int]:
        yield from super().run_segment(state, segment, sequence)
        called = [step.function for step in segment.steps if isinstance(step, p.Execute)]
        if sequence in self.begun_in and any(each in self.apart for each in called):
            self.begun_in[sequence] = 0


class CompilingCluster(Cluster):
    """The first workers of every third host do not compile first."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._joined: set[int] = set()
        super().__init__(*arguments, **settings)

    def compiles_first(self, host: int) -> bool:
        is_first = host not in self._joined
        self._joined.add(host)
        return not is_first or host % 3 != 2


class CompilingWorld(SpanningWorld):
    """Counts the gangs over islands that ended on an island although they had not begun on another one."""

    kind_of_cluster = CompilingCluster

    def host_of(self, number: int) -> ModelHost:
        return CompilingHost(*self.members_of(number))

    def ended(self, host: ModelHost) -> list[int]:
        """Also end gangs that are apart, when all hosts of the same island have begun them."""
        found = super().ended(host)
        assert isinstance(host, CompilingHost)
        for index, (sequence, problem) in enumerate(host.running):
            gang = self.controller.launches.in_flight.get(sequence)
            if index in found or gang is None or problem is not None or host.begun_in.get(sequence, 0):
                continue
            if gang.run.spec.is_apart or any(each in host.apart for each in gang.run.spec.functions):
                island_of = self.controller.resources.topology.island_of
                own = [each for each in gang.run.spec.hosts if island_of(each) == island_of(host.number)]
                if all(sequence in self.hosts[other].begun for other in own):
                    found.append(index)
        return found
