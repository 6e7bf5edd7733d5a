"""The computations of a route on the devices of the rows: the order in which to send them, and the sum of the results.

Each shard computes for its own rows, without other devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.client import jax_internals as internals

internals.leave_out_of_tracebacks(__file__)

_COUNTED = 16  # up to this number of keys, on a CPU, counting each key is faster than sorting


@dataclass(frozen=True)
class Layout:
    """The layout of rows: on one device, or on a mesh along the axes of `spec`."""

    mesh: Mesh | None
    spec: tuple[Any, ...]
    device: Any

    @property
    def groups(self) -> int:
        names = self.spec[0]
        several = (names,) if isinstance(names, str) else tuple(names or ())
        count = 1
        for name in several:
            assert self.mesh is not None
            count *= self.mesh.shape[name]
        return count

    def with_rank(self, rank: int) -> Layout:
        """Return the layout for rows of another rank, with the same first dimensions."""
        return self if rank == len(self.spec) else replace(self, spec=(*self.spec, *[None] * rank)[:rank])

    def partition(self, what: Literal["all", "rows"]) -> PartitionSpec:
        """Return the spec of the rows ("all"), or of arrays with one element per row or per group ("rows")."""
        return PartitionSpec(*(self.spec if what == "all" else self.spec[:1]))

    def sharding(self, what: Literal["all", "rows"]) -> Any:
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, self.partition(what))

    def compiled(self, function: Callable[..., Any], takes: str, gives: str) -> Any:
        """Compile `function` for each shard. `takes` and `gives` have a letter per array: "a" for all, "r" for rows."""
        kinds: dict[str, Literal["all", "rows"]] = {"a": "all", "r": "rows"}
        if self.mesh is None:
            return jax.jit(function, out_shardings=tuple(self.sharding("all") for _ in gives))
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self.partition(kinds[each]) for each in takes),
            out_specs=tuple(self.partition(kinds[each]) for each in gives),
            check_vma=False,
        )
        named = functools.wraps(function)(mapped)
        return jax.jit(
            named,
            in_shardings=tuple(self.sharding(kinds[each]) for each in takes),
            out_shardings=tuple(self.sharding(kinds[each]) for each in gives),
        )


@functools.lru_cache(maxsize=256)
def in_order(layout: Layout, limit: int, capacity: int, destinations: int) -> Any:
    """Return a function of the destinations that computes the order in which rows are sent, per group.

    Its results are: the row at each of `limit` places; the number of rows per destination; the place of each choice, or
    -1; the choice at each place; the number of choices beyond the capacity per destination, and of choices without a
    destination. Choice number j belongs to row j % n.
    """

    def route(chosen: Any) -> tuple[Any, ...]:
        rows = chosen.shape[0]
        flat = chosen.reshape(rows, -1).T.reshape(-1)  # first choices precede second choices
        is_one = (flat >= 0) & (flat < destinations)
        key = jnp.where(is_one, flat, destinations).astype(np.int32)
        rank, asked = _ranks(key, destinations + 1)
        sizes = jnp.minimum(asked[:destinations], capacity)
        first = jnp.append(jnp.cumsum(sizes) - sizes, 0)
        has_place = is_one & (rank < capacity)
        place = jnp.where(has_place, first[key] + rank, limit)
        order = jnp.zeros(limit, np.int32).at[place].set(np.arange(flat.size, dtype=np.int32), mode="drop")
        positions = jnp.where(has_place, place, -1).astype(np.int32).reshape(-1, rows).T
        dropped = asked[:destinations] - sizes
        return (order % rows)[None], sizes[None], positions, order, dropped[None], asked[destinations:]

    return layout.compiled(route, "r", "rrrrrr")


def _ranks(key: Any, count: int) -> tuple[Any, Any]:
    """Return the rank of each element among equal keys, and the number of elements of each of `count` keys."""
    numbers = np.arange(key.size, dtype=np.int32)
    if count <= _COUNTED:
        upto = jnp.cumsum((key == np.arange(count, dtype=np.int32)[:, None]).astype(np.int32), axis=1)
        return upto[key, numbers] - 1, upto[:, -1]
    by_key = jnp.argsort(key, stable=True)
    asked = jnp.zeros(count, np.int32).at[key].add(1)
    rank = numbers - (jnp.cumsum(asked) - asked)[key[by_key]]
    return jnp.zeros(key.size, np.int32).at[by_key].set(rank), asked


def _found(ordered: Any, positions: Any) -> Any:
    """Return the rows at `positions`, and zeros for position -1."""
    found = ordered[jnp.maximum(positions, 0)]
    return jnp.where(_like(positions >= 0, found), found, jnp.zeros((), found.dtype))


@functools.lru_cache(maxsize=256)
def combine(layout: Layout) -> Callable[..., Any]:
    """Return a function of the returned rows, in the order of sending: each row's weighted sum of its choices."""
    compiled: dict[tuple[bool, bool], Any] = {}

    def call(ordered: Any, positions: Any, order: Any, weights: Any = None, kept: Any = None) -> Any:
        key = weights is not None, kept is not None
        if key not in compiled:
            takes = "arr" + "r" * key[0] + "a" * key[1]
            compiled[key] = layout.compiled(_summing(*key), takes, "a")
        given = [each for each in (weights, kept) if each is not None]
        (found,) = compiled[key](ordered, positions, order, *given)
        return found

    return call


def _summing(is_weighted: bool, keeps: bool) -> Callable[..., Any]:
    def unroute(ordered: Any, positions: Any, order: Any, *given: Any) -> tuple[Any]:
        each = _back(ordered, positions, order)
        if keeps:
            each = jnp.where(_like(positions >= 0, each), each, given[-1][:, None])
        if is_weighted:
            each = each * _like(given[0].reshape(positions.shape), each)
        # XLA fuses additions with the computation of their terms. It does not fuse a sum over an axis, which takes ten
        # times as long.
        total = each[:, 0].astype(_summed(each.dtype))
        for choice in range(1, each.shape[1]):
            total = total + each[:, choice]
        return (total.astype(each.dtype),)

    return unroute


def _summed(dtype: Any) -> Any:
    """Return the dtype for sums of `dtype`: float32 for smaller floats, as in `jax.numpy.sum`."""
    return np.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _back(ordered: Any, positions: Any, order: Any) -> Any:
    return _found(ordered, positions)


_back.defvjp(
    lambda ordered, positions, order: (_found(ordered, positions), order),
    lambda order, cotangent: (cotangent[order % cotangent.shape[0], order // cotangent.shape[0]], None, None),
)


def _like(numbers: Any, rows: Any) -> Any:
    """Reshape `numbers` from [n, k] to [n, k, 1, ...], with the rank of `rows`."""
    return numbers.reshape(*numbers.shape, *[1] * (rows.ndim - numbers.ndim))
