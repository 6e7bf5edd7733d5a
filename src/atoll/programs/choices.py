"""`atoll.cond`, `atoll.switch` and `atoll.while_loop`: control flow that depends on values computed by devices.

They are like those of `jax.lax`, but their functions may be on any devices of the cluster. The client does not wait.
The controller has all functions that may run, and dispatches the chosen one when a device has computed the value
(section 4.5 of the paper).
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
    """Return `true_fun(*operands)` if `pred` is true, and `false_fun(*operands)` otherwise. For example::

        y = atoll.cond(loss < limit, on_island_0, on_both_islands, x)

    `pred` is a boolean that a device computes, or a number that is compared with 0. The call does not wait for it. The
    functions may do everything that a function of `atoll.program` may do, on any devices. Both are traced, and must
    return arrays of the same types and shardings.

    `cond` works inside and outside `atoll.program`. Outside, each pair of functions is traced once per type of
    operands, as with `jax.jit`: define the functions once, not in each step.

    If everything is on one mesh, this is `jax.lax.cond` in one compiled function. The same holds inside `jax.jit`.

    Raise TypeError if the results of the functions differ. The message names the difference.
    """
    if np.ndim(pred) != 0:
        raise TypeError(f"pred of atoll.cond must be a scalar, got {pred} of shape {np.shape(pred)}")
    if isinstance(pred, _KNOWN):
        return (true_fun if pred else false_fun)(*operands)
    return _dispatch("cond", (false_fun, true_fun), _cond, (pred, *operands))


def switch(index: Any, branches: Sequence[_Function], *operands: Any) -> Any:
    """Return `branches[index](*operands)`. Like `cond`, for an integer that is clamped to the range of branches."""
    functions = tuple(branches)
    if not functions:
        raise ValueError("atoll.switch needs at least one branch")
    if np.ndim(index) != 0:
        raise TypeError(f"index of atoll.switch must be a scalar, got {index} of shape {np.shape(index)}")
    if not np.issubdtype(jax.dtypes.result_type(index), np.integer):
        raise TypeError(f"index of atoll.switch must be an integer, got {index}")
    if isinstance(index, _KNOWN):
        return functions[min(max(int(index), 0), len(functions) - 1)](*operands)
    return _dispatch("switch", functions, _switch, (index, *operands))


def while_loop(cond_fun: _Function, body_fun: _Function, init_val: Any) -> Any:
    """Apply `body_fun` repeatedly to `init_val`, while `cond_fun` of the value is true. Return the last value.

    Like `jax.lax.while_loop`, for functions on any devices. `cond_fun` returns one boolean. `body_fun` returns arrays
    of the types and shardings that it takes. An uncommitted initial value moves to the devices on which the body puts
    it. Arrays that the body returns unchanged, and arrays that the functions close over, are not moved. If the body
    donates its argument, the array is consumed, except for the initial value.

    Each iteration takes a message from a host to the controller and back. An infinite loop runs until its session ends,
    and alternates with the work of other sessions.
    """
    return _dispatch("while_loop", (cond_fun, body_fun), _while_loop, (init_val,))


def _dispatch(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if internals.trace_state_clean() and backend.cluster() is not None:
        return _program(name, functions, kind)(*arguments)
    return kind(functions, *arguments)


def _program(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any]) -> Program:
    try:
        return _cached(name, functions, kind)
    except TypeError:  # a function is not hashable
        return _cached.__wrapped__(name, functions, kind)


@functools.lru_cache(maxsize=256)
def _cached(name: str, functions: tuple[_Function, ...], kind: Callable[..., Any]) -> Program:
    def run(*arguments: Any) -> Any:
        return kind(functions, *arguments)

    run.__name__ = run.__qualname__ = name
    return Program(run)


# ---- implementations in a program, in Python, and under JAX's transformations


def _cond(functions: tuple[_Function, _Function], pred: Any, *operands: Any) -> Any:
    trace = internals.current_trace()
    if isinstance(trace, ProgramTrace):
        decides = pred if jax.dtypes.result_type(pred) == np.bool_ else pred != 0
        return control_flow_tracing.switch(trace, "atoll.cond", decides, functions, ("false_fun", "true_fun"), operands)
    if internals.trace_state_clean():
        return functions[bool(pred)](*operands)
    return _transformed(jax.lax.cond, pred, functions[1], functions[0], *operands)


def _switch(functions: tuple[_Function, ...], index: Any, *operands: Any) -> Any:
    trace = internals.current_trace()
    if isinstance(trace, ProgramTrace):
        names = [f"branch {i}" for i in range(len(functions))]
        return control_flow_tracing.switch(trace, "atoll.switch", index, functions, names, operands)
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
    """Call the function of `jax.lax`, which supports transformations on one mesh. Explain errors about others."""
    try:
        return function(*arguments)
    except ValueError as error:
        error.add_note(
            "Under jit, grad, vmap and other transformations, atoll.cond, switch and while_loop are those of jax.lax, "
            "for functions on one mesh. For several meshes, call them in an atoll.program or outside any function."
        )
        raise
