"""A training step on two islands with different examples. Each sends its gradients to the other, in one program."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.devices.null.null_program import NullProgram
from atoll.ir.program import Node, Transfer
from atoll.ir.types import ShardType
from atoll.session.bare import BareClient, call, program, sharded
from benchmarks.paper.training import Training


async def make_training(
    client: BareClient, islands: Sequence[Sequence[int]], seconds: float, weight_bytes: int, gradient_bytes: int
) -> Training:
    """The gradients, with their sum in the island, take `seconds`; bytes are those of one device. To apply them takes
    no time: it would be the same on one island."""
    weights: ShardType = ("uint8", (weight_bytes,))
    gradients: ShardType = ("uint8", (gradient_bytes,))
    loss: ShardType = ("uint8", (4,))
    weight_specs = tuple(sharded(devices, weight_bytes) for devices in islands)
    gradient_specs = tuple(sharded(devices, gradient_bytes) for devices in islands)

    async def compiled(name: str, seconds: float, takes: list[ShardType], gives: list[ShardType]) -> list[int]:
        donated = (0,) if name == "update" else ()
        null = NullProgram(name, seconds, tuple(takes), tuple(gives), donated)
        return [await client.compile(null, devices) for devices in islands]

    first = await compiled("first", 0.0, [], [weights])
    compute = await compiled("gradients", seconds, [weights], [gradients])
    update = await compiled("update", 0.0, [weights, gradients, gradients], [weights, loss])
    nodes: list[Node] = [
        *(call(compute[i], (i,), gradient_specs[i : i + 1], islands[i]) for i in range(2)),
        # Both ways in one node: of two transfers, an island would await the first before it sent the second.
        Transfer((2, 3), (gradient_specs[1], gradient_specs[0]), reshard=True),
        *(
            call(update[i], (i, 2 + i, 5 - i), (weight_specs[i], sharded(islands[i])), islands[i], donated=(0,))
            for i in range(2)
        ),
    ]
    weights_and_loss = (6, 8, 9)  # after two weights, two gradients and what was sent of them
    made = [call(first[i], (), weight_specs[i : i + 1], islands[i]) for i in range(2)]
    return Training(
        client.register(program("first weights", (), made, (0, 1))),
        client.register(program("step", weight_specs, nodes, weights_and_loss)),
        weights=2,
    )
