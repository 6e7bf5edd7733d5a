"""Messages of calls from a host into a client's Python, which are pieces of the session's data channels.

The worker that runs the program sends a `Call`, and the client answers with `Returned` or `Raised`; the proxy forwards
both. A call and its answer are pieces of the same feed, whose number identifies the waiting host. A piece contains a
length, one message, and the bytes of the message's arrays, each at a multiple of 64. Arrays are NumPy arrays at both
ends; a token is None and has no bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from atoll.decodable import decodable
from atoll.errors import OK, FrameError, Status
from atoll.host_services.host_data import bytes_of
from atoll.protocol.number_ranges import CALL_FEEDS
from atoll.transfers.dtypes import dtype_name, numpy_dtype
from atoll.wire.framing import NO_MESSAGE

Array = np.ndarray[Any, Any]

# The first feed number of calls. A host uses its number `first_call(host)` for notices, and the next ones for calls.
_FIRST_CALL = CALL_FEEDS.start
_CALLS_OF_A_HOST = 1 << 40
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_MAX_RANK = 64
# Limit for the arrays of a message, and for the callables of a notice. A message may have as many bytes as the results
# of a program, and decoding it blocks all threads of a worker.
_MAX_ITEMS = 1 << 16


class ArrayType(msgspec.Struct, frozen=True, array_like=True):
    """The type of an array whose bytes follow the message in C order. For a token, `dtype` is ""."""

    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_RANK)]
    nbytes: int


_Arrays = Annotated[tuple[ArrayType, ...], msgspec.Meta(max_length=_MAX_ITEMS)]
_Callables = Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_ITEMS)]


class Call(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Asks the client to call the callable with this number."""

    callback: int
    arrays: _Arrays


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Answers a call with the results of the callable."""

    arrays: _Arrays


class Raised(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Answers a call with the traceback of an exception. If `cancelled`, the callable was not called."""

    text: str
    cancelled: bool = False
    arrays: _Arrays = ()


