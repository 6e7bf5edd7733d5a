"""Data parallelism over islands: each has all of the state and computes a part of the batch.

A step is one program: gradients on each island, of the rows that it got; each island's to all others; and the mean of
them, weighted by rows, and the update on each. So what a step computes is the same for any number of islands, but for
the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.elastic.training import Make
from atoll.programs.traced_program import program


def data_parallel(
    gradients: Callable[[Any, Any], tuple[Any, Any]], update: Callable[[Any, Any], Any], *, state_specs: Any = None
) -> Make:
    """A training for `elastic.run`, of two functions that are written for one device or one mesh. For example::

        def gradients(state, batch):
            loss, gradient = jax.value_and_grad(loss_fn)(state["params"], batch)
            return gradient, loss

        def update(state, gradient):
            ...
            return {"params": params, "moments": moments}

    Args:
      gradients: from the state and a part of a batch to a tree of gradients and one of outputs, such as a loss: both
        are means over the rows. Those of all parts are averaged, by their rows.
      update: from the state and the gradients of the whole batch to the next state. Runs on each island alike.
      state_specs: how the state lies on the devices of an island, as a `jax.sharding.PartitionSpec` or a prefix of the
        state with such leaves. The axis is "data". None: each device has all of it.

    A batch is a tree of arrays, with its rows in their first dimension. Each island gets whole rows for each of its
    devices; islands may get one row more a device than others.
    """

    def make(meshes: Sequence[Mesh]) -> DataParallel:
        return DataParallel(gradients, update, PartitionSpec() if state_specs is None else state_specs, meshes)

    return make


class DataParallel:
    """Made by `data_parallel`, for certain islands: a `Training`."""

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
        self._steps: dict[tuple[int, ...], Any] = {}  # by the rows of each island

    def place(self, kept: Any) -> list[Any]:
        return [jax.device_put(kept, sharding, may_alias=False) for sharding in self._states]

    def keep(self, state: list[Any]) -> Any:
        return state[0]

    def step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
        counts = dealt(_count(batch), [mesh.devices.size for mesh in self._meshes])
        parts, first = [], 0
        for count, sharding in zip(counts, self._rows, strict=True):
            part = jax.tree.map(lambda leaf, begin=first, end=first + count: leaf[begin:end], batch)
            parts.append(jax.device_put(part, sharding))
            first += count
        if counts not in self._steps:
            self._steps[counts] = self._make(counts)
        result: tuple[list[Any], Any] = self._steps[counts](state, parts)
        return result

    def _make(self, counts: tuple[int, ...]) -> Any:
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

        return program(data_parallel_step, donate_argnums=0)


def dealt(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many of a batch's rows each island gets: as many for each device as fit, and the rest from the first on.

    Raises ValueError where the rows cannot be cut so.
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
            f"a batch of {rows} rows cannot be cut for islands of {', '.join(map(str, sizes))} devices: "
            "each device is to get as many rows as its island's others, and one or more"
        )
    return tuple(counts)


def _count(batch: Any) -> int:
    counts = {len(leaf) for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1:
        raise ValueError(f"the arrays of a batch have {sorted(counts)} rows; they are to have as many")
    (count,) = counts
    return count


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
