"""`atoll.route` and `atoll.unroute`: send rows to experts on other devices and back. Devices compute the destinations.

This is the sparse exchange of the paper (sections 4.3 and 6.3). The capacity, as in GShard (Lepikhin et al., 2020) and
the Switch Transformer (Fedus et al., 2021), is the number of rows that a destination takes. Only actual rows are sent,
not unused capacity.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from atoll.client import backend
from atoll.client import jax_internals as internals
from atoll.errors import ProgramError
from atoll.programs.meshes import mesh_of
from atoll.programs.program_tracing import ProgramTracer
from atoll.programs.row_order import Layout, combine, in_order
from atoll.programs.row_transfers import Paths, route_in_order, unroute_rows
from atoll.programs.traced_program import Program
from atoll.programs.transformations import NeedsPlaces
from atoll.quantities import counted

internals.leave_out_of_tracebacks(__file__)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("by_group", "outside", "sizes", "spans", "positions", "order", "kept"),
    meta_fields=("_paths", "_layout", "_shape"),
)
@dataclass(frozen=True)
class Routing:
    """The result of `atoll.route` that `atoll.unroute` needs, as a pytree of arrays.

    A group consists of the rows of one shard.
    """

    by_group: Any  # int32 [groups, destinations]: choices beyond the capacity
    outside: Any  # int32 [groups]: choices without a destination
    sizes: Any  # int32 [groups, destinations]: rows that were sent
    spans: tuple[Any, ...]  # per block, int32 [groups, 2]: first position and count of its rows
    positions: Any  # int32 [n, k]: position of each choice among the sent rows of its group, or -1
    order: Any  # int32: the choice at each of these positions
    kept: Any  # the rows, if overflow="keep"
    _paths: Paths = field(repr=False)
    _layout: Layout = field(repr=False)
    _shape: tuple[int, ...] = field(repr=False)  # shape of the destinations

    @property
    def dropped(self) -> Any:
        """Number of choices beyond the capacity: int32 [destinations]."""
        return self.by_group.sum(0)

    @property
    def out_of_range(self) -> Any:
        """Number of choices without a destination: an int32."""
        return self.outside.sum()


def route(
    rows: Any, destinations: Any, to: Sequence[Any], *, capacity: int, overflow: Literal["drop", "keep"] = "drop"
) -> tuple[tuple[Any, ...], Routing]:
    """Send rows of an array to the destinations that a device computes. For example, with experts on other islands::

        blocks, routing = atoll.route(tokens, experts, to=slices, capacity=512)   # tokens [n, d], experts int [n, 2]
        blocks = [expert(p, block) for p, block in zip(parameters, blocks)]         # each block [512, d], on its slice
        tokens = atoll.unroute(blocks, routing, weights)                            # weights [n, 2]

    The call does not wait. Only actual rows are sent between islands; each host sends each other host one message with
    the counts, however many devices they have. `route` works inside and outside `atoll.program`, and has derivatives of
    any order: its transpose is `unroute`.

    Args:
      rows: Array [n, ...] of any dtype except strings. If the first dimension is sharded, the rows of each shard are a
        group, which is sorted on its own devices.
      destinations: Integers [n], or [n, k] if each row has k destinations. Numbers outside 0 to len(to) - 1, such as
        -1, are no destination: the row is not sent for them.
      to: For each destination a `jax.sharding.Sharding` of its block, or a mesh, a slice, a list of devices or a
        device. On a mesh, the block is sharded along the mesh's first axis.
      capacity: Number of rows that a destination takes. Each group has an equal part of it. Beyond the capacity,
        choices with lower k have precedence, then rows with lower numbers. The destination reserves memory for all of
        it.
      overflow: Result in `unroute` of a choice beyond the capacity or without a destination: zeros for "drop", the row
        itself for "keep". `Routing` counts these choices (`dropped`, `out_of_range`).

    Returns the blocks, one [capacity, ...] per destination, and a `Routing`. A block has `capacity / groups` places for
    each group: the received rows, ordered by choice and number, followed by zeros.

    Raise ValueError or TypeError for invalid arguments, and `atoll.ProgramError` under `jax.jit`.
    """
    rows, layout = _rows(rows)
    destinations, choices = _destinations(destinations, rows)
    paths = _paths(rows, layout, to, capacity, choices)
    if overflow not in ("drop", "keep"):
        raise ValueError(f'overflow is {overflow!r}: expected "drop" or "keep"')
    options = _Options(paths, layout, overflow == "keep")
    if internals.trace_state_clean() and backend.cluster() is not None:
        blocks, routing = _routing_program(options)(rows, destinations)
    else:
        blocks, routing = _route(options, rows, destinations)
    return blocks, routing


def unroute(blocks: Sequence[Any], routing: Routing, weights: Any = None) -> Any:
    """Return the rows that `atoll.route` has sent: for each row the sum of the results of its choices.

    Args:
      blocks: Array [capacity, ...] per destination, computed row by row from its block. Rows may have another shape and
        dtype than the sent rows. Places without a row are ignored.
      routing: The `Routing` of that `route`.
      weights: Factors of the choices, with the shape of the destinations.

    Returns an array [n, ...] with the sharding of the rows. Raise ValueError for arrays that do not fit.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing is of type {type(routing).__name__}: expected the Routing of atoll.route")
    given = tuple(blocks)
    _check_blocks(given, routing)
    if weights is not None and np.shape(weights) != routing._shape:
        raise ValueError(f"weights of shape {np.shape(weights)}: expected {routing._shape}, as of the destinations")
    if internals.trace_state_clean() and backend.cluster() is not None:
        return _unroute_program()(given, routing, weights)
    return _unroute(given, routing, weights)


