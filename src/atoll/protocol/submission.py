"""The payloads of the IFRT plugin programs that a client runs: traced programs, and programs that pass arrays.

A payload is `MAGIC` and one of `AnySubmission` in msgpack. Other runtimes also use plugin programs (Google's are JSON),
so a receiver must check for `MAGIC` first. `ifrt.requests.plugin_requests` has the table of all kinds.

jaxlib's client requires that all arguments of an executable have the same number of shards as the executable has
devices, but arguments of a program can have different numbers. Arguments with as many shards as the last one are passed
to the run itself. All others are passed before it, as arguments of `Staging` programs, whose runs only keep them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid
from atoll.ir.program import Program
from atoll.ir.types import Replicated, Tiled
from atoll.ir.validation import MAX_RANK
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.protocol.questions import MAX_ARRAYS, MAX_CONTENTS

MAGIC = b"atoll.program\n"
VERSION = 1

RUNS_OF_A_READING = 1 << 30
MAX_READINGS = len(SCRIPT_FEEDS) // RUNS_OF_A_READING  # of a session, including those that were dropped


class Submission(msgspec.Struct, frozen=True, array_like=True, tag="program"):
    """A program whose `Call.function` are positions in `functions`, the fingerprints of compiled functions.

    `Call.donated` are the inputs that a call may consume. The server, which knows XLA's decision, selects those that it
    does consume, and also sets `Call.preserved`, which is empty here.
    """

    program: Program
    functions: tuple[bytes, ...]
    version: int = VERSION


class Staging(msgspec.Struct, frozen=True, array_like=True, tag="staging"):
    """A program that keeps arguments, with one shard for each of `devices`, for the next program of the session."""

    devices: tuple[int, ...]
    version: int = VERSION


class Reading(msgspec.Struct, frozen=True, array_like=True, tag="reading"):
    """A program whose runs send the contents of their argument to the client's process, in row-major order.

    The argument has one shard for each of `devices`. The contents arrive on the channel for calls
    (`protocol.callbacks`), as pieces of the feed `first_feed(number)` for the first run, and of the next feed for each
    further run.
    """

    devices: tuple[int, ...]
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READINGS)]
    version: int = VERSION


class PutArray(msgspec.Struct, frozen=True, array_like=True):
    """The type of an array that a `Putting`, `Writing` or `SmallWriting` makes."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_RANK)]


class Writing(msgspec.Struct, frozen=True, array_like=True, tag="writing"):
    """A program whose runs make an array of contents that the client's process sends.

    The array is on `devices`, in their default memory: each has the whole array, or one of its tiles. The contents of
    the whole array, in row-major order, are write number `first_feed(number)` for the first run, and the next number
    for each further run: see `host_services.calls.call_messages.Wanted`.
    """

    devices: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READINGS)]
    array: PutArray
    tiling: Replicated | Tiled
    version: int = VERSION


class SmallWriting(msgspec.Struct, frozen=True, array_like=True, tag="small writing"):
    """A program whose runs make an array of small contents that the client's process has put into a shared slot.

    The array is that of a `Writing`. The contents have the same numbers: see `transfers.shared_slots`.
    """

    devices: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READINGS)]
    array: PutArray
    tiling: Replicated | Tiled
    version: int = VERSION


class Putting(msgspec.Struct, frozen=True, array_like=True, tag="putting"):
    """A program that makes arrays on one device, in its default memory. Its results are the arrays.

    `contents` are the contents of all arrays in row-major order, one array after the other.
    """

    device: int
    arrays: Annotated[tuple[PutArray, ...], msgspec.Meta(min_length=1, max_length=MAX_ARRAYS)]
    contents: Annotated[bytes, msgspec.Meta(max_length=MAX_CONTENTS)]
    version: int = VERSION


class Deferring(msgspec.Struct, frozen=True, array_like=True, tag="deferring"):
    """A compiled function, by its fingerprint, whose runs start when one of their results is used.

    The runs take one argument, and keep it until they start. A run whose results are all dropped never starts.
    """

    function: bytes
    version: int = VERSION


def first_feed(number: int) -> int:
    """Return the feed of the first run of the `Reading`, `Writing` or `SmallWriting` with this number."""
    return SCRIPT_FEEDS.start + number * RUNS_OF_A_READING


_encoder = msgspec.msgpack.Encoder()
AnySubmission = Submission | Staging | Reading | Putting | Writing | SmallWriting | Deferring

_decoder: msgspec.msgpack.Decoder[AnySubmission] = msgspec.msgpack.Decoder(decodable(AnySubmission))


def encode(submission: AnySubmission) -> bytes:
    return MAGIC + _encoder.encode(submission)


def decode(data: bytes) -> AnySubmission:
    """Decode the result of `encode`. Raise INVALID_ARGUMENT if that fails. The caller must validate the program."""
    try:
        submission = _decoder.decode(data[len(MAGIC) :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"cannot decode a program: {error}") from None
    if submission.version != VERSION:
        raise invalid(
            f"the program has version {submission.version} of the format, but this server supports version {VERSION}; "
            "use the same release of Atoll on both sides"
        )
    return submission
