"""`atoll.route` and `atoll.unroute`: rows go to experts on other devices, by what devices compute, and come back.

The sparse exchange of the paper (sections 4.3 and 6.3). Capacity is that of GShard (Lepikhin et al., 2020) and of the
Switch Transformer (Fedus et al., 2021): how many rows a destination takes. What travels is rows, not capacity.
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

internals.leave_out_of_tracebacks(__file__)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("by_group", "outside", "sizes", "spans", "positions", "order", "kept"),
    meta_fields=("_paths", "_layout", "_shape"),
)
@dataclass(frozen=True)
class Routing:
    """Where the rows of one `atoll.route` went: a tree of arrays. The fields are what `atoll.unroute` needs; those that
    count do so by groups, which are the rows of one shard each.
    """

    by_group: Any  # int32 [groups, destinations]: choices that found no room
    outside: Any  # int32 [groups]: choices of no destination
    sizes: Any  # int32 [groups, destinations]: rows that went
    spans: tuple[Any, ...]  # with each block, int32 [groups, 2]
    positions: Any  # int32 [n, k]: of each choice among the rows of its group that are sent, or -1
    order: Any  # int32: which choice lies at each of these positions
    kept: Any  # the rows themselves, with overflow="keep"
    _paths: Paths = field(repr=False)
    _layout: Layout = field(repr=False)
    _shape: tuple[int, ...] = field(repr=False)  # of the destinations

    @property
    def dropped(self) -> Any:
        """How many choices found no room: int32 [destinations]."""
        return self.by_group.sum(0)

    @property
    def out_of_range(self) -> Any:
        """How many choices were of no destination: an int32."""
        return self.outside.sum()


def route(
    rows: Any, destinations: Any, to: Sequence[Any], *, capacity: int, overflow: Literal["drop", "keep"] = "drop"
) -> tuple[tuple[Any, ...], Routing]:
    """Sends rows of an array to where numbers say that a device computes. For example, with experts on other islands::

        blocks, routing = atoll.route(tokens, experts, to=slices, capacity=512)   # tokens [n, d], experts int [n, 2]
        blocks = [expert(p, block) for p, block in zip(parameters, blocks)]         # each block [512, d], on its slice
        tokens = atoll.unroute(blocks, routing, weights)                            # weights [n, 2]

    The call waits for nothing. Between islands only the rows travel that there are; one message from each host to each
    says how many, however many devices these have. Works inside and outside of `atoll.program`, and derivatives of any
    order go the way back: that of `route` is `unroute`.

    Args:
      rows: [n, ...], of any dtype but strings. Where their first dimension is sharded, each shard's rows are a group,
        which is sorted where it is.
      destinations: integers [n], or [n, k] where each row goes to k destinations. A number that is none of 0 to
        len(to) - 1, such as -1, is no destination: the row does not travel for it.
      to: for each destination a `jax.sharding.Sharding` of its block, or a mesh, a slice, a list of devices or a
        device; on a mesh, the block is cut along its first axis.
      capacity: how many rows a destination takes. Each group has an equal part of it. Where there are more, those of
        lower k come first, and of these the first rows. Memory for all of it is reserved on the destination.
      overflow: what becomes of a choice that finds no room, or no destination. "drop": it gives zeros in `unroute`.
        "keep": it gives the row itself. `Routing` counts them.

    Returns the blocks, one [capacity, ...] for each destination, and a `Routing`. A block has `capacity / groups`
    places for each group: the rows that came, in the order of their choices and numbers, and then zeros.

    Raises ValueError or TypeError for arguments that do not fit, and `atoll.ProgramError` under `jax.jit`.
    """
    rows, layout = _rows(rows)
    destinations, choices = _destinations(destinations, rows)
    paths = _paths(rows, layout, to, capacity, choices)
    if overflow not in ("drop", "keep"):
        raise ValueError(f'overflow is "drop" or "keep", not {overflow!r}')
    options = _Options(paths, layout, overflow == "keep")
    if internals.trace_state_clean() and backend.cluster() is not None:
        blocks, routing = _routing_program(options)(rows, destinations)
    else:
        blocks, routing = _route(options, rows, destinations)
    return blocks, routing


def unroute(blocks: Sequence[Any], routing: Routing, weights: Any = None) -> Any:
    """Brings rows back from where `atoll.route` has sent them: for each row the sum of what came of its choices.

    Args:
      blocks: for each destination [capacity, ...], what it has made of its block, row by row. Their rows may have
        another shape and dtype than those that were sent. What stands where no row came is not looked at.
      routing: of that `route`.
      weights: [n] or [n, k], as the destinations were, by which each choice is multiplied.

    Returns [n, ...], lying as the rows did. Raises ValueError for arrays that do not fit.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing is what atoll.route returns, and not {type(routing).__name__}")
    given = tuple(blocks)
    _check_blocks(given, routing)
    if weights is not None and np.shape(weights) != routing._shape:
        raise ValueError(f"weights of shape {np.shape(weights)}, where the destinations had {routing._shape}")
    if internals.trace_state_clean() and backend.cluster() is not None:
        return _unroute_program()(given, routing, weights)
    return _unroute(given, routing, weights)


