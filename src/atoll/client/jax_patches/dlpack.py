"""Exports and imports arrays by dlpack, as copies, because Atoll's arrays are in the memory of other processes.

`torch.from_dlpack(x)`, `torch.tensor(x)`, `np.from_dlpack(x)`, TensorFlow and others ask for an array's device and
memory. They get a copy on the local CPU, for every kind of device. The consumer owns the copy: writes to it do not
change any JAX array. If the consumer forbids copies, it gets a BufferError, as in the array API standard.

`jnp.from_dlpack` returns an array on JAX's default device, like stock JAX on one CPU, but uncommitted, so that it can
be used with arrays on other devices. A JAX array stays on its device. An external array that must not be copied stays
on the local CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.client.jax_patches.other_clients import host_copies
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import client_of, is_atoll

_CPU = 0  # number of the local device, for jaxlib and for consumers


def _is_remote(array: Any) -> bool:
    """Return whether the array is on one device of Atoll. JAX itself refuses arrays on several devices."""
    return len(array.sharding.device_set) == 1 and is_atoll(client_of(array))


def _exporting(export: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def __dlpack__(
        self: Any, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if not _is_remote(self):
            return export(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        if copy is not None and not copy:
            raise BufferError(
                "this array is on Atoll, in the memory of another process: dlpack can only export a copy, but "
                "copy=False forbids it. Omit copy, or pass copy=True"
            )
        # The consumer may write to its copy, so the copy must not share memory with JAX's cached value.
        contents = np.array(host_copies(self)[0])
        # Must work while JAX traces. The script asks for no transfer to a device.
        with jax.ensure_compile_time_eval(), jax.transfer_guard_host_to_device("allow"):
            local = jax.device_put(contents, jax.local_devices(backend="cpu")[_CPU])
        return export(local, stream=None, max_version=max_version, dl_device=dl_device, copy=None)

    return __dlpack__


def _cpu_device(device: Callable[..., Any]) -> Callable[..., Any]:
    from jax._src.dlpack import DLDeviceType

    def __dlpack_device__(self: Any) -> Any:
        return (DLDeviceType.kDLCPU, _CPU) if _is_remote(self) else device(self)

    return __dlpack_device__


def _importing(take: Callable[..., Any]) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp
    from jax._src.array import ArrayImpl

    from atoll.client.jax_internals import default_device

    def from_dlpack(external_array: Any, device: Any = None, copy: bool | None = None) -> Any:
        if (
            isinstance(external_array, ArrayImpl)
            and _is_remote(external_array)
            and device in (None, external_array.device)
        ):
            array = jnp.array(external_array, copy=bool(copy))
            return array.astype(array.dtype) if array.weak_type else array
        may_not_move = isinstance(external_array, jax.Array) or device is not None or (copy is not None and not copy)
        if may_not_move or not is_atoll(default_device().client):
            return take(external_array, device, copy)
        return jnp.asarray(np.array(take(external_array, None, None)))

    return from_dlpack


def _importing_through_cpu(take: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def dlpack_managed_tensor_to_buffer(tensor: Any, device: Any = None, *others: Any) -> Any:
        if device is None or not is_atoll(device.client):
            return take(tensor, device, *others)
        return jax.device_put(take(tensor, jax.local_devices(backend="cpu")[_CPU], *others), device)

    return dlpack_managed_tensor_to_buffer


def _without_cuda_interface(interface: Callable[..., Any]) -> Callable[..., Any]:
    def __cuda_array_interface__(self: Any) -> Any:
        if is_atoll(client_of(self)):
            raise AttributeError("__cuda_array_interface__ is only defined for this process's own GPU buffers.")
        return interface(self)

    return __cuda_array_interface__


PATCH = Patch(
    name="dlpack",
    enables="dlpack: `np.from_dlpack`, `torch.from_dlpack` and `jnp.from_dlpack`",
    error="This operation is implemented for a PjRt-compatible backend only",
    changes=(
        Replacement(
            "jaxlib._jax:ArrayImpl", "__dlpack__", _exporting, ("self", "stream", "max_version", "dl_device", "copy")
        ),
        Replacement("jaxlib._jax:ArrayImpl", "__dlpack_device__", _cpu_device, ("self",)),
        Replacement("jaxlib._jax:ArrayImpl", "__cuda_array_interface__", _without_cuda_interface, ("self",)),
        Replacement("jaxlib._jax", "dlpack_managed_tensor_to_buffer", _importing_through_cpu, ()),
        Replacement(
            "jax._src.dlpack", "from_dlpack", _importing, ("external_array", "device", "copy"), copies=("jax.dlpack",)
        ),
    ),
)
