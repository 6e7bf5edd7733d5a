"""Calls from a host into a client's Python, as pieces of the session's data channels.

The worker that runs the program sends a `Call`; the client answers with `Returned` or `Raised`; the proxy between them
passes both on. Call and answer are pieces of one feed, whose number says which host waits. A piece is a length, one
message, and the bytes of its arrays, each at a multiple of 64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.errors import FrameError
from atoll.transfers.channel import FIRST_INLINE_FEED
from atoll.wire.framing import NO_MESSAGE

# Feeds from here on are calls. Those of a host count from `first_call(host)`, whose own number is for its notices.
_FIRST_CALL = FIRST_INLINE_FEED
_CALLS_OF_A_HOST = 1 << 40
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_MAX_RANK = 64


class ArrayType(msgspec.Struct, frozen=True, array_like=True):
    """An array of a message, whose bytes follow it in C order. `dtype` "": a token, which has no bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Call(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Call the client's callable of this number with these arrays."""

    callback: int
    arrays: tuple[ArrayType, ...]


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """What the callable has returned."""

    arrays: tuple[ArrayType, ...]


class Raised(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The callable has raised: its traceback, to be shown to the user. With `cancelled`, nobody has called it."""

    text: str
    cancelled: bool = False
    arrays: tuple[ArrayType, ...] = ()


class Retained(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """The host has a function that may call these. A notice, without an answer."""

    callbacks: tuple[int, ...]
    arrays: tuple[ArrayType, ...] = ()


class Released(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The host will not call these any more; to the client: no host will. A notice, without an answer."""

    callbacks: tuple[int, ...]
    arrays: tuple[ArrayType, ...] = ()


# What a client hears first on its channel: from now on it gets its calls.
GREETING = Released(())

CallMessage = Call | Returned | Raised | Retained | Released

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(CallMessage)


def first_call(host: int) -> int:
    """The number for the notices of a host; those of its calls follow."""
    return _FIRST_CALL + host * _CALLS_OF_A_HOST


def is_call(feed: int) -> bool:
    return feed >= _FIRST_CALL


def is_notice(feed: int) -> bool:
    return is_call(feed) and (feed - _FIRST_CALL) % _CALLS_OF_A_HOST == 0


def host_of(feed: int) -> int:
    """The host whose call this is."""
    return (feed - _FIRST_CALL) // _CALLS_OF_A_HOST


def encode(message: CallMessage, arrays: Sequence[Any] = ()) -> list[Any]:
    """The contents of a piece; `arrays` are the buffers that belong to `message.arrays`."""
    head = msgspec.msgpack.encode(message)
    contents = [_LENGTH.pack(len(head)) + head]
    position = len(contents[0])
    for array in arrays:
        nbytes = memoryview(array).nbytes
        if not nbytes:
            continue
        padding = -position % _ALIGNMENT
        if padding:
            contents.append(bytes(padding))
        contents.append(array)
        position += padding + nbytes
    return contents


def decode(content: Any) -> tuple[Any, list[int]]:
    """A message, and where in the content the bytes of its arrays begin.

    Raises FrameError for what nobody has encoded.
    """
    whole = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
    try:
        (length,) = _LENGTH.unpack_from(whole)
        position = _LENGTH.size + length
        if position > whole.nbytes:
            raise FrameError("a call shorter than it says")
        message = _decoder.decode(whole[_LENGTH.size : position])
    except (struct.error, *NO_MESSAGE) as error:
        raise FrameError(f"no call: {error}") from None
    offsets = []
    for each in message.arrays:
        if len(each.shape) > _MAX_RANK or each.nbytes < 0 or min(each.shape, default=0) < 0:
            raise FrameError("an array of a call has no such shape")
        if each.nbytes and math.prod(each.shape) > each.nbytes:
            raise FrameError("an array of a call has no such size")
        if each.nbytes:
            position += -position % _ALIGNMENT
        offsets.append(position)
        position += each.nbytes
        if position > whole.nbytes:
            raise FrameError("a call whose arrays are not all there")
    return message, offsets
