"""Checks of nodes against the types of their inputs, after `program.check_node`."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import StatusError, invalid
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostToDevice,
    Loop,
    Node,
    Program,
    Rearrange,
    Report,
    Route,
    Switch,
    Transfer,
    Unroute,
    specs_of,
)
from atoll.ir.row_exchange import check_route
from atoll.ir.steps import Steps
from atoll.ir.types import DTYPE_BITS, NUMBERS, ArraySpec, Replicated, nbytes
from atoll.quantities import counted


def check_types_in_steps(program: Program) -> Steps[None]:
    """Raise INVALID_ARGUMENT for a program that cannot run on any devices."""
    types: list[ArraySpec | None] = list(program.arguments)
    for node in program.nodes:
        try:
            _check(node, [types[value] for value in node.inputs])
        except StatusError as error:
            raise invalid(f"{program.name!r}: {error.status.message}") from None
        types.extend(specs_of(node))
        yield


def shard_sources(node: Rearrange, counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the (input, position) of each shard of each output. `counts` are the numbers of shards of the inputs.

    Raises INVALID_ARGUMENT if the mappings do not fill each output's shards exactly once.
    """
    sources: list[dict[int, tuple[int, int]]] = [{} for _ in node.outputs]
    for mapping in node.mappings:
        taken, given = range(*mapping.source), range(*mapping.target)
        if len(taken) != len(given):
            raise invalid(f"a mapping takes {counted(len(taken), 'shard')} and returns {len(given)}")
        into = sources[mapping.output]
        for source, target in zip(taken, given, strict=True):
            if not 0 <= source < counts[mapping.input] or target in into:
                raise invalid("a mapping has a shard that does not exist, or a target shard twice")
            into[target] = (mapping.input, source)
    for spec, into in zip(node.outputs, sources, strict=True):
        if into.keys() != set(range(len(spec.sharding.devices))):
            raise invalid("the mappings do not fill each output's shards exactly once")
    return [[into[i] for i in range(len(into))] for into in sources]


def _check(node: Node, types: list[ArraySpec | None]) -> None:
    inputs = [each for each in types if each is not None]
    if len(inputs) != len(types):
        raise invalid("expected an array, not the completion of a call")
    match node:
        case Transfer():
            for source, target in zip(inputs, node.outputs, strict=True):
                _check_transfer(source, target, node.reshard)
        case HostToDevice():
            _check_host_buffers(node)
        case Rearrange():
            shard_sources(node, [len(spec.sharding.devices) for spec in inputs])
        case Route() | Unroute():
            check_route(tuple(inputs), node.outputs, node.groups, is_back=isinstance(node, Unroute))
        case Report():
            (spec,) = inputs
            if spec.shape or spec.dtype not in NUMBERS or not isinstance(spec.sharding.tiling, Replicated):
                raise invalid(
                    f"a switch or loop is controlled by one integer or boolean, not by {spec.dtype}{list(spec.shape)}"
                )
            if not spec.sharding.devices:
                raise invalid("a switch or loop is controlled by a number on a device, and this one is on none")
        case Switch() | Loop():
            raise invalid("control flow nodes must be split into launches before lowering")
        case DeviceToHost():
            for spec, position in zip(inputs, node.positions, strict=False):
                if not 0 <= position < len(spec.sharding.devices):
                    raise invalid(f"shard {position} of an array of {len(spec.sharding.devices)} shards cannot be read")
        case Call():
            pass  # the compiled function checks its arguments


def _check_transfer(source: ArraySpec, target: ArraySpec, reshard: bool) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise invalid(f"a transfer cannot change {source.dtype}{source.shape} to {target.dtype}{target.shape}")
    before, after = len(source.sharding.devices), len(target.sharding.devices)
    if not reshard and before != after:
        raise invalid(f"an array on {before} devices cannot be copied shard by shard to {after}")


def _check_shared_buffer(node: HostToDevice) -> None:
    (buffer,) = node.buffers
    if any(len(spec.sharding.devices) != 1 or DTYPE_BITS[spec.dtype] % 8 for spec in node.outputs):
        raise invalid("arrays that are made of one host buffer must be on one device and consist of whole bytes")
    if buffer.strides is not None or buffer.positions is not None or buffer.shape != (sum(map(nbytes, node.outputs)),):
        raise invalid("a host buffer for several arrays must have the shape of their bytes")


def _check_host_buffers(node: HostToDevice) -> None:
    if len(node.outputs) > 1 and len(node.buffers) == 1:
        _check_shared_buffer(node)
        return
    times = [[0] * len(spec.sharding.devices) for spec in node.outputs]
    for buffer in node.buffers:
        of_output = times[buffer.output]
        for position in range(len(of_output)) if buffer.positions is None else buffer.positions:
            if 0 <= position < len(of_output):
                of_output[position] += 1
    if any(each != 1 for of_output in times for each in of_output):
        raise invalid("the host buffers do not fill each shard exactly once")
