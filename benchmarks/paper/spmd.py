"""A training step that is one computation on all devices, in a program of one node."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.devices.null.null_program import NullProgram
from atoll.ir.types import ShardType
from atoll.session.bare import BareClient, call, program, sharded
from benchmarks.paper.training import Training


async def make_training(client: BareClient, devices: Sequence[int], seconds: float, weight_bytes: int) -> Training:
    """A step takes so long; `weight_bytes` lie on each device."""
    weights: ShardType = ("uint8", (weight_bytes,))
    loss: ShardType = ("uint8", (4,))
    specs = sharded(devices, weight_bytes), sharded(devices)
    first = await client.compile(NullProgram("first", 0.0, (), (weights,)), devices)
    step = await client.compile(NullProgram("step", seconds, (weights,), (weights, loss), (0,)), devices)
    step_node = call(step, (0,), specs, devices, donated=(0,))
    return Training(
        client.register(program("first weights", (), [call(first, (), specs[:1], devices)], (0,))),
        client.register(program("step", specs[:1], [step_node], (1, 2))),
        weights=1,
    )
