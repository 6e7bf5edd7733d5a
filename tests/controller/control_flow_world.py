"""Random clients whose programs contain control flow, and their world."""

from __future__ import annotations

from typing import Any

from atoll.ir.program import (
    Call,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Report,
    Transfer,
    single,
)
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from tests.controller.world import Client, World


def number_on(device: int) -> ArraySpec:
    return ArraySpec("int32", (), Sharding((device,)))


def view(value: int, spec: ArraySpec) -> Rearrange:
    whole = (0, len(spec.sharding.devices), 1)
    return Rearrange((value,), (spec,), (Mapping(0, 0, whole, whole),))


class ChoosingClient(Client):
    """Client that also holds numbers, and launches switches and loops that depend on them.

    The world chooses the values that hosts report.
    """

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.numbers: dict[int, ArraySpec] = {}

    def release(self, handle: int | None = None) -> None:
        before = set(self.unreleased)
        super().release(handle)
        for gone in before - self.unreleased:
            self.numbers.pop(gone, None)

    def put_number(self) -> None:
        locations = self.world.controller.sessions[self.number].devices.locations
        device = self.rng.choice(sorted(locations))
        spec = number_on(device)
        body = single(self.name("number"), (), HostToDevice((HostBuffer(0, (), None, None),), (spec,)), feeds=1)
        feed = self.fresh()
        self.uploads.append((locations[device].host, feed))
        (handle,) = self.launch(body, (), (feed,))
        self.numbers[handle] = spec

    def new_program(self, body: Program) -> int:
        number = self.fresh()
        self.send(m.RegisterProgram(number, body))
        return number

    def launch_node(self, node: Any, arguments: tuple[int, ...], results: int, names: set[str]) -> list[int]:
        """Launch a node of a program that may fail, and either release its programs at once or keep them."""
        self.send(node)
        handles = [self.fresh() for _ in range(results)]
        self.send(m.Launch(node.program, arguments, tuple(handles), ()))
        self.launched += 1
        doomed = {name for name in names if "doomed" in name}
        tainted = set().union(*(self.taint[each] for each in arguments))
        maybe = set().union(*(self.maybe[each] for each in arguments))
        for handle in handles:
            self.taint[handle], self.maybe[handle] = set(), tainted | maybe | doomed
            self.unreleased.add(handle)
        if self.rng.random() < 0.5:
            parts = (
                (node.index, *node.branches)
                if isinstance(node, m.RegisterSwitch)
                else tuple({node.first, node.begins, node.following, node.last})
            )
            for each in (node.program, *sorted(parts)):
                self.send(m.ReleaseProgram(each))
        return handles

    def switch(self) -> None:
        handle = self.some_array()
        if handle is None or not self.numbers:
            return
        number = self.rng.choice(sorted(self.numbers))
        spec, target = self.arrays[handle], self.island_spec()
        index = self.new_program(Program("index", (self.numbers[number],), (Report((0,)),), ()))
        branches, names = [], set()
        for _ in range(self.rng.randint(1, 3)):
            nodes: list[Any] = []
            value, here = 0, spec
            for there in [self.island_spec() for _ in range(self.rng.randint(0, 2))] + [target]:
                nodes.append(Transfer((value,), (there,), False, reshard=True))
                value += 1
                devices = there.sharding.devices
                if self.rng.random() < 0.7 and self.has_function(devices):
                    nodes.append(Call(self.function(devices), (value,), (there,), devices))
                    value += 1
                here = there
            assert here == target
            name = self.name("branch")
            names.add(name)
            branches.append(self.new_program(Program(name, (spec,), tuple(nodes), (value,))))
        node = m.RegisterSwitch(self.fresh(), index, tuple(branches))
        (result,) = self.launch_node(node, (number, handle), 1, names)
        self.arrays[result] = target

    def loop(self) -> None:
        fitting = [h for h, spec in self.arrays.items() if self.is_on_one_island(spec)]
        if not fitting or not self.numbers:
            return
        handle, number = self.rng.choice(fitting), self.rng.choice(sorted(self.numbers))
        spec, count = self.arrays[handle], self.numbers[number]
        if not all(self.has_function(each.sharding.devices) for each in (spec, count)):
            return
        (constant, constants) = (self.some_array(), 1) if self.rng.random() < 0.5 else (None, 0)
        arguments = (spec, count) if constant is None else (self.arrays[constant], spec, count)
        at = len(arguments) - 2
        name = self.name("body")
        first = self.new_program(Program("first", arguments, (Report((at + 1,)),), ()))
        devices, one = spec.sharding.devices, count.sharding.devices

        def body(donated: tuple[int, ...]) -> int:
            nodes = (
                Call(self.function(devices), (at,), (spec,), devices, donated),
                Call(self.function(one), (at + 1,), (count,), one, donated),
                Report((at + 3,)),
            )
            return self.new_program(Program(name, arguments, nodes, (at + 2, at + 3)))

        begins = body(())
        following = body((0,)) if self.rng.random() < 0.5 else begins
        last = self.new_program(Program("last", (spec, count), (view(0, spec), view(1, count)), (2, 3)))
        node = m.RegisterLoop(self.fresh(), constants, first, begins, following, last)
        given = (handle, number) if constant is None else (constant, handle, number)
        result, counted = self.launch_node(node, given, 2, {name})
        self.arrays[result] = spec
        self.numbers[counted] = count

    def is_on_one_island(self, spec: ArraySpec) -> bool:
        locations = self.world.controller.sessions[self.number].devices.locations
        return len({locations[device].island for device in spec.sharding.devices}) == 1

    def act(self) -> None:
        if self.rng.random() < 0.4:
            self.rng.choice([self.put_number, self.switch, self.loop])()
        else:
            super().act()


class ChoosingWorld(World):
    kind_of_client = ChoosingClient
