"""Custom calls of XLA's CPU devices that are Python functions of this process, by XLA's foreign function interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from jax._src.lib import xla_client as xc


class Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("numbers", ctypes.c_int * 2))


class Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", Version))


class Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", Version))


class Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )


class Buffer(ctypes.Structure):
    """The beginning of XLA_FFI_Buffer."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    )


class Buffers(ctypes.Structure):
    """XLA_FFI_Args, and XLA_FFI_Rets."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class CallFrame(ctypes.Structure):
    """The beginning of XLA_FFI_CallFrame (jaxlib's include/xla/ffi/api/c_api.h)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", Buffers),
        ("results", Buffers),
    )


_METADATA = 1
_EXECUTE = 3
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
_handlers: list[Any] = []  # XLA keeps their addresses alone


def register(target: str, run: Callable[[CallFrame], None]) -> None:
    """Has programs on CPU devices call `run`, on one of XLA's threads, where they have a custom call of this name.

    It must not raise. Registered for as long as this process lives.
    """

    def handle(frame: Any) -> None:
        extension = frame.contents.extension
        if extension and extension.contents.type == _METADATA:  # XLA asks which version of the interface it is for
            extension.contents.metadata.contents.version.numbers = frame.contents.api.contents.version.numbers
            return
        if frame.contents.stage == _EXECUTE:
            run(frame.contents)

    handler = _Handler(handle)
    _handlers.append(handler)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.cast(handler, ctypes.c_void_p).value, b"xla._CUSTOM_CALL_TARGET", None)
    xc.register_custom_call_target(target, capsule, platform="cpu", api_version=1)
