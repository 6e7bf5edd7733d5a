"""Questions of the plug-in in the user's process to its proxy, for which IFRT has no request.

A question is the payload of a plugin program, which jaxlib's client forwards. The answer is the fingerprint of the
resulting executable, which is never run.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid
from atoll.protocol import profiles
from atoll.wire.framing import NO_MESSAGE

MAGIC = b"atoll.question\0"

# A custom call of CPU workers that returns the address of its single argument as uint32[2].
ADDRESS_CALL = "atoll_address"

# Of a `ContentsQuestion` and of `submission.Putting`: arrays, and bytes of all their contents.
MAX_ARRAYS = 1024
MAX_CONTENTS = 1 << 20
# Of a `ContentsQuestion`: different shards of all arrays.
MAX_SHARDS = 1 << 13

_Device = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class MemoryQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="memory"):
    """Request the memory use of a device. The answer is JSON, with names and units of JAX's `Device.memory_stats`."""

    device: _Device


class SourceQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="source"):
    """Request the source of an executable of this session by its fingerprint. The answer is a `CompiledSource`."""

    fingerprint: Annotated[bytes, msgspec.Meta(max_length=1000)]


class CompiledSource(msgspec.Struct, frozen=True):
    """A program (a portable StableHLO artifact), its serialized CompileOptions, and devices as [replica][partition].

    `callbacks` is the number of callables that the program calls in the client's process. They are not part of the
    source: the client passes its own when it compiles the program again.
    """

    program: bytes
    options: bytes
    assignment: tuple[tuple[int, ...], ...]
    callbacks: int = 0


class ProfileQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="profile"):
    """Start, stop or collect a profile on all hosts of the session. The answer is `MissingHosts` in JSON."""

    request: profiles.Request


class MissingHosts(msgspec.Struct, frozen=True):
    """Reasons why there is no profile, by host."""

    reasons: dict[int, str]


class IslandsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="islands"):
    """Request the session's devices that are unavailable now, without waiting for hosts.

    The answer is `DevicesAway` in JSON. With `leaves`, the client itself leaves islands that are about to leave: it
    puts nothing on them, and removes its arrays.
    """

    leaves: bool = False


class DevicesAway(msgspec.Struct, frozen=True):
    """Virtual devices, by ID, that are unavailable or about to be."""

    lost: tuple[int, ...]  # on islands that failed and have not restarted
    leaving: tuple[int, ...]  # on islands that are about to leave
    losses: int  # number of islands that the session has lost so far


class ContentsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="contents"):
    """Request the contents of the `arrays` arrays that were staged before (see `submission.Staging`).

    The answer is the contents in row-major order, one array after the other, also of sharded arrays. If there is an
    error, and with 0 arrays, the staged arrays are forgotten.
    """

    arrays: Annotated[int, msgspec.Meta(ge=0, le=MAX_ARRAYS)]


Question = MemoryQuestion | SourceQuestion | ProfileQuestion | IslandsQuestion | ContentsQuestion


def write_question(question: Question) -> bytes:
    return MAGIC + msgspec.msgpack.encode(question)


def read_question(payload: bytes) -> Question:
    """Decode a question. Raise INVALID_ARGUMENT if it is invalid."""
    try:
        question: Question = msgspec.msgpack.decode(payload[len(MAGIC) :], type=decodable(Question))
    except NO_MESSAGE as error:
        raise invalid(f"invalid question: {error}") from None
    return question
