"""`atoll.stage_boundary`: the mark in a model where one part of a pipeline ends and the next begins.

A primitive of its own, which is the identity: outside of `atoll.pipeline` it does nothing, under whatever
transformation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from atoll.client.jax_internals import leave_out_of_tracebacks

leave_out_of_tracebacks(__file__)

Tree = TypeVar("Tree")

boundary_p = Primitive("stage_boundary")
boundary_p.multiple_results = True


def stage_boundary(x: Tree) -> Tree:
    """Marks where a part ends, in the function that `atoll.pipeline` is given. Returns `x`, an array or a tree of them.

        h = block(params, h)
        h = atoll.stage_boundary(h)   # what is computed from here on is the next stage's

    `x` is what later parts get of this one. A value that they use besides it is sent, too, and `pipeline` warns of it;
    `stage_boundary((h, mask))` names both. It stands outside of `jax.checkpoint`, `jax.lax.scan` and the like, which
    JAX takes as one computation. Everywhere else than in a pipeline it is the identity.
    """
    leaves, tree = jax.tree.flatten(x)
    marked: Tree = jax.tree.unflatten(tree, boundary_p.bind(*leaves))
    return marked


def _jvp(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    # Only values are marked: a pipeline is cut before it is differentiated.
    return boundary_p.bind(*values), list(tangents)


def _batch(values: Sequence[Any], dimensions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return boundary_p.bind(*values), list(dimensions)


boundary_p.def_impl(lambda *values: list(values))
boundary_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[boundary_p] = _jvp
ad.primitive_transposes[boundary_p] = lambda cotangents, *_: list(cotangents)
batching.primitive_batchers[boundary_p] = _batch
mlir.register_lowering(boundary_p, lambda _, *values: list(values))
