"""`atoll.stage_boundary`: a mark in a model between two parts of a pipeline.

The mark is a JAX primitive. Outside `atoll.pipeline`, it is the identity under all transformations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.interpreters import ad, batching, mlir

from atoll.client.jax_internals import Primitive, leave_out_of_tracebacks

leave_out_of_tracebacks(__file__)

Tree = TypeVar("Tree")

boundary_p = Primitive("stage_boundary")
boundary_p.multiple_results = True


def stage_boundary(x: Tree) -> Tree:
    """Mark the end of a part in a loss function for `atoll.pipeline`. Return `x`, an array or a tree of arrays::

        h = block(params, h)
        h = atoll.stage_boundary(h)   # later operations belong to the next part

    `x` holds the values that later parts use from this part. If they use another value, it is also sent, and `pipeline`
    warns about it; `stage_boundary((h, mask))` marks both. Call it outside `jax.checkpoint`, `jax.lax.scan` and similar
    functions, which JAX treats as one computation. Outside a pipeline, the function is the identity.
    """
    leaves, tree = jax.tree.flatten(x)
    marked: Tree = jax.tree.unflatten(tree, boundary_p.bind(*leaves))
    return marked


def _jvp(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    # Mark only values, because a pipeline is cut before it is differentiated.
    return boundary_p.bind(*values), list(tangents)


def _batch(values: Sequence[Any], dimensions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return boundary_p.bind(*values), list(dimensions)


boundary_p.def_impl(lambda *values: list(values))
boundary_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[boundary_p] = _jvp
ad.primitive_transposes[boundary_p] = lambda cotangents, *_: list(cotangents)
batching.primitive_batchers[boundary_p] = _batch
mlir.register_lowering(boundary_p, lambda _, *values: list(values))
