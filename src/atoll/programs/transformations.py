"""Derivatives and batches of a program, which are also programs.

`jax.grad(step)(x)` takes two launches: of a program that computes the result and the residuals for the derivative, and
of a backward program. `jax.vmap(step)(xs)` takes one. The program is one JAX primitive, and JAX's rules for it
transform the program's function and make a program of the transformed function. Its arrays may be on any devices; the
rules do not move them.

When everything is traced into one computation (jit, scan, another program), the call runs the function instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from atoll.client import jax_internals as internals
from atoll.errors import ProgramError

internals.leave_out_of_tracebacks(__file__)


class NeedsPlaces(ProgramError):
    """A function needs the shardings of its arrays, but only their types are known.

    Such a program cannot be transformed as a whole: its function is called under the transformation instead.
    """


class FlatProgram:
    """A function from flat arrays to a list of arrays, its program, and its transformed programs.

    `make(fun)` creates a program.
    """

    def __init__(self, fun: Callable[..., list[Any]], make: Callable[[Callable[..., Any]], Any]) -> None:
        self.fun = fun
        self.run = make(fun)
        self._make = make
        self._derived: dict[Hashable, FlatProgram] = {}
        self._linearized: dict[Hashable, Any] = {}
        self._types: dict[Hashable, tuple[Any, ...]] = {}

    def result_types(self, *avals: Any) -> tuple[Any, ...]:
        """Return the types of the results for arguments of the types `avals`."""
        found = self._types.get(avals)
        if found is None:
            found = self._types[avals] = tuple(jax.make_jaxpr(self.fun)(*map(_described, avals)).out_avals)
        return found

    def set_result_types(self, avals: tuple[Any, ...], types: Sequence[Any]) -> None:
        """Set the results' types, which cannot be traced if the function needs the shardings of its arguments."""
        self._types[avals] = tuple(types)

    def linearized(self, varied: tuple[bool, ...]) -> Any:
        """Return a program for the results, and for a linear function from changes of `varied` arguments to theirs."""
        found = self._linearized.get(varied)
        if found is None:

            def linearize(*arguments: Any) -> Any:
                changing, fixed = _split(arguments, varied)
                results, linear = jax.linearize(lambda *given: self.fun(*_joined(given, fixed, varied)), *changing)
                return results, linear

            linearize.__name__ = linearize.__qualname__ = f"linearized {self.fun.__name__}"
            found = self._linearized[varied] = self._make(linearize)
        return found

    def changes(self, linear: Any, count: int, kept: tuple[bool, ...]) -> FlatProgram:
        """Return the program that applies a `linear` function of `linearized`.

        Its arguments are the residuals of the function and `count` changes. It returns only the `kept` results.
        """
        tree = jax.tree.structure(linear)

        def change(*arguments: Any) -> list[Any]:
            left = len(arguments) - count
            changes = jax.tree.unflatten(tree, arguments[:left])(*arguments[left:])
            return [each for each, keep in zip(changes, kept, strict=True) if keep]

        return self._derive(("changes", tree, count, kept), change)

    def transposed(self, linear: tuple[bool, ...], types: tuple[Any, ...], given: tuple[bool, ...]) -> FlatProgram:
        """Return the transposed program: it computes the cotangents of the `linear` arguments, which have these types.

        Its arguments are the other arguments, and the cotangents of the `given` results.
        """

        def transpose(*arguments: Any) -> list[Any]:
            count = len(linear) - sum(linear)

            def forward(*changing: Any) -> list[Any]:
                results = self.fun(*_joined(changing, arguments[:count], linear))
                return [each for each, wanted in zip(results, given, strict=True) if wanted]

            backward = jax.linear_transpose(forward, *map(_described, types))
            return list(backward(list(arguments[count:])))

        return self._derive(("transposed", linear, types, given), transpose)

    def batched(self, dims: tuple[Any, ...], size: Any, name: Any, spmd_name: Any) -> FlatProgram:
        """Return the batched program. `dims` has the position of each argument's batch dimension, or None.

        The batch dimension of results is the first.
        """
        names = {} if not isinstance(name, Hashable) or type(name) is object else {"axis_name": name}
        batch = jax.vmap(self.fun, in_axes=dims, out_axes=0, axis_size=size, spmd_axis_name=spmd_name, **names)
        return self._derive(("batched", dims, size, name, spmd_name), batch)

    def _derive(self, key: Hashable, fun: Callable[..., list[Any]]) -> FlatProgram:
        found = self._derived.get(key)
        if found is None:

            @functools.wraps(self.fun)
            def derived(*arguments: Any) -> list[Any]:
                return fun(*arguments)

            derived.__name__ = derived.__qualname__ = f"{key[0]} {self.fun.__name__}"  # type: ignore[index]
            found = self._derived[key] = FlatProgram(derived, self._make)
        return found


def bind(flat: FlatProgram, leaves: Sequence[Any]) -> list[Any]:
    """Call the program under the current transformation."""
    return list(program_p.bind(*leaves, flat=flat))


# ---- JAX's rules


def _run(*arguments: Any, flat: FlatProgram) -> Any:
    return flat.run(*arguments)


def _result_types(*avals: Any, flat: FlatProgram) -> Any:
    return flat.result_types(*avals)


def _inline(*arguments: Any, flat: FlatProgram) -> Any:
    return flat.fun(*arguments)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, flat: FlatProgram) -> Any:
    varied = tuple(not isinstance(each, internals.Zero) for each in tangents)
    results, linear = flat.linearized(varied)(*primals)
    types = [jax.typeof(each).to_tangent_aval() for each in results]
    kept = tuple(each.dtype != jax.dtypes.float0 for each in types)
    changes = flat.changes(linear, sum(varied), kept)
    made = iter(
        bind(changes, [*jax.tree.leaves(linear), *(each for each in tangents if not isinstance(each, internals.Zero))])
    )
    return results, [next(made) if keep else internals.Zero(aval) for aval, keep in zip(types, kept, strict=True)]


def _transpose(cotangents: Sequence[Any], *arguments: Any, flat: FlatProgram) -> list[Any]:
    linear = tuple(internals.is_undefined_primal(each) for each in arguments)
    given = tuple(not isinstance(each, internals.Zero) for each in cotangents)
    types, known = _split(
        [each.aval if is_linear else each for each, is_linear in zip(arguments, linear, strict=True)], linear
    )
    made = iter(
        bind(
            flat.transposed(linear, tuple(types), given),
            [*known, *(each for each in cotangents if not isinstance(each, internals.Zero))],
        )
    )
    return [next(made) if is_linear else None for is_linear in linear]


def _batch(axis: Any, arguments: Sequence[Any], dims: Sequence[Any], *, flat: FlatProgram) -> Any:
    if all(each is None for each in dims):
        return bind(flat, arguments), [None] * len(flat.result_types(*map(jax.typeof, arguments)))
    batched = flat.batched(tuple(dims), axis.size, axis.name, axis.spmd_name)
    results = bind(batched, arguments)
    return results, [0] * len(results)


program_p = internals.make_primitive("program", _run, _result_types, _inline, _jvp, _transpose, _batch)


# ---- arguments


def _split(values: Sequence[Any], which: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values for which `which` is true, and the others."""
    pairs = list(zip(values, which, strict=True))
    return [value for value, chosen in pairs if chosen], [value for value, chosen in pairs if not chosen]


def _joined(chosen: Sequence[Any], others: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    first, second = iter(chosen), iter(others)
    return [next(first) if is_chosen else next(second) for is_chosen in which]


def _described(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
