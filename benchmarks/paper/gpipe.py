"""A training step as a pipeline in GPipe's order, in one program: all forward passes, all backward ones, an update.

Stages are groups of devices. A micro-batch's activations go from stage to stage, and their gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.devices.null.null_program import NullProgram
from atoll.ir.program import Node
from atoll.ir.types import ShardType
from atoll.session.bare import BareClient, call, program, sharded, transfer
from benchmarks.paper.pipeline import Pipeline
from benchmarks.paper.training import Training

Devices = Sequence[int]


async def make_training(client: BareClient, groups: Sequence[Devices], pipeline: Pipeline) -> Training:
    """Compiles the stages' functions and registers the step; stage i is on `groups[i]`."""
    step = _Step(pipeline, [await _Stage.compile(client, i, groups[i], pipeline) for i in range(pipeline.stages)])
    first = [call(stage.first, (), (stage.weights,), stage.devices) for stage in step.stages]
    nodes, results = step.build()
    return Training(
        client.register(program("first weights", (), first, range(pipeline.stages))),
        client.register(program("step", [stage.weights for stage in step.stages], nodes, results)),
        pipeline.stages,
    )


class _Stage:
    """A stage's functions and the arrays that they take and give."""

    def __init__(self, client: BareClient, number: int, devices: Devices, pipeline: Pipeline) -> None:
        self._client = client
        self._number = number
        self.devices = devices
        self.is_first = number == 0
        self.is_last = number == pipeline.stages - 1
        self.weights = sharded(devices, pipeline.weight_bytes)
        self.gradients = sharded(devices, pipeline.gradient_bytes)
        self.activations = sharded(devices, pipeline.activation_bytes)
        self.loss = sharded(devices)
        self.first = self.forward = self.backward = self.backward_more = self.update = -1

    @classmethod
    async def compile(cls, client: BareClient, number: int, devices: Devices, pipeline: Pipeline) -> _Stage:
        stage = cls(client, number, devices, pipeline)
        weights: ShardType = ("uint8", (pipeline.weight_bytes,))
        gradients: ShardType = ("uint8", (pipeline.gradient_bytes,))
        activations: ShardType = ("uint8", (pipeline.activation_bytes,))
        loss: ShardType = ("uint8", (4,))
        # The first stage reads tokens, and the last one's backward pass begins with the loss.
        taken = (activations,) * (not stage.is_first)
        returned = (loss if stage.is_last else activations,)
        stage.first = await stage._compile("first", 0.0, (), (weights,))
        stage.forward = await stage._compile("forward", pipeline.forward, (weights, *taken), returned)
        backward = (weights, *taken, *returned)
        made = (gradients, *taken)
        stage.backward = await stage._compile("backward", pipeline.backward, backward, made)
        donated = (len(backward),)
        stage.backward_more = await stage._compile(
            "backward, more", pipeline.backward, (*backward, gradients), made, donated
        )
        # The other result of the last stage's update is the step's loss.
        stage.update = await stage._compile(
            "update", pipeline.update, (weights, gradients), (weights, *((loss,) * stage.is_last)), (0, 1)
        )
        return stage

    async def _compile(
        self,
        name: str,
        seconds: float,
        takes: tuple[ShardType, ...],
        gives: tuple[ShardType, ...],
        donated: tuple[int, ...] = (),
    ) -> int:
        null = NullProgram(f"{name}, stage {self._number}", seconds, takes, gives, donated)
        return await self._client.compile(null, self.devices)


class _Step:
    """Builds the program, in the order in which each stage is to do its part.

    In a wave, all stages work at the same time, each on a different micro-batch. After the wave, the
    stages send their results, the last stage first. Therefore no stage waits for an input before it has sent all
    results that do not depend on it.
    """

    def __init__(self, pipeline: Pipeline, stages: list[_Stage]) -> None:
        self.stages = stages
        self._micro_batches = pipeline.micro_batches
        self._nodes: list[Node] = []
        self._values = len(stages)  # that are defined
        # By stage and micro-batch: what it takes forward, and what its backward pass begins with.
        self._taken: dict[tuple[int, int], int] = {}
        self._returned: dict[tuple[int, int], int] = {}
        self._gradients: dict[int, int] = {}

    def build(self) -> tuple[list[Node], list[int]]:
        """Return the nodes, and the results: all new weights and the loss."""
        count = len(self.stages)
        for wave in range(self._micro_batches + count - 1):
            self._forward([(stage, wave - stage) for stage in reversed(range(count))])
        for wave in range(self._micro_batches + count - 1):
            self._backward([(stage, wave - (count - 1 - stage)) for stage in range(count)])
        results = []
        for number, stage in enumerate(self.stages):
            outputs = (stage.weights, stage.loss)[: 1 + stage.is_last]
            results.append(
                self._add(
                    call(stage.update, (number, self._gradients[number]), outputs, stage.devices, donated=(0, 1)),
                    len(outputs),
                )
            )
        return self._nodes, [*results, self._values - 1]

    def _forward(self, wave: list[tuple[int, int]]) -> None:
        made = {}
        for key in self._there_are(wave):
            stage = self.stages[key[0]]
            inputs = [key[0], *([self._taken[key]] if key in self._taken else [])]
            outputs = (stage.loss if stage.is_last else stage.activations,)
            made[key] = self._add(call(stage.forward, inputs, outputs, stage.devices))
        for (number, micro_batch), value in made.items():
            if self.stages[number].is_last:
                self._returned[number, micro_batch] = value
            else:
                target = self.stages[number + 1].activations
                self._taken[number + 1, micro_batch] = self._add(transfer(value, target))

    def _backward(self, wave: list[tuple[int, int]]) -> None:
        made = {}
        for key in self._there_are(wave):
            number, _ = key
            stage = self.stages[number]
            inputs = [number, *(of[key] for of in (self._taken, self._returned) if key in of)]
            gradients = self._gradients.get(number)
            function, donated = (stage.backward, ()) if gradients is None else (stage.backward_more, (len(inputs),))
            if gradients is not None:
                inputs.append(gradients)
            outputs = (stage.gradients, *((stage.activations,) * (not stage.is_first)))
            self._gradients[number] = self._add(
                call(function, inputs, outputs, stage.devices, donated=donated), len(outputs)
            )
            made[key] = self._gradients[number] + 1
        for (number, micro_batch), value in made.items():
            if not self.stages[number].is_first:
                target = self.stages[number - 1].activations
                self._returned[number - 1, micro_batch] = self._add(transfer(value, target))

    def _there_are(self, wave: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(stage, each) for stage, each in wave if 0 <= each < self._micro_batches]

    def _add(self, node: Node, outputs: int = 1) -> int:
        """The first of its values."""
        self._nodes.append(node)
        self._values += outputs
        return self._values - outputs
