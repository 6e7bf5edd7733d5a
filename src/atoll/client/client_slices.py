"""Virtual devices and slices for user programs: `make_virtual_device_set` (paper, figure 2 and section 4.1).

The client requests a slice by a plugin program, since IFRT has no request for slices. The reply is an executable on the
devices of the slice; the slice lives as long as the executable.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from atoll.client.plugin_programs import is_atoll, submit
from atoll.cluster.slice_requests import MAGIC, MAX_DEVICES, SliceInfo, SliceRequest
from atoll.decodable import decodable
from atoll.errors import BackendError, SliceError
from atoll.quantities import counted, parse_bytes

# Keeps slices alive until they are released or the session ends: scripts may keep only the devices of a slice.
_live: dict[Slice, Any] = {}


class Slice:
    """Virtual devices of one island, each on a different physical device. Created by `VirtualDeviceSet.add_slice`.

        with devices_set.add_slice(shape=(2, 2)) as s:
            x = jax.device_put(x, NamedSharding(s.mesh(("x", "y")), PartitionSpec("x", "y")))

    `devices` are `jax.Device`s in the row-major order of `shape`, for `jax.sharding.Mesh`, `jax.pmap(devices=...)` and
    `jax.device_put`. Two slices of a session have no device in common. `island` is the `slice_index` of the devices. As
    a context manager, a slice is released at the end of the block.
    """

    def __init__(self, loaded: Any) -> None:
        reply = msgspec.json.decode(loaded.fingerprint, type=decodable(SliceInfo))
        self.number = reply.slice
        self.shape = reply.shape
        self.island = reply.island
        self.devices: list[Any] = list(loaded.local_devices())
        _live[self] = loaded

    @property
    def tpus(self) -> list[Any]:
        """`devices`, under the paper's name."""
        return self.devices

    @property
    def gpus(self) -> list[Any]:
        """`devices`, for GPUs."""
        return self.devices

    def mesh(self, axis_names: str | Sequence[str]) -> Any:
        """Return a `jax.sharding.Mesh` of the slice's shape.

        Raise SliceError if the number of names differs from the number of dimensions.
        """
        import numpy as np
        from jax.sharding import Mesh

        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if len(names) != len(self.shape):
            given = counted(len(names), "name")
            raise SliceError(f"axis_names has {given}: expected one for each dimension of the shape {self.shape}")
        return Mesh(np.array(self.devices, dtype=object).reshape(self.shape), names)

    @property
    def is_released(self) -> bool:
        return self not in _live

    def release(self) -> None:
        """Make the devices available to other slices. They remain usable, and their arrays stay."""
        _live.pop(self, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self.is_released else ""
        return f"Slice({self.number}, shape={self.shape}, island={self.island}, devices={self.devices}{state})"


class VirtualDeviceSet:
    """The slices that a program has requested. Created by `make_virtual_device_set`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._slices: list[Slice] = []

    @property
    def slices(self) -> list[Slice]:
        """The slices that have not been released."""
        return [each for each in self._slices if not each.is_released]

    def add_slice(
        self,
        devices: int | None = None,
        *,
        tpu_devices: int | None = None,
        gpu_devices: int | None = None,
        shape: Sequence[int] | None = None,
        kind: str | None = None,
        same_island_as: Slice | Iterable[Slice] | None = None,
        other_island_than: Slice | Iterable[Slice] | None = None,
        memory_per_device: int | str | None = None,
        exclusive: bool = False,
    ) -> Slice:
        """Request devices of one island.

            s = devices_set.add_slice(devices=4)
            s = devices_set.add_slice(shape=(2, 2), other_island_than=s, memory_per_device="8GiB")

        Args:
          devices: Number of devices. `tpu_devices`, the paper's name, and `gpu_devices` also select the type of device
            on a cluster with TPUs or GPUs; on a cluster of CPUs they mean the same as `devices`. Pass one of the three,
            or `shape`.
          shape: Shape of a contiguous mesh in the topology of an island, of one to three dimensions.
          kind: Kind of the devices: a platform such as "cpu" or a `device_kind` of JAX, or the name that the cluster
            file gives to an island's devices.
          same_island_as, other_island_than: A slice of this program, or several.
          memory_per_device: Memory that must be free on each device now, in bytes or as text such as "8GiB".
          exclusive: Whether to take only devices on which no other session has arrays or slices, and to keep other
            sessions off them while the slice lives.

        Returns the slice immediately. Nothing on its devices is moved.

        Raises:
          jax.errors.JaxRuntimeError: No such slice is free (RESOURCE_EXHAUSTED). The message says what is free.
          atoll.SliceError: The arguments contradict each other, or one of the given slices has been released.
        """
        given = [count for count in (devices, tpu_devices, gpu_devices) if count is not None]
        if len(given) > 1 or not (given or shape is not None):
            raise SliceError("expected exactly one of devices=, tpu_devices= and gpu_devices=, or shape=")
        dims = tuple(operator.index(size) for size in shape) if shape is not None else ()
        count = operator.index(given[0]) if given else math.prod(dims)
        if (shape is not None and not dims) or min(dims, default=1) < 1 or len(dims) > 3:
            raise SliceError(f"a slice has one to three dimensions of one device or more, not {dims}")
        if dims and math.prod(dims) != count:
            raise SliceError(f"the shape {dims} cannot have {counted(count, 'device')}")
        if not 1 <= count <= MAX_DEVICES:
            raise SliceError(f"a slice of {counted(count, 'device')}: expected 1 to {MAX_DEVICES} devices")
        memory = _bytes(memory_per_device or 0)
        if not 0 <= memory <= 1 << 60:
            raise SliceError(f"memory_per_device is {memory} bytes: expected 0 to 1 EiB")
        slice_request = SliceRequest(
            count,
            dims,
            kind or "",
            _numbers("same_island_as", same_island_as),
            _numbers("other_island_than", other_island_than),
            memory,
            "tpu" if tpu_devices is not None else "gpu" if gpu_devices is not None else "",
            exclusive,
        )
        made = Slice(submit(self._client, MAGIC + msgspec.msgpack.encode(slice_request)))
        self._slices = [*self.slices, made]
        return made


def make_virtual_device_set() -> VirtualDeviceSet:
    """Return a set with which a program requests slices of its cluster (paper, figure 2).

        devices_set = atoll.make_virtual_device_set()
        a = devices_set.add_slice(devices=4)
        b = devices_set.add_slice(devices=4, other_island_than=a)

    Raise atoll.BackendError if JAX does not run on Atoll in this process.
    """
    import jax

    client = jax.devices()[0].client
    if not is_atoll(client):
        raise BackendError(
            f"virtual devices need Atoll, but JAX runs on {client.platform} in this process: "
            "start the script with JAX_PLATFORMS=atoll, or call atoll.connect()"
        )
    return VirtualDeviceSet(client)


def forget_slices() -> None:
    """Release all slices, because the client's session has ended."""
    _live.clear()


def _bytes(amount: int | str) -> int:
    try:
        return parse_bytes(amount) if isinstance(amount, str) else int(amount)
    except ValueError as error:
        raise SliceError(f"memory_per_device: {error}") from None


def _numbers(argument: str, slices: Slice | Iterable[Slice] | None) -> tuple[int, ...]:
    """Return the numbers of the slices that were passed as this argument. Raise SliceError."""
    if slices is None:
        return ()
    several: tuple[Any, ...] = tuple(slices) if isinstance(slices, Iterable) else (slices,)
    for each in several:
        if not isinstance(each, Slice):
            raise SliceError(f"{argument} is {slices!r}: expected a slice that add_slice has returned, or several")
        if each.is_released:
            raise SliceError(f"{each} has been released: {argument} needs live slices")
    return tuple(each.number for each in several)
