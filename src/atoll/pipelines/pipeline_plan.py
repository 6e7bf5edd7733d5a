"""What a pipeline has decided before anything runs: what each stage has, and what a step does in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from atoll.pipelines.optimizer import Update
from atoll.pipelines.order import Action
from atoll.pipelines.parts import Derivative
from atoll.pipelines.pipeline_cut import Part


@dataclass(frozen=True)
class StagePlan:
    """What a stage has: its parameters and the leaves of the optimizer, by their numbers, and how they lie."""

    mesh: Mesh
    parameters: dict[int, NamedSharding]
    leaves: dict[int, NamedSharding]
    batch: dict[int, NamedSharding]  # of a micro-batch's leaves


@dataclass(frozen=True)
class StepPlan:
    """All that a step is made of. Stages, parts and micro-batches of replicas are numbered one replica after the other;
    nothing crosses between their parts.

    `homes` are, for each parameter that is trained, the first stages of the replicas that use it: gradients are summed
    there, and then at the one of them that is the `owner`, which updates it. With `donate`, new parameters and leaves
    take the place of the old ones.
    """

    stages: Sequence[StagePlan]
    parts: Sequence[Part]
    derivatives: Sequence[Derivative]
    stage_of: Sequence[int]  # of each part
    source: dict[Var, int]  # of a value that crosses: the part that makes it
    targets: dict[Var, tuple[int, ...]]
    actions: Sequence[Action]
    microbatches: int  # of a replica
    replicas: int
    homes: dict[int, tuple[int, ...]]
    owner: dict[int, int]
    update: Update
    donate: bool

    def replica_of(self, stage: int) -> int:
        return stage * self.replicas // len(self.stages)
