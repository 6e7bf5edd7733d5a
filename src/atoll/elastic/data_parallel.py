"""Data parallelism across islands: each island has the whole state and computes a part of the batch.

A step is one program. Each island computes the gradients of its rows and sends them to all other islands. Then each
island computes the mean of all gradients, weighted by rows, and applies the update. So the result of a step does not
depend on the number of islands, except for the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.elastic.compile_ahead import type_of
from atoll.elastic.run import Make
from atoll.programs.traced_program import Program, program
from atoll.quantities import counted


def data_parallel(
    gradients: Callable[[Any, Any], tuple[Any, Any]], update: Callable[[Any, Any], Any], *, state_specs: Any = None
) -> Make:
    """Make a training for `elastic.run` from two functions that are written for one device or one mesh. For example::

        def gradients(state, batch):
            loss, gradient = jax.value_and_grad(loss_fn)(state["params"], batch)
            return gradient, loss

        def update(state, gradient):
            ...
            return {"params": params, "moments": moments}

    Args:
      gradients: computes a tree of gradients and a tree of outputs, such as a loss, from the state and a part of a
        batch. Both must be means over the rows; they are averaged over all parts, weighted by rows.
      update: computes the next state from the state and the gradients of the whole batch. Runs on every island.
      state_specs: the layout of the state on the devices of an island, as a `jax.sharding.PartitionSpec` or as a prefix
        of the state with such leaves. The axis is "data". None: the state is replicated on all devices.

    A batch is a tree of arrays whose first dimension is the rows. All devices of an island get the same number of
    rows, and the devices of some islands may get one row more than the devices of others.
    """

    def make(meshes: Sequence[Mesh]) -> DataParallel:
        return DataParallel(gradients, update, PartitionSpec() if state_specs is None else state_specs, meshes)

    return make


class DataParallel:
    """A `Training` with data parallelism across the islands of `meshes`. See `data_parallel`."""

    def __init__(
        self,
        gradients: Callable[[Any, Any], tuple[Any, Any]],
        update: Callable[[Any, Any], Any],
        state_specs: Any,
        meshes: Sequence[Mesh],
    ) -> None:
        self._gradients = gradients
        self._update = update
        self._meshes = meshes
        (self._axis,) = meshes[0].axis_names
        self._states = [_shardings(mesh, state_specs) for mesh in meshes]
        self._rows = [NamedSharding(mesh, PartitionSpec(self._axis)) for mesh in meshes]
        self._steps: dict[tuple[int, ...], Program] = {}  # by the number of rows per island

    def place(self, kept: Any) -> list[Any]:
        return [jax.device_put(kept, sharding, may_alias=False) for sharding in self._states]

    def keep(self, state: list[Any]) -> Any:
        return state[0]

    def step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
        counts = self._counts(batch)
        parts, first = [], 0
        for count, sharding in zip(counts, self._rows, strict=True):
            part = jax.tree.map(lambda leaf, begin=first, end=first + count: leaf[begin:end], batch)
            parts.append(jax.device_put(part, sharding))
            first += count
        result: tuple[list[Any], Any] = self._program(counts)(state, parts)
        return result

    def compile_ahead(self, kept: Any, batch: Any) -> None:
        counts = self._counts(batch)
        states = [jax.tree.map(_types_on, sharding, kept) for sharding in self._states]
        parts = [
            jax.tree.map(lambda leaf, rows=count, there=sharding: _part_type(leaf, rows, there), batch)
            for count, sharding in zip(counts, self._rows, strict=True)
        ]
        self._program(counts).compile_ahead(states, parts)

    def _counts(self, batch: Any) -> tuple[int, ...]:
        return rows_per_island(_count(batch), [mesh.devices.size for mesh in self._meshes])

    def _program(self, counts: tuple[int, ...]) -> Program:
        if counts not in self._steps:
            self._steps.setdefault(counts, self._make(counts))  # `compile_ahead` may add it at the same time
        return self._steps[counts]

    def _make(self, counts: tuple[int, ...]) -> Program:
        weights = [count / sum(counts) for count in counts]

        def mean(trees: Sequence[Any]) -> Any:
            return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)

        def update(state: Any, all_gradients: Sequence[Any]) -> Any:
            return self._update(state, mean(all_gradients))

        computed = [
            jax.jit(self._gradients, out_shardings=(NamedSharding(mesh, PartitionSpec()),) * 2) for mesh in self._meshes
        ]
        updated = [jax.jit(update, out_shardings=sharding, donate_argnums=0) for sharding in self._states]
        whole = [_shardings(mesh, PartitionSpec()) for mesh in self._meshes]
        averaged = jax.jit(mean)

        def data_parallel_step(states: list[Any], parts: list[Any]) -> tuple[list[Any], Any]:
            made = [compute(state, part) for compute, state, part in zip(computed, states, parts, strict=True)]
            following = [
                apply(state, [jax.device_put(gradient, sharding) for gradient, _ in made])
                for apply, state, sharding in zip(updated, states, whole, strict=True)
            ]
            return following, averaged([jax.device_put(outputs, whole[0]) for _, outputs in made])

        made: Program = program(data_parallel_step, donate_argnums=0, retrace_after_loss=False)
        return made


def _types_on(sharding: NamedSharding, types: Any) -> Any:
    """Return the types of a tree of arrays on `sharding`."""
    return jax.tree.map(lambda each: type_of(each, sharding), types)


def _part_type(leaf: Any, rows: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the type of `rows` rows of a leaf of a batch on `sharding`."""
    whole = jax.typeof(leaf)
    return jax.ShapeDtypeStruct((rows, *whole.shape[1:]), whole.dtype, sharding=sharding, weak_type=whole.weak_type)


def rows_per_island(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of rows per island, for islands of `sizes` devices.

    All devices get the same number of rows; of the remaining rows, the first islands get one more per device.
    Raises ValueError if rows remain, or if an island gets none.
    """
    devices = sum(sizes)
    each, left = divmod(rows, devices)
    counts = []
    for size in sizes:
        more = min(left // size, 1) if left else 0
        counts.append((each + more) * size)
        left -= more * size
    if left or not all(counts):
        raise ValueError(
            f"a batch of {counted(rows, 'row')} cannot be divided among islands of {', '.join(map(str, sizes))} "
            "devices: all devices of an island must get the same number of rows, and at least one"
        )
    return tuple(counts)


def _count(batch: Any) -> int:
    counts = {len(leaf) for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1:
        raise ValueError(f"the arrays of a batch must have equal numbers of rows, got {sorted(counts)}")
    (count,) = counts
    return count


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
