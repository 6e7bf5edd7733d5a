"""What the plug-in in the user's process asks its proxy, where IFRT has no request for it.

A question travels as the payload of a plugin program, since that is what jaxlib's client lets through. The answer is an
executable that is never run: its fingerprint is the answer's bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.errors import invalid
from atoll.protocol import profiles

MAGIC = b"atoll.question\0"

# A custom call of CPU workers: the address of its one argument as uint32[2]. It is asked by running a program.
ADDRESS_CALL = "atoll_address"

_Device = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class MemoryQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="memory"):
    """How much memory of a device is in use. The answer is JSON: names as in jax's `Device.memory_stats`, and bytes."""

    device: _Device


class SourceQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="source"):
    """What an executable of this session was compiled from, by its fingerprint. The answer is a `CompiledSource`."""

    fingerprint: Annotated[bytes, msgspec.Meta(max_length=1000)]


class CompiledSource(msgspec.Struct, frozen=True):
    """A program (a portable StableHLO artifact), its serialized CompileOptions, and devices as [replica][partition]."""

    program: bytes
    options: bytes
    assignment: tuple[tuple[int, ...], ...]


class ProfileQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="profile"):
    """Has all hosts of the session start, stop, or hand over to this client. The answer is `MissingHosts`, in JSON."""

    request: profiles.Request


class MissingHosts(msgspec.Struct, frozen=True):
    """Hosts of which there is no profile, with the reason."""

    reasons: dict[int, str]


class IslandsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="islands"):
    """Which of the session's devices cannot be used now. The answer is `DevicesAway`, in JSON. Waits for no host.

    `leaves`: the client puts nothing on islands that are about to leave, and takes away what it has there.
    """

    leaves: bool = False


class DevicesAway(msgspec.Struct, frozen=True):
    """Virtual devices, by id: on islands that failed and not back yet; and on islands that are about to leave.

    `losses` counts the islands that the session has lost so far.
    """

    lost: tuple[int, ...]
    leaving: tuple[int, ...]
    losses: int


Question = MemoryQuestion | SourceQuestion | ProfileQuestion | IslandsQuestion


def write_question(question: Question) -> bytes:
    return MAGIC + msgspec.msgpack.encode(question)


def read_question(payload: bytes) -> Question:
    """Raises INVALID_ARGUMENT."""
    try:
        question: Question = msgspec.msgpack.decode(payload[len(MAGIC) :], type=Question)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"this is no question: {error}") from None
    return question
