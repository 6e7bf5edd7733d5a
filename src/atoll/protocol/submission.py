"""How a traced program travels from a client to its proxy: the payload of an IFRT plugin program.

A magic prefix, and a `Submission` or `Staging` in msgpack. Other runtimes use plugin programs too (Google's are JSON),
so a receiver looks for `MAGIC` first.

jaxlib's client runs an executable on arguments that all have one shard on each of its devices, and looks at their
number alone. A program's arguments need not be alike in that. So those with the same number of shards as the last one
come with the run itself, and the others before it, as arguments of `Staging` programs, a run of which only keeps them.
"""

from __future__ import annotations

import msgspec

from atoll.errors import invalid
from atoll.ir.program import Program

MAGIC = b"atoll.program\n"
VERSION = 1


class Submission(msgspec.Struct, frozen=True, array_like=True, tag="program"):
    """A program whose `Call.function` are positions in `functions`: the fingerprints of compiled functions.

    `Call.donated` are the inputs that a call may consume; which of them it does consume is the server's to say, as
    XLA decides that. `Call.preserved` is the server's, too, and empty here.
    """

    program: Program
    functions: tuple[bytes, ...]
    version: int = VERSION


class Staging(msgspec.Struct, frozen=True, array_like=True, tag="staging"):
    """Keeps arguments with as many shards as there are `devices` for the program that the session runs next."""

    devices: tuple[int, ...]
    version: int = VERSION


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Submission | Staging] = msgspec.msgpack.Decoder(Submission | Staging)


def encode(submission: Submission | Staging) -> bytes:
    return MAGIC + _encoder.encode(submission)


def decode(data: bytes) -> Submission | Staging:
    """Reads what `encode` wrote. Raises INVALID_ARGUMENT; that the program makes sense is not checked here."""
    try:
        submission = _decoder.decode(data[len(MAGIC) :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"a program that cannot be read: {error}") from None
    if submission.version != VERSION:
        raise invalid(
            f"a program in version {submission.version} of the format, where this server reads {VERSION}; "
            "use the same release of Atoll on both sides"
        )
    return submission
