"""Placement of programs: the locations of their virtual devices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.errors import invalid, unimplemented
from atoll.ir.geometry import Located
from atoll.ir.node_types import shard_sources
from atoll.ir.program import Call, DeviceToHost, Program, Rearrange
from atoll.ir.steps import Steps
from atoll.ir.types import ArraySpec, Replicated

Hosts = tuple[int, ...]


class PlacedProgram(msgspec.Struct, frozen=True):
    """A program and the locations of its arrays and calls."""

    program: Program
    values: list[Located | Hosts]  # per value; for a completion, the hosts that report it
    hosts_of: dict[tuple[int, ...], Hosts]  # the hosts of calls, by their virtual devices
    island_of: dict[int, int]  # by host

    def arrays(self, values: Sequence[int]) -> list[Located]:
        """Return the locations of values that are arrays."""
        return [each for value in values if isinstance(each := self.values[value], Located)]


def place(program: Program, placement: Placement) -> Steps[PlacedProgram]:
    """Look up the location of each virtual device in `placement`.

    Raises INVALID_ARGUMENT for a virtual device without a location, a call on no devices, and a rearrangement that
    would move shards. Raises UNIMPLEMENTED for fetching an array with parts on several hosts.
    """
    placing = _Placing(program.name, placement)
    values: list[Located | Hosts] = [placing.array(spec) for spec in program.arguments]
    placed = PlacedProgram(program, values, placing.hosts_of, placing.island_of)
    for node in program.nodes:
        outputs = [placing.array(spec) for spec in node.outputs]
        values.extend(outputs)
        match node:
            case Call():
                hosts = placing.call(node.devices)
                if node.completion:
                    values.append(tuple(sorted(hosts)))
            case DeviceToHost():
                values.append((_fetched_together(placed.arrays(node.inputs), node.positions),))
            case Rearrange():
                _check_rearrangement(node, placed.arrays(node.inputs), outputs)
        yield
    return placed


class _Placing:
    """The locations that are known so far: most nodes of a program have the same types and devices."""

    def __init__(self, name: str, placement: Placement) -> None:
        self.name = name
        self.placement = placement
        self.arrays: dict[ArraySpec, Located] = {}
        self.hosts_of: dict[tuple[int, ...], Hosts] = {}
        self.island_of: dict[int, int] = {}

    def location(self, device: int) -> DeviceLocation:
        location = self.placement.get(device)
        if location is None:
            raise invalid(f"{self.name!r} names device {device}, which this session does not have")
        self.island_of[location.host] = location.island
        return location

    def array(self, spec: ArraySpec) -> Located:
        found = self.arrays.get(spec)
        if found is None:
            locations = tuple(map(self.location, spec.sharding.devices))
            found = self.arrays[spec] = Located(spec, locations)
        return found

    def call(self, devices: tuple[int, ...]) -> Hosts:
        found = self.hosts_of.get(devices)
        if found is None:
            if not devices:
                raise invalid(f"{self.name!r} calls a function on no devices")
            locations = [self.location(device) for device in devices]
            found = self.hosts_of[devices] = tuple(dict.fromkeys(location.host for location in locations))
        return found


def _fetched_together(arrays: Sequence[Located], positions: Sequence[int]) -> int:
    """Return the host that sends all arrays to the client or, with `positions`, one shard of each."""
    if positions:
        hosts = {array.locations[position].host for array, position in zip(arrays, positions, strict=True)}
    else:
        hosts = {_fetched_from(array) for array in arrays}
    if len(hosts) > 1:
        raise invalid(f"arrays that are read together must be on one host, but these are on {len(hosts)} hosts")
    return hosts.pop()


def _fetched_from(array: Located) -> int:
    """Return the host that sends the array to the client."""
    if isinstance(array.spec.sharding.tiling, Replicated):
        return array.locations[0].host
    if len(array.hosts) != 1:
        raise unimplemented("fetch an array on several hosts shard by shard, as jax.device_get does")
    return array.hosts[0]


def _check_rearrangement(node: Rearrange, inputs: list[Located], outputs: list[Located]) -> None:
    sources = shard_sources(node, [len(each.locations) for each in inputs])
    for output, origins in zip(outputs, sources, strict=True):
        for location, (index, position) in zip(output.locations, origins, strict=True):
            if inputs[index].locations[position] != location:
                raise invalid("a rearrangement cannot move shards to another device")
