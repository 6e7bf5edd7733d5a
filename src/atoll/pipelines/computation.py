"""A traced function as a flat list of JAX's equations, which a pipeline cuts into parts.

Nested jit calls are replaced by their equations. Scans, checkpoints, custom derivatives and other control flow stay one
equation each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from atoll.client.jax_internals import Literal, Var, leave_out_of_tracebacks
from atoll.pipelines import equations as eq

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

leave_out_of_tracebacks(__file__)

Atom = Any  # a jax.extend.core.Var or Literal
Equation = Any  # a jax.extend.core.JaxprEqn


@dataclass(frozen=True)
class Computation:
    """`equations` in an order in which they can run, from `inputs` and `constants` to `outputs`."""

    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[Var, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> list[Any]:
        """Compute the outputs, also under JAX transformations."""
        values: dict[Var, Any] = dict(self.constants)
        values.update(zip(self.inputs, arguments, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in self.equations:
            results = eq.run(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in self.outputs]

    def cut(self, outputs: Sequence[Atom], given: Collection[Var] = ()) -> Computation:
        """Return the computation of `outputs` from the values in `given` and from this computation's inputs.

        The result has only the inputs that it uses: first this computation's inputs, then `given`, each in order.
        """
        given = dict.fromkeys(given)
        wanted = {atom for atom in outputs if isinstance(atom, Var)}
        kept = []
        for equation in reversed(self.equations):
            if any(var in wanted and var not in given for var in equation.outvars):
                kept.append(equation)
                wanted.update(atom for atom in equation.invars if isinstance(atom, Var))
        made = {var for equation in kept for var in equation.outvars if var not in given}
        used = [var for var in dict.fromkeys((*self.inputs, *given)) if var in wanted and var not in made]
        constants = {var: value for var, value in self.constants.items() if var in wanted and var not in given}
        return Computation(tuple(reversed(kept)), tuple(used), tuple(outputs), constants)

    def taking(self, inputs: Sequence[Var]) -> Computation:
        """Return the computation with the given inputs, which must include all that it uses."""
        return Computation(self.equations, tuple(inputs), self.outputs, self.constants)


def trace(function: Callable[..., Any], *avals: Any) -> tuple[Computation, Any]:
    """Trace a function of trees of arrays. Return its computation and the tree of its results' types."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*avals)
    return flat(closed), shapes


def flat(closed: ClosedJaxpr, keep: Callable[[Equation], bool] = lambda _: False) -> Computation:
    """Flatten a jaxpr. Jit calls for which `keep` returns true stay calls."""
    equations: list[Equation] = []
    constants: dict[Var, Any] = {}
    inputs = tuple(closed.jaxpr.invars)
    outputs = _flatten(closed, inputs, equations, constants, keep)
    return Computation(tuple(equations), inputs, tuple(outputs), constants)


def _flatten(
    closed: ClosedJaxpr,
    arguments: Iterable[Atom],
    equations: list[Equation],
    constants: dict[Var, Any],
    keep: Callable[[Equation], bool],
) -> list[Atom]:
    """Append the equations with new variables, and return the atoms of the outputs."""
    names: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        names[var] = Var(var.aval)
        constants[names[var]] = value

    def named(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names[atom]

    for equation in closed.jaxpr.eqns:
        operands = [named(atom) for atom in equation.invars]
        inner = eq.plain_jit(equation)
        if inner is not None and not keep(equation):
            results = _flatten(inner, operands, equations, constants, keep)
            names.update(zip(equation.outvars, results, strict=True))
            continue
        results = [Var(var.aval) for var in equation.outvars]
        names.update(zip(equation.outvars, results, strict=True))
        equations.append(equation.replace(invars=operands, outvars=results))
    return [named(atom) for atom in closed.jaxpr.outvars]


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this type."""
    try:
        return int(math.prod(aval.shape) * aval.dtype.itemsize)
    except (AttributeError, TypeError):  # keys, tokens
        return int(math.prod(getattr(aval, "shape", ()))) * 8


def is_inexact(aval: Any) -> bool:
    """Return whether JAX can differentiate with respect to values of this type."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact))


def structure(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the type without a sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
