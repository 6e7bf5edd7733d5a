"""Requests of clients for slices, and their validation.

The user's Python sends a request to its proxy as the payload of a plugin program, since JAX's client passes that
through. The proxy sends it to the controller in an `AddSlice`.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid
from atoll.quantities import counted, noun_for
from atoll.wire.framing import NO_MESSAGE

MAGIC = b"atoll.slice\0"

MAX_DEVICES = 1 << 16
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
_Slices = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 53)], ...], msgspec.Meta(max_length=256)]


class SliceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a slice of `count` devices of one island."""

    count: _Size
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=3)] = ()  # of its mesh; () for any devices
    kind: Annotated[str, msgspec.Meta(max_length=100)] = ""  # a platform or a kind of device, as JAX names them
    same_island_as: _Slices = ()  # numbers of slices of the same session
    other_island_than: _Slices = ()
    memory_per_device: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0  # bytes that must be free
    accelerator: Annotated[str, msgspec.Meta(max_length=100)] = ""  # the default `kind` if the cluster has accelerators
    exclusive: bool = False  # no other session gets its devices while it exists

    def __str__(self) -> str:
        """Return text such as "a 2x2 mesh of cpu devices with 1024 bytes free on each"."""
        devices = f"{self.kind} device" if self.kind else "device"
        devices = noun_for(self.count, devices)
        devices = f"exclusive {devices}" if self.exclusive else devices
        text = f"a {'x'.join(map(str, self.shape))} mesh of {devices}" if self.shape else f"{self.count} {devices}"
        return text + (f" with {self.memory_per_device} bytes free on each" if self.memory_per_device else "")


class SliceInfo(msgspec.Struct, frozen=True):
    """Information about a slice for its client, which gets it as JSON in the fingerprint of an executable."""

    slice: int
    shape: tuple[int, ...]
    island: int  # the `slice_index` of the devices


def read_request(payload: bytes) -> SliceRequest:
    """Parse the part of a payload that follows `MAGIC`. Raise INVALID_ARGUMENT if it is invalid."""
    try:
        slice_request = msgspec.msgpack.decode(payload, type=decodable(SliceRequest))
    except NO_MESSAGE as error:
        raise invalid(f"invalid slice request: {error}") from None
    check(slice_request)
    return slice_request


def check(slice_request: SliceRequest) -> None:
    """Raise INVALID_ARGUMENT if the request contradicts itself."""
    if slice_request.shape and math.prod(slice_request.shape) != slice_request.count:
        raise invalid(
            f"a slice of {counted(slice_request.count, 'device')} cannot have the shape {slice_request.shape}"
        )