class Retained(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """A notice that the host has a function that may call these callables. Has no answer."""

    callbacks: _Callables
    arrays: _Arrays = ()


class Released(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A notice that the host, or for a client every host, will not call these callables again. Has no answer."""

    callbacks: _Callables
    arrays: _Arrays = ()


class Unread(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """A notice to a client that the contents of these feeds will not arrive. None stands for all feeds until now.

    `error` is the reason. Without one, the client can read the arrays in another way. Has no answer. A host sends it
    to the proxy if the client's own channel has ended during a transfer, or as the answer to `ReadWanted`.
    """

    feeds: tuple[int, ...] = ()
    arrays: _Arrays = ()
    error: Status = OK


class DirectWanted(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A client's notice that it sends or reads large contents. Has no answer.

    Hosts on its machine open direct channels to it, and the proxy sends `Dial` for other hosts.
    """

    arrays: _Arrays = ()


class Dial(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Asks a client to open its own channel to a host on another machine, for large contents. Has no answer.

    `session` and `secret` open the channel. `certificate` is for addresses with TLS: a certificate, its key, and the CA
    that signed it, in PEM. The host may be silent for `lease` seconds during a transfer.
    """

    host: int
    address: str
    session: int
    secret: str
    lease: float
    certificate: tuple[bytes, bytes, bytes] | None = None
    arrays: _Arrays = ()

    def __repr__(self) -> str:
        return f"Dial(host={self.host}, address={self.address!r}, session={self.session})"  # without secrets


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A client's notice that it has received a feed on its own channel to a host. Has no answer."""

    feed: int
    arrays: _Arrays = ()


class ReadWanted(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """A proxy's notice that asks a host for the contents of a small array, which the host has whole.

    The host sends them to the client's process as `feed`, one of SCRIPT_FEEDS, when the array is ready, or answers
    `Unread` if it cannot. If `has_ended` is set, the run that made the array has ended on all hosts without an error.
    """

    feed: int
    handle: int
    arrays: _Arrays = ()
    has_ended: bool = False


class SlotsWanted(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A client's notice that it sends small contents. The proxy passes the memory of `transfers.shared_slots` to it."""

    arrays: _Arrays = ()


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Asks a client for the contents of its write number `write`.

    The client sends them to `host` as `feed`, on the host's direct channel, and reports `Landed`. Without such a
    channel, it sends them on this one, as feed `write`. If it does not have them, it sends no bytes there, which are
    too few for the launch. It keeps contents until `Written`.
    """

    write: int
    feed: int
    host: int
    arrays: _Arrays = ()


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A client's notice that its contents have arrived, or failed, at the host. Has no answer."""

    write: int
    arrays: _Arrays = ()


class Written(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A notice to a client that the contents of this write are not needed any more. Has no answer."""

    write: int
    arrays: _Arrays = ()


# The first message on a client's channel. From then on, the client gets its calls there.
GREETING = Released(())

_TOKEN = ArrayType("", (), 0)

CallMessage = (
    Call
    | Returned
    | Raised
    | Retained
    | Released
    | Unread
    | DirectWanted
    | Dial
    | Arrived
    | ReadWanted
    | SlotsWanted
    | Wanted
    | Landed
    | Written
)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(decodable(CallMessage))
# Other messages have lists without a limit, which a client must not send as an answer.
_answer_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(decodable(Returned | Raised))


def first_call(host: int) -> int:
    """Return the feed number for notices of a host. The numbers of its calls follow."""
    return _FIRST_CALL + host * _CALLS_OF_A_HOST


def is_call(feed: int) -> bool:
    return feed >= _FIRST_CALL


def is_notice(feed: int) -> bool:
    return is_call(feed) and (feed - _FIRST_CALL) % _CALLS_OF_A_HOST == 0


def host_of(feed: int) -> int:
    return (feed - _FIRST_CALL) // _CALLS_OF_A_HOST


def encode(message: CallMessage, arrays: Sequence[Any] = ()) -> list[Any]:
    """Return the contents of a piece. `arrays` are the buffers of `message.arrays`."""
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


# The answer for a client that is not connected.
NO_CLIENT = encode(Raised("the client of the program does not take calls", cancelled=True))


def decode_answer(content: Any) -> tuple[Returned | Raised, list[int]]:
    """Return what `decode` returns, for the answer of a client to a call."""
    return decode(content, _answer_decoder)


def decode(content: Any, decoder: msgspec.msgpack.Decoder[Any] = _decoder) -> tuple[Any, list[int]]:
    """Return a message and the offsets of its arrays' bytes in the content. Raise FrameError if it is invalid."""
    whole = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
    try:
        (length,) = _LENGTH.unpack_from(whole)
        position = _LENGTH.size + length
        if position > whole.nbytes:
            raise FrameError("invalid call: it is shorter than its length field says")
        message = decoder.decode(whole[_LENGTH.size : position])
    except (struct.error, *NO_MESSAGE) as error:
        raise FrameError(f"invalid call: {error}") from None
    offsets = []
    for each in message.arrays:
        if each.nbytes < 0 or min(each.shape, default=0) < 0:
            raise FrameError("invalid call: an array has an invalid shape")
        if each.nbytes and math.prod(each.shape) > each.nbytes:
            raise FrameError("invalid call: an array has fewer bytes than elements")
        if each.nbytes:
            position += -position % _ALIGNMENT
        offsets.append(position)
        position += each.nbytes
        if position > whole.nbytes:
            raise FrameError("invalid call: its arrays are incomplete")
    return message, offsets


def packed(arrays: Sequence[Any]) -> tuple[tuple[ArrayType, ...], list[Any]]:
    """Return the types and the bytes of arrays, or of values that NumPy converts to arrays."""
    types: list[ArrayType] = []
    contents: list[Any] = []
    for each in arrays:
        if each is None:
            types.append(_TOKEN)
            continue
        array = np.ascontiguousarray(each).reshape(np.shape(each))
        types.append(ArrayType(dtype_name(array.dtype), array.shape, array.nbytes))
        contents.append(bytes_of(array))
    return tuple(types), contents


def unpacked(whole: Array, kind: ArrayType, offset: int) -> Array | None:
    """Return the array at `offset` as a view of a piece. Raise ValueError or TypeError if its type is invalid."""
    if not kind.dtype:
        return None
    return whole[offset : offset + kind.nbytes].view(numpy_dtype(kind.dtype)).reshape(kind.shape)
