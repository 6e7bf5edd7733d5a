"""Redirects a function object of JAX, for scripts that already hold a reference to it.

A script may look up a function before Atoll's client exists: `from jax.dlpack import from_dlpack`, or a call whose
argument creates the client, `start_transfer_server(jax.devices()[0].client)`. Replacing the name in its module is too
late for such a script. Therefore the function object itself is changed to call the replacement.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from types import FunctionType
from typing import Any

_TYPE_VECTORCALL_OFFSET = 56  # offset of PyTypeObject.tp_vectorcall_offset, in CPython 3.8 and later
_HAS_VECTORCALL = 1 << 11  # in tp_flags
_COUNT_MASK = (1 << (8 * ctypes.sizeof(ctypes.c_size_t) - 1)) - 1  # without PY_VECTORCALL_ARGUMENTS_OFFSET
_Vectorcall = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_void_p
)
_kept: list[Any] = []  # objects that redirected functions refer to; never freed


class FailedCall:
    """The result of a redirected native function that raised. Its first use raises the exception.

    C code calls such a function, and a Python exception cannot pass through it.
    """

    def __init__(self, error: Exception) -> None:
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["error"]


def redirect(function: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """Redirect the function object to `wrap(original)`, and return `wrap(original)`.

    `original` behaves as the function did before. A function that cannot be changed, for instance one with a closure,
    is not changed; then only callers of the returned function get the new behavior.
    """
    if type(function) is FunctionType and not function.__code__.co_freevars:
        return _redirect_python(function, wrap)
    if type(function).__name__ == "nb_func" and _knows_layout(function):
        return _redirect_native(function, wrap)
    return wrap(function)


def _redirect_python(function: FunctionType, wrap: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__, original.__doc__ = function.__kwdefaults__, function.__doc__
    original.__annotations__, original.__dict__ = function.__annotations__, dict(function.__dict__)
    new = wrap(original)
    name = f"_atoll_{len(_kept)}"
    _kept.append(new)
    function.__globals__[name] = new
    scope: dict[str, Any] = {}
    exec(f"def redirected(*args, **kwargs): return {name}(*args, **kwargs)", scope)
    function.__code__ = scope["redirected"].__code__.replace(co_name=function.__name__)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__wrapped__ = original  # type: ignore[attr-defined]  # for inspect.signature
    return new


# ---- functions of nanobind


def _knows_layout(function: Any) -> bool:
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    return (
        sys.implementation.name == "cpython"
        and has_gil
        and ctypes.sizeof(ctypes.c_void_p) == 8
        and bool(type(function).__flags__ & _HAS_VECTORCALL)
        and 0 < _offset(function) < type(function).__basicsize__
    )


def _offset(function: Any) -> int:
    """Return the offset of the pointer to the C function in objects of the function's type."""
    return ctypes.c_ssize_t.from_address(id(type(function)) + _TYPE_VECTORCALL_OFFSET).value


def _redirect_native(function: Any, wrap: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    slot = ctypes.c_void_p.from_address(id(function) + _offset(function))
    call = _Vectorcall(slot.value or 0)

    def original(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        names = tuple(kwargs)
        pointers = (ctypes.c_void_p * len(values))(*map(id, values))
        return call(id(function), pointers, len(args), id(names) if names else None)

    original.__doc__, original.__wrapped__ = function.__doc__, function  # type: ignore[attr-defined]
    new = wrap(original)

    def entry(_: int, pointers: Any, flags: int, names_pointer: int | None) -> Any:
        count = flags & _COUNT_MASK
        names = ctypes.cast(names_pointer, ctypes.py_object).value if names_pointer else ()
        values = [ctypes.cast(pointers[i], ctypes.py_object).value for i in range(count + len(names))]
        try:
            return new(*values[:count], **dict(zip(names, values[count:], strict=True)))
        except Exception as error:
            return FailedCall(error)

    callback = _Vectorcall(entry)
    _kept.append((function, callback))
    slot.value = ctypes.cast(callback, ctypes.c_void_p).value
    return new
