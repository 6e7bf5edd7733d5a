"""Two JAX primitives that send rows to other devices and back. Devices compute the numbers of the destinations.

In a program each is one node (`ir.program.Route` and `Unroute`). Called outside a program on a cluster, each is a
program of that node. On other backends they move all rows, with the same results. Each is the transpose of the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from atoll.client import jax_internals as internals
from atoll.client.client_caches import client_cache
from atoll.client.plugin_programs import is_atoll
from atoll.errors import ProgramError
from atoll.programs.program_tracing import RECORDERS, ProgramTrace, ProgramTracer
from atoll.programs.recording import RowsNode
from atoll.programs.traced_program import Program
from atoll.programs.values import Value

internals.leave_out_of_tracebacks(__file__)

route_p = internals.Primitive("route_rows")
unroute_p = internals.Primitive("unroute_rows")
route_p.multiple_results = unroute_p.multiple_results = True


@dataclass(frozen=True)
class Paths:
    """The destinations of rows, and the sizes and shardings of the arrays. Sizes are totals of all groups."""

    groups: int
    rows: int  # places for rows at the source
    capacity: int  # rows per block
    source: Any  # sharding of the rows
    sizes: Any  # sharding of their sizes
    blocks: tuple[Any, ...]  # shardings of the blocks
    spans: tuple[Any, ...]  # shardings of the blocks' spans

    def with_source(self, source: Any) -> Paths:
        """Return the paths for rows of another shape, with the sharding `source`."""
        return self if source == self.source else replace(self, source=source)

    @property
    def pairs(self) -> list[Any]:
        """The shardings of blocks and spans, alternating, as the primitives take them."""
        return [each for pair in zip(self.blocks, self.spans, strict=True) for each in pair]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def route_rows(paths: Paths, rows: Any, sizes: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return blocks and spans. In each group, `rows` are ordered by destination, with `sizes` rows per destination."""
    return _routed(paths, rows, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def route_in_order(
    paths: Paths, back: Callable[..., Any], rows: Any, sizes: Any, order: Any, choices: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return blocks and spans of unordered rows. `order`, int32 [groups, places], has the row at each place.

    The derivative is `back(line, *choices)`, where `line` has the cotangents of the ordered rows.
    """
    return _routed(paths, rows, sizes, order)


def _routed(paths: Paths, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    made = route_p.bind(*inputs, paths=paths)
    return tuple(made[::2]), tuple(made[1::2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def unroute_rows(paths: Paths, blocks: tuple[Any, ...], spans: tuple[Any, ...], sizes: Any) -> Any:
    """Return the rows in the order in which `route_rows` takes them. `sizes` are only for the derivative."""
    pairs = [each for pair in zip(blocks, spans, strict=True) for each in pair]
    (rows,) = unroute_p.bind(*pairs, paths=paths)
    return rows


def _route_forward(paths: Paths, rows: Any, sizes: Any) -> tuple[Any, Any]:
    blocks, spans = route_rows(paths, rows, sizes)
    return (blocks, spans), (spans, sizes)


def _route_backward(paths: Paths, kept: Any, cotangents: Any) -> tuple[Any, Any]:
    spans, sizes = kept
    blocks, _ = cotangents
    return (None if _is_empty(blocks[0]) else unroute_rows(paths, blocks, spans, sizes)), None


def _in_order_forward(
    paths: Paths, back: Callable[..., Any], rows: Any, sizes: Any, order: Any, choices: Sequence[Any]
) -> tuple[Any, Any]:
    blocks, spans = route_in_order(paths, back, rows, sizes, order, choices)
    return (blocks, spans), (spans, sizes, choices)


def _in_order_backward(paths: Paths, back: Callable[..., Any], kept: Any, cotangents: Any) -> tuple[Any, ...]:
    *kept, choices = kept
    line, _ = _route_backward(paths, kept, cotangents)
    return (None if line is None else back(line, *choices)), None, None, None


def _unroute_forward(paths: Paths, blocks: tuple[Any, ...], spans: tuple[Any, ...], sizes: Any) -> tuple[Any, Any]:
    return unroute_rows(paths, blocks, spans, sizes), (sizes, spans)


def _unroute_backward(paths: Paths, kept: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    sizes, spans = kept
    nothing = (None,) * len(spans)
    blocks = nothing if _is_empty(cotangent) else route_rows(paths, cotangent, sizes)[0]
    return blocks, nothing, None


def _is_empty(cotangent: Any) -> bool:
    """Return whether this is the cotangent of integers."""
    return bool(cotangent.dtype == jax.dtypes.float0)


route_rows.defvjp(_route_forward, _route_backward)
route_in_order.defvjp(_in_order_forward, _in_order_backward)
unroute_rows.defvjp(_unroute_forward, _unroute_backward)


# ---- types


def _route_types(rows: Any, *numbers: Any, paths: Paths) -> list[Any]:
    block = ShapedArray((paths.capacity, *rows.shape[1:]), rows.dtype)
    return [block, ShapedArray((paths.groups, 2), np.dtype("int32"))] * len(paths.blocks)


def _unroute_types(*pairs: Any, paths: Paths) -> list[Any]:
    return [ShapedArray((paths.rows, *pairs[0].shape[1:]), pairs[0].dtype)]


route_p.def_abstract_eval(_route_types)
unroute_p.def_abstract_eval(_unroute_types)


# ---- tracing in a program


def _record(
    trace: ProgramTrace, given: Sequence[Any], inputs: Sequence[Any], types: Sequence[Any], outputs: Sequence[Any]
) -> tuple[list[Value], list[Value]]:
    line = internals.line()
    taken = [trace.resharded(trace.usable(each, "a route"), s).root for each, s in zip(given, inputs, strict=True)]
    return taken, [Value(aval, True, line, s) for aval, s in zip(types, outputs, strict=True)]


def _record_route(trace: ProgramTrace, given: Sequence[Any], params: dict[str, Any]) -> list[ProgramTracer]:
    paths: Paths = params["paths"]
    avals = [internals.abstractify(each) for each in given]
    lie = (paths.source, paths.sizes, paths.sizes)[: len(given)]
    inputs, outputs = _record(trace, given, lie, _route_types(*avals, paths=paths), paths.pairs)
    trace.recording.nodes.append(RowsNode(inputs, outputs, paths.groups, False, internals.line()))
    return [ProgramTracer(trace, value) for value in outputs]


def _record_unroute(trace: ProgramTrace, given: Sequence[Any], params: dict[str, Any]) -> list[ProgramTracer]:
    paths: Paths = params["paths"]
    avals = [internals.abstractify(each) for each in given]
    inputs, outputs = _record(trace, given, paths.pairs, _unroute_types(*avals, paths=paths), (paths.source,))
    trace.recording.nodes.append(RowsNode(inputs, outputs, paths.groups, True, internals.line()))
    return [ProgramTracer(trace, value) for value in outputs]


RECORDERS[route_p] = _record_route
RECORDERS[unroute_p] = _record_unroute


# ---- evaluation outside a program


@client_cache(256)
def _program(primitive: Any, paths: Paths) -> Program:
    def route(*arrays: Any) -> list[Any]:
        made: list[Any] = primitive.bind(*arrays, paths=paths)
        return made

    route.__name__ = route.__qualname__ = "route" if primitive is route_p else "unroute"
    return Program(route)


def _on_cluster(paths: Paths) -> bool:
    devices = internals.devices_of(paths.source) or ()
    return all(is_atoll(device.client) for device in devices)


def _route_now(rows: Any, sizes: Any, *order: Any, paths: Paths) -> list[Any]:
    if _on_cluster(paths):
        made: list[Any] = _program(route_p, paths)(rows, sizes, *order)
        return made
    found = []
    if order:
        rows = _line(rows, *order)
    for destination, (block, spans) in enumerate(zip(paths.blocks, paths.spans, strict=True)):
        here = _block(rows, sizes, paths.groups, paths.capacity // paths.groups, destination)
        found += [jax.device_put(here[0], block), jax.device_put(here[1], spans)]
    return found


def _unroute_now(*pairs: Any, paths: Paths) -> list[Any]:
    if _on_cluster(paths):
        made: list[Any] = _program(unroute_p, paths)(*pairs)
        return made
    rows = jax.device_put(jnp.zeros((paths.rows, *pairs[0].shape[1:]), pairs[0].dtype), paths.source)
    for block, spans in zip(pairs[::2], pairs[1::2], strict=True):
        there = jax.device_put(block, paths.source), jax.device_put(spans, paths.sizes)
        rows = _returned(rows, *there, paths.groups)
    return [rows]


@jax.jit  # type: ignore[untyped-decorator]
def _line(rows: Any, order: Any) -> Any:
    first = np.arange(order.shape[0])[:, None] * (rows.shape[0] // order.shape[0])
    return rows[(first + order).reshape(-1)]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _block(rows: Any, sizes: Any, groups: int, capacity: int, destination: int) -> tuple[Any, Any]:
    first, count = sizes[:, :destination].sum(1), sizes[:, destination]
    places = np.arange(capacity)
    each = rows.shape[0] // groups
    index = np.arange(groups)[:, None] * each + jnp.clip(first[:, None] + places, 0, each - 1)
    taken = rows[index.reshape(-1)]
    is_row = (places < count[:, None]).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_row, taken, jnp.zeros((), rows.dtype)), jnp.stack([first, count], 1).astype(np.int32)


@functools.partial(jax.jit, static_argnums=3)
def _returned(rows: Any, block: Any, spans: Any, groups: int) -> Any:
    places = np.arange(block.shape[0] // groups)
    index = np.arange(groups)[:, None] * (rows.shape[0] // groups) + spans[:, :1] + places
    index = jnp.where(places < spans[:, 1:], index, rows.shape[0])
    return rows.at[index.reshape(-1)].set(block, mode="drop")


def _refuse(*_: Any, **__: Any) -> Any:
    raise ProgramError("routed rows move between meshes, which is not possible inside one compiled function")


_lowering: Callable[..., Any] = mlir.register_lowering
for _primitive, _now in ((route_p, _route_now), (unroute_p, _unroute_now)):
    _primitive.def_impl(_now)
    _lowering(_primitive, _refuse)