# ---- what they do


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


# ---- what they are given


def _rows(rows: Any) -> tuple[Any, Layout]:
    """The rows as an array, and how they lie."""
    if not hasattr(rows, "dtype") or isinstance(rows, np.ndarray | np.generic):
        rows = jax.numpy.asarray(rows)
    if rows.ndim < 1 or not rows.size:
        raise ValueError(f"rows of shape {rows.shape}: there are none to route")
    array = internals.primal(rows)
    if isinstance(array, internals.Tracer) and not isinstance(array, ProgramTracer):
        raise NeedsPlaces(
            "pw.route has to know where its rows are. Inside of jax.jit, jax.vmap, jax.checkpoint and the like they "
            "are nowhere yet: call it outside, in an atoll.program or by itself"
        )
    sharding = getattr(array, "sharding", None) or SingleDeviceSharding(internals.default_device())
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        spec = (*sharding.spec, *[None] * (rows.ndim - len(sharding.spec)))
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        return rows, Layout(mesh, spec, None)
    devices = internals.devices_of(sharding) or ()
    if len(devices) != 1:
        raise ProgramError(f"rows to route lie by a jax.sharding.NamedSharding or on one device, not by {sharding}")
    return rows, Layout(None, (None,) * rows.ndim, devices[0])


def _destinations(destinations: Any, rows: Any) -> tuple[Any, int]:
    """The destinations as an array, and how many there are for each row."""
    if not hasattr(destinations, "dtype"):
        destinations = np.asarray(destinations)
    if not np.issubdtype(destinations.dtype, np.integer):
        raise TypeError(f"destinations are integers, and not {destinations.dtype}")
    shape = destinations.shape
    if len(shape) not in (1, 2) or shape[0] != rows.shape[0] or 0 in shape:
        raise ValueError(f"destinations of shape {shape} for {rows.shape[0]} rows: one for each, or [n, k]")
    return destinations, shape[1] if len(shape) == 2 else 1


def _paths(rows: Any, layout: Layout, to: Sequence[Any], capacity: int, choices: int) -> Paths:
    targets = list(to) if isinstance(to, Sequence) else [to]
    if not targets:
        raise ValueError("there is no destination in `to`")
    try:
        capacity = operator.index(capacity)
    except TypeError:
        raise TypeError(f"capacity is a number of rows, and not {capacity!r}") from None
    groups = layout.groups
    if capacity < 1 or capacity % groups:
        raise ValueError(
            f"capacity is {capacity} rows, and has to be a multiple of {groups}: "
            + ("at least one row" if groups == 1 else "the rows are in so many shards, and each has its part of it")
        )
    if rows.shape[0] % groups:
        raise ValueError(f"{rows.shape[0]} rows cannot be in {groups} shards of one size")
    most = min(rows.shape[0] // groups * choices, len(targets) * (capacity // groups))
    blocks = tuple(_block_sharding(each, number, capacity) for number, each in enumerate(targets))
    spans = tuple(map(_replicated, blocks))
    return Paths(groups, groups * most, capacity, layout.sharding("all"), layout.sharding("rows"), blocks, spans)


def _block_sharding(target: Any, number: int, capacity: int) -> Any:
    if isinstance(target, Sharding):
        if internals.devices_of(target) is None:
            raise ValueError(f"destination {number} is {target}, which names no devices")
        return target
    mesh = mesh_of(target, f"destination {number}", ValueError)
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.flat[0])
    axis = mesh.axis_names[0]
    if capacity % mesh.shape[axis]:
        raise ValueError(
            f"capacity is {capacity} rows, and destination {number} has {mesh.shape[axis]} devices along {axis!r}: "
            "choose a multiple, or give a jax.sharding.Sharding"
        )
    return NamedSharding(mesh, PartitionSpec(axis))


def _replicated(sharding: Any) -> Any:
    """On the same devices, in the same order."""
    devices = internals.devices_of(sharding)
    assert devices is not None
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else Mesh(np.array(devices, object), "replicas")
    return NamedSharding(mesh, PartitionSpec())


def _check_blocks(blocks: tuple[Any, ...], routing: Routing) -> None:
    paths = routing._paths
    if len(blocks) != len(paths.blocks):
        raise ValueError(f"{len(blocks)} blocks come back of {len(paths.blocks)} destinations")
    first = blocks[0]
    for number, block in enumerate(blocks):
        shape, dtype = np.shape(block), block.dtype
        if not shape or shape[0] != paths.capacity or not block.size:
            raise ValueError(f"block {number} has shape {shape}, where {paths.capacity} rows were to be")
        if (shape, dtype) != (first.shape, first.dtype):
            raise ValueError(f"block {number} is {dtype}{list(shape)}, and block 0 {first.dtype}{list(first.shape)}")
    if routing.kept is not None and (first.shape[1:], first.dtype) != (routing.kept.shape[1:], routing.kept.dtype):
        raise ValueError(
            f'blocks of {first.dtype}{list(first.shape[1:])} rows; with overflow="keep" they are as those that were '
            f"sent, {routing.kept.dtype}{list(routing.kept.shape[1:])}"
        )
