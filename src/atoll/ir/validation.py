"""Checks of a program definition from an untrusted sender.

`DefinitionCheck` checks a definition part by part, with bounded work per part. A session checks its own programs with
`check_definition` before it sends them. The checks cover everything that does not require lowering: counts, dtypes,
shapes, tilings, device numbers and value numbers. Errors are INVALID_ARGUMENT and start with the path of the field,
such as `nodes[3].outputs[0].dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from atoll.errors import StatusError, exhausted, invalid
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostToDevice,
    Loop,
    Node,
    Program,
    Rearrange,
    Route,
    Switch,
    Unroute,
    check_node,
    output_count,
)
from atoll.ir.types import DTYPE_BITS, ArraySpec, Even, Shape, Tiled, Uneven
from atoll.quantities import counted

# Bounds per program.
MAX_NODES = 1 << 16
MAX_VALUES = 1 << 20
MAX_EDGES = 1 << 20  # inputs and outputs of all nodes together
MAX_SHARDS = 1 << 24  # of all arguments and outputs together
MAX_ARGUMENTS = 1 << 15
MAX_FEEDS = 1 << 15
MAX_RESULTS = 1 << 14  # if a launch fails, all of them become errors in one iteration of the controller's event loop
MAX_NAME = 1 << 17  # characters

MAX_RANK = 64
MAX_ELEMENTS = 1 << 48
_MAX_TILE_DIMS = MAX_RANK + 8
_MAX_KIND = 64  # characters of a memory kind
_MAX_STRIDE = 1 << 56
_STREAMS = range(-(1 << 63), 1 << 64)  # jaxlib chooses signed numbers at random


class DefinitionCheck:
    """The state of the checks of one definition, which may use the virtual devices `devices`."""

    def __init__(self, name: str, feeds: int, devices: Collection[int]) -> None:
        if len(name) > MAX_NAME:
            raise invalid(f"name has {len(name)} characters: at most {MAX_NAME} are allowed")
        if not 0 <= feeds <= MAX_FEEDS:
            raise invalid(f"feeds is {feeds}: expected 0 to {MAX_FEEDS}")
        self.name = name
        self.feeds = feeds
        self.nodes = 0
        self.defined = 0
        self._devices = devices
        self._edges = 0
        self._shards = 0

    def arguments(self, specs: Sequence[ArraySpec]) -> None:
        """Check the arguments. Call this once, before `node`."""
        if len(specs) > MAX_ARGUMENTS:
            raise invalid(f"the program has {len(specs):,} arguments: pass at most {MAX_ARGUMENTS:,}, as larger arrays")
        self._grow(len(specs), len(specs))
        for i, spec in enumerate(specs):
            self._spec(spec, f"arguments[{i}]")
        self.defined = len(specs)

    def node(self, node: Node) -> None:
        """Check the next node."""
        path = f"nodes[{self.nodes}]"
        if self.nodes >= MAX_NODES:
            raise invalid(f"nodes has more than {MAX_NODES} entries")
        if isinstance(node, Switch | Loop):
            raise invalid(f"{path} is a {type(node).__name__}: register it with RegisterSwitch or RegisterLoop")
        self._grow(output_count(node), len(node.inputs) + len(node.outputs))
        for i, spec in enumerate(node.outputs):
            self._spec(spec, f"{path}.outputs[{i}]")
        try:
            self.defined = check_node(self.name, node, self.defined, self.feeds)
        except StatusError as error:
            raise invalid(f"{path}: {error.status.message}") from None
        match node:
            case Call():
                self._call(node, path)
            case HostToDevice():
                _host_to_device(node, path)
            case DeviceToHost():
                _device_to_host(node, path)
            case Rearrange():
                _rearrange(node, path)
            case Route() | Unroute():
                if not 1 <= node.groups <= MAX_ELEMENTS:
                    raise invalid(f"{path}.groups is {node.groups}: expected 1 to {MAX_ELEMENTS}")
        self.nodes += 1

    def _call(self, node: Call, path: str) -> None:
        self._named_devices(node.devices, f"{path}.devices")
        if not node.devices:
            raise invalid(f"{path}.devices is empty")
        if node.function < 0:
            raise invalid(f"{path}.function is {node.function}: expected 0 or more")
        if node.stream is not None and node.stream not in _STREAMS:
            raise invalid(f"{path}.stream is {node.stream}: expected {_STREAMS.start} to {_STREAMS.stop - 1}")
        for field in ("donated", "preserved"):
            positions = getattr(node, field)
            if len(set(positions)) != len(positions):
                raise invalid(f"{path}.{field} names an input twice")

    def count_arguments(self, specs: Sequence[ArraySpec]) -> None:
        """Count arguments that were checked before."""
        self._edges += len(specs)
        self._shards += sum(len(spec.sharding.devices) for spec in specs)
        self.defined = len(specs)

    def count(self, nodes: Sequence[Node]) -> None:
        """Count nodes that were checked before."""
        for node in nodes:
            self.nodes += 1
            self.defined += output_count(node)
            self._edges += len(node.inputs) + len(node.outputs)
            self._shards += sum(len(spec.sharding.devices) for spec in node.outputs)
            if isinstance(node, Call):
                self._shards += len(node.devices)

    def results(self, values: Sequence[int]) -> None:
        """Check the values that the program returns. Call this last."""
        if len(values) > MAX_RESULTS:
            raise invalid(f"the program has {len(values):,} results: return at most {MAX_RESULTS:,}, as larger arrays")
        for i, value in enumerate(values):
            if not 0 <= value < self.defined:
                raise invalid(f"results[{i}] is {value}: the program defines {self.defined} values")

    def _grow(self, values: int, edges: int) -> None:
        self._edges += edges
        if self.defined + values > MAX_VALUES:
            raise invalid(f"nodes define more than {MAX_VALUES} values")
        if self._edges > MAX_EDGES:
            raise invalid(f"nodes have more than {MAX_EDGES} inputs and outputs")

    def _named_devices(self, devices: tuple[int, ...], path: str) -> None:
        self._shards += len(devices)
        if self._shards > MAX_SHARDS:
            raise invalid(f"{path}: the program has more than {MAX_SHARDS} shards")
        known = self._devices
        if len(devices) == 1:
            if devices[0] not in known:
                raise invalid(f"{path} names device {devices[0]}, which this session does not have")
            return
        if len(set(devices)) != len(devices):
            raise invalid(f"{path} names a device twice")
        for device in devices:
            if device not in known:
                raise invalid(f"{path} names device {device}, which this session does not have")

    def _spec(self, spec: ArraySpec, path: str) -> None:
        """Raise INVALID_ARGUMENT for an invalid array type."""
        shape, sharding = spec.shape, spec.sharding
        if spec.dtype not in DTYPE_BITS:
            raise invalid(f"{path}.dtype is {spec.dtype[:40]!r}: expected one of {', '.join(DTYPE_BITS)}")
        _shape(shape, f"{path}.shape")
        devices, tiling = sharding.devices, sharding.tiling
        self._named_devices(devices, f"{path}.sharding.devices")
        if len(sharding.memory_kind) > _MAX_KIND:
            raise invalid(f"{path}.sharding.memory_kind has {len(sharding.memory_kind)} characters")
        if spec.layout is not None and sorted(spec.layout) != list(range(len(shape))):
            raise invalid(
                f"{path}.layout is {list(spec.layout[:MAX_RANK])}: expected an order of {len(shape)} dimensions"
            )
        match tiling:
            case Tiled():
                self._tiled(tiling, len(devices), len(shape), f"{path}.sharding.tiling")
            case Even():
                _shape(tiling.shard_shape, f"{path}.sharding.tiling.shard_shape")
            case Uneven():
                if len(tiling.shard_shapes) != len(devices):
                    raise invalid(
                        f"{path}.sharding.tiling has {counted(len(tiling.shard_shapes), 'shard')} for "
                        f"{counted(len(devices), 'device')}"
                    )
                for each in tiling.shard_shapes:
                    _shape(each, f"{path}.sharding.tiling.shard_shapes")

    def _tiled(self, tiling: Tiled, devices: int, rank: int, path: str) -> None:
        dims, order = tiling.dims, tiling.order
        if not rank <= len(dims) <= _MAX_TILE_DIMS or min(dims, default=1) < 1 or math.prod(dims) != devices:
            raise invalid(
                f"{path}.dims is {list(dims[:MAX_RANK])}: it does not tile {rank} dimensions for {devices} devices"
            )
        if len(order) != devices or len(set(order)) != devices or not 0 <= min(order) <= max(order) < devices:
            raise invalid(f"{path}.order is not an order of {devices} devices")


def check_definition(program: Program, devices: Collection[int]) -> None:
    """Check a whole definition. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for arrays that are too large."""
    check = DefinitionCheck(program.name, program.feeds, devices)
    check.arguments(program.arguments)
    for node in program.nodes:
        check.node(node)
    check.results(program.results)


def _host_to_device(node: HostToDevice, path: str) -> None:
    if not node.outputs or node.inputs:
        raise invalid(f"{path} makes {len(node.outputs)} arrays of host buffers: expected 1 or more")
    for i, buffer in enumerate(node.buffers):
        where = f"{path}.buffers[{i}]"
        count = len(node.outputs[buffer.output].sharding.devices)
        _shape(buffer.shape, f"{where}.shape")
        _strides(buffer.strides, buffer.shape, f"{where}.strides")
        for position in buffer.positions or ():
            if not 0 <= position < count:
                raise invalid(f"{where}.positions has {position}: the array has {counted(count, 'shard')}")


def _device_to_host(node: DeviceToHost, path: str) -> None:
    if not node.inputs:
        raise invalid(f"{path}.inputs is empty")
    if node.positions and len(node.positions) != len(node.inputs):
        raise invalid(f"{path}.positions has {len(node.positions)} entries for {counted(len(node.inputs), 'input')}")
    if node.strides is not None and (len(node.inputs) > 1 or node.positions):
        raise invalid(f"{path}.strides is set for {len(node.inputs)} arrays or shards: expected one whole array")
    if node.strides is not None and len(node.strides) > MAX_RANK:
        raise invalid(f"{path}.strides has {len(node.strides)} entries: at most {MAX_RANK} are allowed")
    if any(abs(stride) > _MAX_STRIDE for stride in node.strides or ()):
        raise invalid(f"{path}.strides has a stride of more than {_MAX_STRIDE} bytes")
    if node.outputs:
        raise invalid(f"{path}.outputs has {len(node.outputs)} entries: expected none")


def _rearrange(node: Rearrange, path: str) -> None:
    """Check that the mappings have no more shards than the outputs."""
    left = sum(len(spec.sharding.devices) for spec in node.outputs)
    for i, mapping in enumerate(node.mappings):
        left -= len(range(*mapping.target))
        if left < 0 or not len(range(*mapping.target)) == len(range(*mapping.source)):
            raise invalid(f"{path}.mappings[{i}] does not fill each shard of the outputs once")


def _shape(shape: Shape, path: str) -> None:
    if len(shape) > MAX_RANK:
        raise invalid(f"{path} has {len(shape)} dimensions: at most {MAX_RANK} are allowed")
    elements = 1
    for size in shape:
        if size < 0:
            raise invalid(f"{path} is {list(shape)}: a dimension is negative")
        elements *= size or 1  # a dimension of 0 must not hide another one that is too large
    if elements > MAX_ELEMENTS:
        raise exhausted(f"{path} is {list(shape)}: out of memory: an array has at most {MAX_ELEMENTS} elements")


def _strides(strides: tuple[int, ...] | None, shape: Shape, path: str) -> None:
    if strides is not None and (len(strides) != len(shape) or any(abs(each) > _MAX_STRIDE for each in strides)):
        raise invalid(f"{path} is {list(strides[:MAX_RANK])}: it does not fit a shape of {len(shape)} dimensions")
