"""`atoll.cond`, `atoll.switch` and `atoll.while_loop`: control flow over programs, decided by what devices compute.

As `jax.lax` has them, but for functions on any devices of the cluster. The client waits for nothing: the controller
gets all that may run, and dispatches what the data choose when a device has computed it (section 4.5 of the paper).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from atoll.client import backend
from atoll.client import jax_internals as internals
from atoll.programs import control_flow_tracing
from atoll.programs.program_tracing import ProgramTrace
from atoll.programs.traced_program import Program

internals.leave_out_of_tracebacks(__file__)

_Function = Callable[..., Any]
_KNOWN = (bool, int, np.bool_, np.integer)


def cond(pred: Any, true_fun: _Function, false_fun: _Function, *operands: Any) -> Any:
    """`true_fun(*operands)` where `pred` is true, else `false_fun(*operands)`. For example::

        y = atoll.cond(loss < limit, on_island_0, on_both_islands, x)

    `pred` is a boolean that a device computes, or a number that is compared with 0; the call does not wait for it. The
    functions may be, and do, whatever a function of `atoll.program` may, on any devices; both are traced. They must
    return arrays of the same types and shardings. Works inside and outside of `atoll.program`; outside, each pair of
    functions is traced once for each type of operands, as a function of jit is: make them once, not in each step.

    Where all is on one mesh, this is `jax.lax.cond` in one compiled function, as it is inside of `jax.jit`.

    Raises TypeError where the functions return different things; names what differs.
    """
    if np.ndim(pred) != 0:
        raise TypeError(f"pred of pw.cond must be a scalar, got {pred} of shape {np.shape(pred)}")
    if isinstance(pred, _KNOWN):
        return (true_fun if pred else false_fun)(*operands)
    return _dispatch("cond", (false_fun, true_fun), _cond, (pred, *operands))


def switch(index: Any, branches: Sequence[_Function], *operands: Any) -> Any:
    """`branches[index](*operands)`. As `cond`, for an integer; one that is out of range chooses the nearest branch."""
    functions = tuple(branches)
    if not functions:
        raise ValueError("pw.switch needs at least one branch")
    if np.ndim(index) != 0:
        raise TypeError(f"index of pw.switch must be a scalar, got {index} of shape {np.shape(index)}")
    if not np.issubdtype(jax.dtypes.result_type(index), np.integer):
        raise TypeError(f"index of pw.switch must be an integer, got {index}")
    if isinstance(index, _KNOWN):
        return functions[min(max(int(index), 0), len(functions) - 1)](*operands)
    return _dispatch("switch", functions, _switch, (index, *operands))


def while_loop(cond_fun: _Function, body_fun: _Function, init_val: Any) -> Any:
    """`body_fun` again and again, on what it has returned before, for as long as `cond_fun` of that is true.

    As `jax.lax.while_loop`, for functions on any devices. `cond_fun` returns one boolean. `body_fun` returns arrays of
    the types and shardings that it takes; an initial value on no device in particular goes to where the body puts it.
    Arrays that the body returns as they are, and those that the functions use from around them, stay where they are.
    What the body's functions donate of its argument is consumed, but for the initial value.

    Each time around costs a message from a host to the controller and back. A loop without an end runs until its
    session ends, and takes its turns with the work of others.
    """
    return _dispatch("while_loop", (cond_fun, body_fun), _while_loop, (init_val,))


def _dispatch(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if internals.trace_state_clean() and backend.cluster() is not None:
        return _program(name, functions, kind)(*arguments)
    return kind(functions, *arguments)


def _program(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any]) -> Program:
    try:
        return _cached(name, functions, kind)
    except TypeError:  # one of them has no hash
        return _cached.__wrapped__(name, functions, kind)


@functools.lru_cache(maxsize=256)
def _cached(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any]) -> Program:
    def run(*arguments: Any) -> Any:
        return kind(functions, *arguments)

    run.__name__ = run.__qualname__ = name
    return Program(run)


# ---- in a program, under a transformation of JAX's, and by Python


def _cond(functions: tuple[_Function, _Function], pred: Any, *operands: Any) -> Any:
    trace = internals.current_trace()
    if isinstance(trace, ProgramTrace):
        decides = pred if jax.dtypes.result_type(pred) == np.bool_ else pred != 0
        return control_flow_tracing.switch(trace, "pw.cond", decides, functions, ("false_fun", "true_fun"), operands)
    if internals.trace_state_clean():
        return functions[bool(pred)](*operands)
    return _transformed(jax.lax.cond, pred, functions[1], functions[0], *operands)


def _switch(functions: tuple[_Function, ...], index: Any, *operands: Any) -> Any:
    trace = internals.current_trace()
    if isinstance(trace, ProgramTrace):
        names = [f"branch {i}" for i in range(len(functions))]
        return control_flow_tracing.switch(trace, "pw.switch", index, functions, names, operands)
    if internals.trace_state_clean():
        return functions[min(max(int(index), 0), len(functions) - 1)](*operands)
    return _transformed(jax.lax.switch, index, functions, *operands)


def _while_loop(functions: tuple[_Function, _Function], value: Any) -> Any:
    trace = internals.current_trace()
    if isinstance(trace, ProgramTrace):
        return control_flow_tracing.while_loop(trace, *functions, value)
    if internals.trace_state_clean():
        while bool(functions[0](value)):
            value = functions[1](value)
        return value
    return _transformed(jax.lax.while_loop, *functions, value)


def _transformed(function: _Function, *arguments: Any) -> Any:
    """JAX's own, which its transformations know: on one mesh. Its errors say what is on others."""
    try:
        return function(*arguments)
    except ValueError as error:
        error.add_note(
            "Under jit, grad, vmap and other transformations, atoll.cond, switch and while_loop are those of jax.lax, "
            "for functions on one mesh. Over several meshes, call them in an atoll.program or by themselves."
        )
        raise
