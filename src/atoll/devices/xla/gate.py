"""Makes a program with callbacks run beside the thread that enqueues it, on XLA's CPU devices.

XLA runs such a program inside the call that enqueues it, unless it has something to wait for: a callback would then
stop everything else on this host. So a *gate* goes ahead of it on an execution stream of its own: a program that ends
when the lock is released which is held while both are enqueued. Programs over several devices wait for their launch
anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client as xc
from jax.sharding import SingleDeviceSharding

_TARGET = "atoll_gate"
# So large a product is not "cheap": XLA runs cheap programs inside of the enqueuing call, too.
_SIZE = 16


class _Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("numbers", ctypes.c_int * 2))


class _Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _Version))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _CallFrame(ctypes.Structure):
    """The beginning of XLA_FFI_CallFrame (jaxlib's include/xla/ffi/api/c_api.h)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
    )


_METADATA = 1
_EXECUTE = 3
_held = threading.Lock()


def _pass(frame: Any) -> None:
    """An FFI handler: tells XLA which version of the interface it is for, or waits until the gate opens."""
    extension = frame.contents.extension
    if extension and extension.contents.type == _METADATA:
        extension.contents.metadata.contents.version.numbers = frame.contents.api.contents.version.numbers
        return
    if frame.contents.stage == _EXECUTE:
        with _held:
            pass


_handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))(_pass)


class Gates:
    """One gate a device, compiled at its first use. For the executor's thread alone."""

    def __init__(self) -> None:
        self._gates: dict[Any, tuple[Any, Any]] = {}
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        address = ctypes.cast(_handler, ctypes.c_void_p).value
        capsule = new_capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
        xc.register_custom_call_target(_TARGET, capsule, platform="cpu", api_version=1)

    @contextlib.contextmanager
    def closed(self, device: Any, stream: int) -> Iterator[None]:
        """What is enqueued on the device within, waits for the end of this context and of the stream's earlier work."""
        gate = self._gates.get(device)
        if gate is None:
            gate = self._gates[device] = _compile(device)
        executable, operand = gate
        with _held, xc.execution_stream_id(stream):
            executable.execute_sharded([operand])
            yield


def _compile(device: Any) -> tuple[Any, Any]:
    def gate(x: Any) -> Any:
        wait = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), np.float32), has_side_effect=True)
        return wait(x @ x)

    operand = jax.device_put(np.ones((_SIZE, _SIZE), np.float32), SingleDeviceSharding(device))
    return jax.jit(gate).lower(operand).compile().runtime_executable(), operand
