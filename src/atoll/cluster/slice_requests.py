"""What a client asks of the resource manager: how it is written, and what may be asked at all.

The request travels from the user's Python to its proxy as the payload of a plugin program, since that is what JAX's
client lets through, and from there to the controller in an `AddSlice`.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from atoll.errors import invalid

MAGIC = b"atoll.slice\0"

MAX_DEVICES = 1 << 16
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
_Slices = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 53)], ...], msgspec.Meta(max_length=256)]


class SliceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slice of `count` devices of one island, with the mesh `shape` where one is given.

    `kind` is a platform or a kind of device, as JAX names them; `memory_per_device`, in bytes, has to be free.
    `same_island_as` and `other_island_than` are numbers of slices of the same session.
    """

    count: _Size
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=3)] = ()
    kind: Annotated[str, msgspec.Meta(max_length=100)] = ""
    same_island_as: _Slices = ()
    other_island_than: _Slices = ()
    memory_per_device: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    accelerator: Annotated[str, msgspec.Meta(max_length=100)] = ""  # the `kind` where the cluster has accelerators
    exclusive: bool = False  # no other session gets its devices while it lives

    def __str__(self) -> str:
        """Such as "a 2x2 mesh of cpu devices with 1024 bytes free on each"."""
        devices = f"{self.kind} device" if self.kind else "device"
        devices += "s" if self.count > 1 else ""
        devices = f"exclusive {devices}" if self.exclusive else devices
        text = f"a {'x'.join(map(str, self.shape))} mesh of {devices}" if self.shape else f"{self.count} {devices}"
        return text + (f" with {self.memory_per_device} bytes free on each" if self.memory_per_device else "")


class SliceInfo(msgspec.Struct, frozen=True):
    """What the client learns of its slice beside the devices: the fingerprint of its executable, as JSON.

    `island` is the `slice_index` of the devices.
    """

    slice: int
    shape: tuple[int, ...]
    island: int


def read_request(payload: bytes) -> SliceRequest:
    """Reads what follows the magic. Raises INVALID_ARGUMENT."""
    try:
        slice_request = msgspec.msgpack.decode(payload, type=SliceRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"this is no request for a slice: {error}") from None
    check(slice_request)
    return slice_request


def check(slice_request: SliceRequest) -> None:
    """Raises INVALID_ARGUMENT where the request contradicts itself."""
    if slice_request.shape and math.prod(slice_request.shape) != slice_request.count:
        raise invalid(f"a slice of {slice_request.count} devices cannot have the shape {slice_request.shape}")
