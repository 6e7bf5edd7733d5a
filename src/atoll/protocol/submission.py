"""The payload of the IFRT plugin program with which a client sends a traced program to its proxy.

The payload is `MAGIC` and a `Submission` or `Staging` in msgpack. Other runtimes also use plugin programs (Google's are
JSON), so a receiver must check for `MAGIC` first.

jaxlib's client requires that all arguments of an executable have the same number of shards as the executable has
devices, but arguments of a program can have different numbers. Arguments with as many shards as the last one are passed
to the run itself. All others are passed before it, as arguments of `Staging` programs, whose runs only keep them.
"""

from __future__ import annotations

import msgspec

from atoll.errors import invalid
from atoll.ir.program import Program

MAGIC = b"atoll.program\n"
VERSION = 1


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


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Submission | Staging] = msgspec.msgpack.Decoder(Submission | Staging)


def encode(submission: Submission | Staging) -> bytes:
    return MAGIC + _encoder.encode(submission)


def decode(data: bytes) -> Submission | Staging:
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
