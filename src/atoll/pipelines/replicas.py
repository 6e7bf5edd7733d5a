"""What replicas of a pipeline have in common in a step: the batch, the loss, the gradients and the parameters.

XLA has summed a gradient inside of a stage's island already. Over the replicas each parameter has one owner: the others
send it their gradients, it adds them in one order and updates, and sends them the new value. So all have the same bits,
whatever devices they are on; the optimizer's state exists once; and, since owners are dealt over the replicas, each
sends and receives about as much as in a ring, in two steps instead of 2 (R - 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atoll.client.jax_internals import leave_out_of_tracebacks
from atoll.pipelines.part_functions import named
from atoll.pipelines.pipeline_plan import StepPlan

leave_out_of_tracebacks(__file__)


class Replicas:
    """The part of a step that is about several of them. Of one replica, it leaves all as it is."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._cut = jax.jit(named(lambda leaf: jnp.split(leaf, plan.replicas), "replicas_rows"))
        self._mean = jax.jit(named(lambda losses: sum(losses[1:], losses[0]) / len(losses), "mean_loss"))
        self._add = jax.jit(named(lambda some: [sum(parts[1:], parts[0]) for parts in some], "sum_replicas"))

    def rows(self, batch: Sequence[Any]) -> list[list[Any]]:
        """What each replica gets of the batch's leaves: a leaf of the client's memory is a list of that already."""
        count = self._plan.replicas
        if count == 1:
            return [list(batch)]
        each = [self._pieces(leaf) for leaf in batch]
        return [[pieces[replica] for pieces in each] for replica in range(count)]

    def _pieces(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, list):
            return leaf
        pieces: Sequence[Any] = self._cut(leaf) if np.ndim(leaf) else [leaf] * self._plan.replicas
        return pieces

    def mean_loss(self, losses: Mapping[int, Any]) -> Any:
        """Of the micro-batches of each replica, and of the replicas, which have as many rows each."""
        count = self._plan.microbatches
        means = []
        for first in range(0, len(losses), count):
            some = [losses[first + i] for i in range(count)]
            means.append(self._mean(some) if count > 1 else some[0])
        if len(means) == 1:
            return means[0]
        return self._mean([means[0], *(jax.device_put(each, means[0].sharding) for each in means[1:])])

    def summed(self, gradients: Mapping[tuple[int, int], Any]) -> dict[int, Any]:
        """The gradients, given by parameter and home, summed at their owners: always in the order of the replicas.

        All are sent before the first is added, and a stage adds all that it owns in one function.
        """
        plan = self._plan
        parts: dict[int, dict[int, list[Any]]] = {}  # by owner and parameter
        for number, owner in plan.owner.items():
            sharding = plan.stages[owner].parameters[number]
            parts.setdefault(owner, {})[number] = [
                gradients[number, home] if home == owner else jax.device_put(gradients[number, home], sharding)
                for home in plan.homes[number]
            ]
        summed: dict[int, Any] = {}
        for here in parts.values():
            several = {number: some for number, some in here.items() if len(some) > 1}
            summed.update((number, some[0]) for number, some in here.items() if number not in several)
            if several:
                summed.update(zip(several, self._add(list(several.values())), strict=True))
        return summed

    def everywhere(self, updated: Mapping[int, Any], parameters: Sequence[Mapping[int, Any]]) -> list[list[Any]]:
        """The parameters of all stages: what owners have updated goes to the other homes, and from each home to the
        stages of its replica that use it; the others stay as they are."""
        plan = self._plan
        at_home = {
            (number, plan.replica_of(home)): updated[number]
            if home == plan.owner[number]
            else jax.device_put(updated[number], plan.stages[home].parameters[number])
            for number, homes in plan.homes.items()
            for home in homes
        }
        new: list[list[Any]] = []
        for stage, here in enumerate(plan.stages):
            new.append([])
            for number, sharding in here.parameters.items():
                if number not in updated:
                    new[-1].append(parameters[stage][number])
                    continue
                value = at_home[number, plan.replica_of(stage)]
                new[-1].append(value if stage in plan.homes[number] else jax.device_put(value, sharding))
        return new
