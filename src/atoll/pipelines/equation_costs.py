"""What equations cost, by their shapes, and where a list of them is cut into parts that cost alike. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.pipelines import equations as eq

# Parts may cost so much more than the costliest of the most even cut does, where fewer bytes cross then.
SLACK = 1.25


def flops(equation: Any) -> float:
    """Operations that it takes: those of products and convolutions, of what runs inside of it, else one an element."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0].aval) * math.prod(int(left[d]) for d in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0].aval) * float(math.prod(kernel) / outputs)
    inside = [sum(map(flops, each.eqns)) for each in eq.inner(equation)]
    if not inside:
        return float(sum(_size(var.aval) for var in equation.outvars))
    if name == "cond":
        return max(inside)
    return sum(inside) * (params["length"] if name == "scan" else 1)


def _size(aval: Any) -> int:
    return int(math.prod(getattr(aval, "shape", ())))


def cut_evenly(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Where a list of items begins each of its parts but the first.

    `crossing[i]` are the bytes that would cross a cut before item i. Of all cuts whose costliest part costs at most
    `SLACK` times that of the most even one, this is one that the fewest bytes cross, and of these the most even. There
    are as many items as parts or more.
    """
    count = len(costs)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    part = before[None, :] - before[:, None]  # from item i to before item j
    part[np.tril_indices(count + 1)] = np.inf
    worst = part[0].copy()
    for _ in range(parts - 1):
        worst = np.min(np.maximum(worst[:, None], part), axis=0)
    bound = SLACK * float(worst[count])
    # Less than a byte for each part: it decides only where as many bytes cross.
    toll = np.where(part <= bound, 0.5 / parts * (np.minimum(part, bound) / max(bound, 1.0)) ** 2, np.inf)
    toll[1:count] += np.asarray(crossing, float)[1:, None]
    least = toll[0].copy()
    origins = []
    for _ in range(parts - 1):
        ways = least[:, None] + toll
        origins.append(np.argmin(ways, axis=0))
        least = np.min(ways, axis=0)
    ends = [count]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    starts = ends[1:][::-1]
    assert all(a < b for a, b in pairwise([0, *starts, count]))
    return starts
