"""Splits transfers of many arrays, so that each node is lowered in a short step."""

from __future__ import annotations

from itertools import pairwise

from msgspec.structs import replace

from atoll.ir.program import Node, Program, Transfer
from atoll.ir.steps import Steps

# The arrays of one transfer. Later passes take up to 10 ms for them.
MAX_ARRAYS = 500


def split_wide_transfers(program: Program) -> Steps[Program]:
    """Replace each transfer of more than `MAX_ARRAYS` arrays by several transfers. Raises no errors."""
    nodes: list[Node] = []
    for node in program.nodes:
        if isinstance(node, Transfer) and len(node.inputs) > MAX_ARRAYS:
            bounds = [*range(0, len(node.inputs), MAX_ARRAYS), len(node.inputs)]
            nodes.extend(
                replace(node, inputs=node.inputs[start:stop], outputs=node.outputs[start:stop])
                for start, stop in pairwise(bounds)
            )
        else:
            nodes.append(node)
        yield
    return program if len(nodes) == len(program.nodes) else replace(program, nodes=tuple(nodes))
