"""Operations on JAX's equations, including all uses of JAX's private API for them (as of JAX 0.10 to 0.12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import source_info_util
from jax._src.pjit import jit_p
from jax._src.sharding_impls import UNSPECIFIED
from jax.sharding import Mesh, NamedSharding

from atoll.client.jax_internals import Literal, leave_out_of_tracebacks

leave_out_of_tracebacks(__file__)

Equation = Any  # a jax.extend.core.JaxprEqn


def run(equation: Equation, arguments: Sequence[Any]) -> list[Any]:
    """Run an equation with its location in the user's code and in the context in which it was traced."""
    primitive = equation.primitive
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        source_info_util.user_context(equation.source_info.traceback, name_stack=names),
        equation.ctx.manager,
    ):
        results = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def plain_jit(equation: Equation) -> Any:
    """Return the ClosedJaxpr of a jit call without devices and shardings; None for other equations."""
    if equation.primitive is not jit_p:
        return None
    named = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    return equation.params["jaxpr"] if all(each is UNSPECIFIED for each in named) else None


def place(equation: Equation) -> str:
    """Return the place of an equation in the user's code: the layer, if the model names its layers, and the line."""
    line = source_info_util.summarize(equation.source_info)
    layer = str(equation.source_info.name_stack)
    return f"{layer}, {line}" if layer else line


def on_mesh(equation: Equation, mesh: Mesh) -> Equation:
    """Return the equation with `mesh` in place of the meshes that it names, if they have the same axes.

    The model is traced once, so its sharding constraints and shard_maps name one mesh, but each stage has its own.
    """
    changed = {name: _moved(value, mesh) for name, value in equation.params.items()}
    if all(changed[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=changed)


def _moved(value: Any, mesh: Mesh) -> Any:
    if isinstance(value, NamedSharding):
        return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind) if _fits(value.mesh, mesh) else value
    if isinstance(value, Mesh):
        return mesh if _fits(value, mesh) else value
    if isinstance(value, tuple | list):
        parts = [_moved(each, mesh) for each in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    jaxpr = getattr(value, "jaxpr", None)
    if hasattr(jaxpr, "eqns") and type(jaxpr) is not type(value):  # a ClosedJaxpr, which JAX 0.12 no longer has
        inside = _moved(jaxpr, mesh)
        return value if inside is jaxpr else value.replace(jaxpr=inside)
    if hasattr(value, "eqns"):
        equations = [on_mesh(each, mesh) for each in value.eqns]
        if all(a is b for a, b in zip(equations, value.eqns, strict=True)):
            return value
        return value.replace(eqns=equations)
    return value


def _fits(one: Any, other: Mesh) -> bool:
    """Return whether the meshes have the same axes. An abstract mesh, which names no devices, does not match."""
    return isinstance(one, Mesh) and one.axis_names == other.axis_names and dict(one.shape) == dict(other.shape)


def inner(equation: Equation) -> list[Any]:
    """Return the jaxprs that an equation runs, such as the body of a scan or a checkpoint."""
    found: list[Any] = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                found.append(each)
    return found


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)