# ---- implementation


@dataclass(frozen=True)
class _Options:
    paths: Paths
    layout: Layout
    keeps: bool


def _route(options: _Options, rows: Any, destinations: Any) -> tuple[tuple[Any, ...], Routing]:
    paths, layout = options.paths, options.layout
    place = (paths.rows // paths.groups, paths.capacity // paths.groups, len(paths.blocks))
    destinations = jax.device_put(destinations, layout.sharding("rows"))
    line, sizes, positions, order, dropped, outside = in_order(layout, *place)(destinations)
    blocks, spans = route_in_order(paths, combine(layout), rows, sizes, line, (positions, order))
    kept = rows if options.keeps else None
    shape = destinations.shape
    return blocks, Routing(dropped, outside, sizes, spans, positions, order, kept, paths, layout, shape)


def _unroute(blocks: tuple[Any, ...], routing: Routing, weights: Any) -> Any:
    layout = routing._layout.with_rank(np.ndim(blocks[0]))
    if weights is not None:
        weights = jax.device_put(weights, layout.sharding("rows"))
    ordered = unroute_rows(routing._paths.with_source(layout.sharding("all")), blocks, routing.spans, routing.sizes)
    return combine(layout)(ordered, routing.positions, routing.order, weights, routing.kept)


@functools.lru_cache(maxsize=256)
def _routing_program(options: _Options) -> Program:
    def route(rows: Any, destinations: Any) -> Any:
        return _route(options, rows, destinations)

    return Program(route)


@functools.lru_cache(maxsize=1)
def _unroute_program() -> Program:
    def unroute(blocks: tuple[Any, ...], routing: Routing, weights: Any) -> Any:
        return _unroute(blocks, routing, weights)

    return Program(unroute)


# ---- arguments


def _rows(rows: Any) -> tuple[Any, Layout]:
    """Return the rows as an array, and their layout."""
    if not hasattr(rows, "dtype") or isinstance(rows, np.ndarray | np.generic):
        rows = jax.numpy.asarray(rows)
    if rows.ndim < 1 or not rows.size:
        raise ValueError(f"rows of shape {rows.shape}: expected at least one row that is not empty")
    array = internals.primal(rows)
    if isinstance(array, internals.Tracer) and not isinstance(array, ProgramTracer):
        raise NeedsPlaces(
            "atoll.route needs the sharding of its rows, which is unknown inside jax.jit, jax.vmap, jax.checkpoint and "
            "similar functions: call it outside, in an atoll.program or directly"
        )
    sharding = getattr(array, "sharding", None) or SingleDeviceSharding(internals.default_device())
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        spec = (*sharding.spec, *[None] * (rows.ndim - len(sharding.spec)))
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        return rows, Layout(mesh, spec, None)
    devices = internals.devices_of(sharding) or ()
    if len(devices) != 1:
        raise ProgramError(f"rows have the sharding {sharding}: expected a jax.sharding.NamedSharding or one device")
    return rows, Layout(None, (None,) * rows.ndim, devices[0])


def _destinations(destinations: Any, rows: Any) -> tuple[Any, int]:
    """Return the destinations as an array, and their number per row."""
    if not hasattr(destinations, "dtype"):
        destinations = np.asarray(destinations)
    if not np.issubdtype(destinations.dtype, np.integer):
        raise TypeError(f"destinations must be integers, not {destinations.dtype}")
    shape = destinations.shape
    if len(shape) not in (1, 2) or shape[0] != rows.shape[0] or 0 in shape:
        raise ValueError(f"destinations of shape {shape} for {rows.shape[0]} rows: expected one per row, or [n, k]")
    return destinations, shape[1] if len(shape) == 2 else 1


def _paths(rows: Any, layout: Layout, to: Sequence[Any], capacity: int, choices: int) -> Paths:
    targets = list(to) if isinstance(to, Sequence) else [to]
    if not targets:
        raise ValueError("`to` is empty: expected at least one destination")
    try:
        capacity = operator.index(capacity)
    except TypeError:
        raise TypeError(f"capacity is {capacity!r}: expected a number of rows") from None
    groups = layout.groups
    if capacity < 1 or capacity % groups:
        raise ValueError(
            f"capacity is {counted(capacity, 'row')}: expected "
            + ("at least one row" if groups == 1 else f"a multiple of {groups}, the number of shards of the rows")
        )
    if rows.shape[0] % groups:
        raise ValueError(f"{rows.shape[0]} rows cannot be divided into {groups} equal shards")
    most = min(rows.shape[0] // groups * choices, len(targets) * (capacity // groups))
    blocks = tuple(_block_sharding(each, number, capacity) for number, each in enumerate(targets))
    spans = tuple(map(_replicated, blocks))
    return Paths(groups, groups * most, capacity, layout.sharding("all"), layout.sharding("rows"), blocks, spans)


def _block_sharding(target: Any, number: int, capacity: int) -> Any:
    if isinstance(target, Sharding):
        if internals.devices_of(target) is None:
            raise ValueError(f"destination {number} is {target}, which has no devices")
        return target
    mesh = mesh_of(target, f"destination {number}", ValueError)
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    axis = mesh.axis_names[0]
    if capacity % mesh.shape[axis]:
        raise ValueError(
            f"capacity is {counted(capacity, 'row')}, but destination {number} has "
            f"{counted(mesh.shape[axis], 'device')} along {axis!r}: "
            "choose a multiple of that, or pass a jax.sharding.Sharding"
        )
    return NamedSharding(mesh, PartitionSpec(axis))


def _replicated(sharding: Any) -> Any:
    """Return the replicated sharding on the same devices, in the same order."""
    devices = internals.devices_of(sharding)
    assert devices is not None
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh(np.array(devices, object), "replicas")
    return NamedSharding(mesh, PartitionSpec())


def _check_blocks(blocks: tuple[Any, ...], routing: Routing) -> None:
    paths = routing._paths
    if len(blocks) != len(paths.blocks):
        raise ValueError(f"{counted(len(blocks), 'block')} for {counted(len(paths.blocks), 'destination')}")
    first = blocks[0]
    for number, block in enumerate(blocks):
        shape, dtype = np.shape(block), block.dtype
        if not shape or shape[0] != paths.capacity or not block.size:
            raise ValueError(f"block {number} has shape {shape}: expected {counted(paths.capacity, 'row')}")
        if (shape, dtype) != (first.shape, first.dtype):
            raise ValueError(f"block {number} is {dtype}{list(shape)}, but block 0 {first.dtype}{list(first.shape)}")
    if routing.kept is not None and (first.shape[1:], first.dtype) != (routing.kept.shape[1:], routing.kept.dtype):
        raise ValueError(
            f'blocks of {first.dtype}{list(first.shape[1:])} rows: with overflow="keep", expected rows like those that '
            f"were sent, {routing.kept.dtype}{list(routing.kept.shape[1:])}"
        )
