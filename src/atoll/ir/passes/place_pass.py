"""Placement of programs: virtual devices are replaced by physical ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import Attribute, Block, Region, SSAValue

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.errors import StatusError, invalid, unimplemented
from atoll.ir.dialect.attributes import ArrayType, DeviceLocations, PlacedCompletionType, PlacedType
from atoll.ir.dialect.ops import CallOp, GetOp, ProgramOp, RearrangeOp
from atoll.ir.dismantling import dismantled
from atoll.ir.geometry import Located
from atoll.ir.passes.lowering_pass import LoweringPass
from atoll.ir.steps import Steps, freed
from atoll.ir.types import Replicated


@dataclass(frozen=True)
class PlacePass(LoweringPass):
    """Replaces virtual devices by their locations in `placement`.

    Input: programs on virtual devices. Guarantees: every array is `!atoll.placed`, every call has locations, and every
    completion has hosts. The ops and their order do not change.

    Raises INVALID_ARGUMENT for a virtual device without a location, and for a rearrangement that would move shards.
    Raises UNIMPLEMENTED for fetching an array with parts on several hosts.
    """

    name = "atoll-place"

    def steps(self, program: ProgramOp) -> Steps[None]:
        return _Placing(program, self.placement).steps()


class _Placing:
    def __init__(self, program: ProgramOp, placement: Placement) -> None:
        self.program = program
        self.name = program.sym_name.data
        self.placement = placement
        self.types: dict[ArrayType, PlacedType] = {}
        self.by_identity: dict[int, PlacedType] = {}  # a faster lookup for types that are the same object
        self.locations: dict[tuple[int, ...], DeviceLocations] = {}
        self.islands: dict[DeviceLocations, int] = {}

    def steps(self) -> Steps[None]:
        old = self.program.body.block
        new = Block(arg_types=[self.placed(argument.type) for argument in old.args])
        values: dict[SSAValue, SSAValue] = dict(zip(old.args, new.args, strict=True))
        try:
            yield from self._place(old, new, values)
        except StatusError:
            yield from freed(values)
            yield from dismantled(new)
            raise
        region = self.program.detach_region(self.program.body)
        region.detach_block(old)
        self.program.add_region(Region(new))
        yield from dismantled(old, values)
        yield from freed(self.types)

    def _place(self, old: Block, new: Block, values: dict[SSAValue, SSAValue]) -> Steps[None]:
        for op in old.ops:
            operands = [values[operand] for operand in op.operands]
            properties = op.properties
            completion: tuple[int, ...] = ()
            match op:
                case CallOp(devices=devices) if devices is not None:
                    locations = self.call_locations(devices.data)
                    completion = tuple(sorted({location.host for location in locations.data}))
                    properties = {**properties, "locations": locations}
                    del properties["devices"]
                case GetOp():
                    completion = (self.fetched_from(operands[0].type),)
            types: list[Attribute] = [
                self.placed(result.type) if isinstance(result.type, ArrayType) else PlacedCompletionType(completion)
                for result in op.results
            ]
            placed = type(op).create(operands=operands, result_types=types, properties=properties)
            if isinstance(placed, RearrangeOp):
                self.check_rearrangement(placed)
            new.add_op(placed)
            values.update(zip(op.results, placed.results, strict=True))
            yield

    def location(self, device: int) -> DeviceLocation:
        location = self.placement.get(device)
        if location is None:
            raise invalid(f"{self.name!r} names device {device}, which this session does not have")
        return location

    def placed(self, array: Attribute) -> PlacedType:
        found = self.by_identity.get(id(array))
        if found is None:
            assert isinstance(array, ArrayType)
            found = self.types.get(array)
            if found is None:
                spec = array.data
                locations = tuple(map(self.location, spec.sharding.devices))
                found = self.types[array] = PlacedType(Located(spec, locations))
            self.by_identity[id(array)] = found
        return found

    def call_locations(self, devices: tuple[int, ...]) -> DeviceLocations:
        found = self.locations.get(devices)
        if found is None:
            if not devices:
                raise invalid(f"{self.name!r} calls a function on no devices")
            found = self.locations[devices] = DeviceLocations(tuple(map(self.location, devices)))
        return found

    def fetched_from(self, array: Attribute) -> int:
        """Return the host that sends the array to the client."""
        assert isinstance(array, PlacedType)
        located = array.data
        if isinstance(located.spec.sharding.tiling, Replicated):
            return located.locations[0].host
        if len(located.hosts) != 1:
            raise unimplemented("fetch an array on several hosts shard by shard, as jax.device_get does")
        return located.hosts[0]

    def check_rearrangement(self, op: RearrangeOp) -> None:
        for result, sources in zip(op.results, op.sources(), strict=True):
            for location, (which, origin) in zip(_locations(result), sources, strict=True):
                if _locations(op.operands[which])[origin] != location:
                    raise invalid("a rearrangement cannot move shards to another device")


def _locations(value: SSAValue) -> Sequence[DeviceLocation]:
    assert isinstance(value.type, PlacedType)
    return value.type.data.locations
