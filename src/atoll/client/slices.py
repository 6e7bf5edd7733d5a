"""Virtual devices and slices, for user programs: `make_virtual_device_set` (paper, figure 2 and section 4.1).

A slice is asked of the resource manager through the one door that JAX's client has for such things, a plugin program.
What comes back is an executable whose devices are those of the slice; while that lives, the slice does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from atoll.client.plugin_programs import is_atoll, submit
from atoll.cluster.slices import MAGIC, MAX_DEVICES, SliceInfo, SliceRequest
from atoll.quantities import parse_bytes

# Slices live until they are released, or their session ends: their devices may be in use without them.
_live: dict[Slice, Any] = {}


class Slice:
    """Devices of one island, mapped one to one onto physical ones.

    `devices` are `jax.Device`s, in the row-major order of `shape`, for `jax.sharding.Mesh`, `jax.pmap(devices=...)`,
    `jax.device_put`. Two slices of a session have no device in common. `island` is the devices' `slice_index`.
    """

    def __init__(self, loaded: Any) -> None:
        told = msgspec.json.decode(loaded.fingerprint, type=SliceInfo)
        self.number = told.slice
        self.shape = told.shape
        self.island = told.island
        self.devices: list[Any] = list(loaded.local_devices())
        _live[self] = loaded

    @property
    def tpus(self) -> list[Any]:
        """`devices`, by the paper's name."""
        return self.devices

    @property
    def gpus(self) -> list[Any]:
        """`devices`, for GPUs."""
        return self.devices

    def mesh(self, axis_names: str | Sequence[str]) -> Any:
        """A `jax.sharding.Mesh` of the slice's shape. Raises ValueError unless there is a name for each dimension."""
        import numpy as np
        from jax.sharding import Mesh

        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        if len(names) != len(self.shape):
            raise ValueError(f"{len(names)} axis names for a slice of shape {self.shape}")
        return Mesh(np.array(self.devices, dtype=object).reshape(self.shape), names)

    @property
    def is_released(self) -> bool:
        return self not in _live

    def release(self) -> None:
        """The devices may be put into other slices from now on. What lies on them stays, and so do they."""
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
    """The slices that a program has asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._slices: list[Slice] = []

    @property
    def slices(self) -> list[Slice]:
        """Those that have not been released."""
        return [each for each in self._slices if not each.is_released]

    def add_slice(
        self,
        devices: int | None = None,
        *,
        tpu_devices: int | None = None,
        gpu_devices: int | None = None,
        shape: Sequence[int] | None = None,
        kind: str = "",
        same_island_as: Slice | Iterable[Slice] = (),
        other_island_than: Slice | Iterable[Slice] = (),
        memory_per_device: int | str = 0,
    ) -> Slice:
        """Asks for devices of one island.

            s = devices_set.add_slice(devices=4)
            s = devices_set.add_slice(shape=(2, 2), other_island_than=s, memory_per_device="8GiB")

        Args:
          devices: how many. `tpu_devices`, the paper's name, and `gpu_devices` say the same, whatever the devices are.
            One of the three, or `shape`, is needed.
          shape: a contiguous mesh in the topology of an island, of one to three dimensions.
          kind: of the devices, as JAX names them: a platform such as "cpu", or a `device_kind`.
          same_island_as, other_island_than: slices of this program.
          memory_per_device: that has to be free on each now, in bytes or such as "8GiB".

        Raises:
          jax.errors.JaxRuntimeError: there is no such slice (RESOURCE_EXHAUSTED); the message says what is free.
          ValueError: the arguments contradict each other, or a slice among them has been released.
        """
        given = [count for count in (devices, tpu_devices, gpu_devices) if count is not None]
        if len(given) > 1 or not (given or shape is not None):
            raise ValueError("say one of devices=, tpu_devices= and gpu_devices=, or shape=")
        dims = tuple(operator.index(size) for size in shape) if shape is not None else ()
        count = operator.index(given[0]) if given else math.prod(dims)
        if (shape is not None and not dims) or min(dims, default=1) < 1 or len(dims) > 3:
            raise ValueError(f"a slice has one to three dimensions of one device or more, not {dims}")
        if dims and math.prod(dims) != count:
            raise ValueError(f"{count} devices have no shape {dims}")
        if not 1 <= count <= MAX_DEVICES:
            raise ValueError(f"a slice of {count} devices")
        memory = parse_bytes(memory_per_device) if isinstance(memory_per_device, str) else memory_per_device
        if not 0 <= memory <= 1 << 60:
            raise ValueError(f"memory_per_device is {memory} bytes")
        slice_request = SliceRequest(
            count, dims, kind, _numbers(same_island_as), _numbers(other_island_than), int(memory)
        )
        made = Slice(submit(self._client, MAGIC + msgspec.msgpack.encode(slice_request)))
        self._slices = [*self.slices, made]
        return made


def make_virtual_device_set() -> VirtualDeviceSet:
    """The way to slices of this program's cluster.

    Raises RuntimeError where JAX is not on Atoll.
    """
    import jax

    client = jax.devices()[0].client
    if not is_atoll(client):
        raise RuntimeError(
            f"virtual devices need Atoll, and this program's JAX runs on {client.platform} by itself: "
            "start it with JAX_PLATFORMS=atoll, or use atoll.connect()"
        )
    return VirtualDeviceSet(client)


def forget_slices() -> None:
    """The client's session has ended, and all slices with it."""
    _live.clear()


def _numbers(slices: Slice | Iterable[Slice]) -> tuple[int, ...]:
    several = (slices,) if isinstance(slices, Slice) else tuple(slices)
    for each in several:
        if each.is_released:
            raise ValueError(f"{each} says nothing of an island: it has been released")
    return tuple(each.number for each in several)
