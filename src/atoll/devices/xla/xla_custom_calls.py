"""Custom calls of XLA's devices that are Python functions of this process, through XLA's foreign function interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from jax._src.lib import xla_client as xc

from atoll.protocol.questions import ADDRESS_CALL

# The first fields of most structures.
_HEAD = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class Version(ctypes.Structure):
    _fields_ = (*_HEAD, ("numbers", ctypes.c_int * 2))


# Functions of XLA_FFI_Api between the two that this module uses.
_OTHERS = (
    *("get_message", "destroy_error", "register_handler", "get_stream", "register_type", "get_context", "set_state"),
    *("get_state", "allocate", "free", "schedule", "num_threads", "create_future", "set_available", "set_error"),
)


class Api(ctypes.Structure):
    """The beginning of XLA_FFI_Api."""

    _fields_ = (
        *_HEAD,
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _OTHERS),
        ("get_run_id", ctypes.c_void_p),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int))


class _RunIdArguments(ctypes.Structure):
    _fields_ = (*_HEAD, ("context", ctypes.c_void_p), ("run_id", ctypes.c_int64))


_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))
_GetRunId = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_RunIdArguments))


class Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", Version))


class Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )


class FfiBuffer(ctypes.Structure):
    """The beginning of XLA_FFI_Buffer."""

    _fields_ = (*_HEAD, ("dtype", ctypes.c_int), ("data", ctypes.c_void_p))


class FfiBuffers(ctypes.Structure):
    """XLA_FFI_Args or XLA_FFI_Rets."""

    _fields_ = (
        *_HEAD,
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(FfiBuffer))),
    )


class Scalar(ctypes.Structure):
    """XLA_FFI_Scalar."""

    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.c_void_p))


class Attributes(ctypes.Structure):
    """XLA_FFI_Attrs, with scalars only."""

    _fields_ = (
        *_HEAD,
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(Scalar))),
    )


class CallFrame(ctypes.Structure):
    """The beginning of XLA_FFI_CallFrame (jaxlib's include/xla/ffi/api/c_api.h)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", FfiBuffers),
        ("results", FfiBuffers),
        ("attributes", Attributes),
    )


_METADATA = 1
EXECUTE = 3  # the stage in which a program runs
_CANCELLED = 1
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
_handlers: list[Any] = []  # XLA keeps only their addresses


def register(target: str, run: Callable[[CallFrame], int | None]) -> None:
    """Make custom calls named `target` on CPU devices call `run`, on one of XLA's threads.

    `run` must not raise. It returns None, or the result of `error` to end the program. The registration is permanent.
    """
    register_address(target, address_of(run))


def address_of(run: Callable[[CallFrame], int | None]) -> int:
    """Return the address of a handler for XLA that calls `run`: see `register`."""

    def handle(frame: Any) -> int | None:
        extension = frame.contents.extension
        if extension and extension.contents.type == _METADATA:  # XLA queries the handler's version of the interface
            extension.contents.metadata.contents.version.numbers = frame.contents.api.contents.version.numbers
            return None
        return run(frame.contents) if frame.contents.stage == EXECUTE else None

    handler = _Handler(handle)
    _handlers.append(handler)
    return ctypes.cast(handler, ctypes.c_void_p).value or 0


def register_address(target: str, address: int, platform: str = "cpu") -> None:
    """Make custom calls named `target` on devices of `platform` call the handler at this address."""
    xc.register_custom_call_target(target, capsule(address), platform=platform, api_version=1)


def capsule(address: int) -> Any:
    """Return an address in the form that jaxlib takes."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new_capsule(address, b"xla._CUSTOM_CALL_TARGET", None)


def run_id(frame: CallFrame) -> int:
    """Return the `launch_id` of the calling run."""
    arguments = _RunIdArguments(ctypes.sizeof(_RunIdArguments), None, frame.context, 0)
    _GetRunId(frame.api.contents.get_run_id)(ctypes.byref(arguments))
    return int(arguments.run_id)


def error(frame: CallFrame, text: str) -> int | None:
    """Return a CANCELLED error for XLA, which takes ownership."""
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text.encode(), _CANCELLED)
    made: int | None = _CreateError(frame.api.contents.create_error)(ctypes.byref(arguments))
    return made


def _write_address(frame: CallFrame) -> None:
    """Write the address of the first argument to the first result, which has two uint32."""
    address = frame.arguments.buffers[0].contents.data or 0
    ctypes.c_uint64.from_address(frame.results.buffers[0].contents.data).value = address


def register_address_call() -> None:
    """Register the custom call that returns the address of an array in a CPU device's memory.

    `client/jax_patches/introspection.py` launches a program with this call. So the query is ordered like any other
    launch, and needs no message.
    """
    register(ADDRESS_CALL, _write_address)
