"""Versions of stored structs, which say whether another version of Atoll can read them.

Each struct has a version, and the oldest version that can be exchanged with it. The version of Atoll itself decides
nothing, and is named in messages.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from atoll._version import __version__
from atoll.decodable import decodable
from atoll.errors import IncompatibleJournalError, JournalError

T = TypeVar("T")
Version = tuple[int, int]  # of a struct, and the oldest one that can be exchanged with it


def check_version(writer: str, tag: str, stored: Version, own: Version) -> None:
    """Raise IncompatibleJournalError if this version of Atoll cannot read a struct that the version `writer` stored."""
    (version, oldest), (own_version, own_oldest) = stored, own
    if version < own_oldest or own_version < oldest:
        reads = f"versions {own_oldest} to {own_version}" if own_oldest < own_version else f"version {own_version}"
        raise IncompatibleJournalError(
            f"atoll {writer} stored version {version} of {tag!r}, and atoll {__version__} reads {reads}: continue with "
            f"atoll {writer}, or with another version that reads it"
        )


class _Envelope(msgspec.Struct, frozen=True):
    atoll: str
    tag: str
    version: Version
    content: Any


class _Sealed(_Envelope, frozen=True):
    content: msgspec.Raw


def encode_versioned(tag: str, version: Version, struct: Any) -> bytes:
    """Return a struct as bytes, with its version."""
    return msgspec.msgpack.encode(_Envelope(__version__, tag, version, struct))


def decode_versioned(content: bytes | msgspec.Raw, tag: str, version: Version, kind: type[T]) -> T:
    """Return the struct that `encode_versioned` encoded. Raises JournalError if it cannot be read."""
    try:
        found = msgspec.msgpack.decode(content, type=decodable(_Sealed))
        if found.tag != tag:
            raise JournalError(f"it has {found.tag!r}, not {tag!r}")
        check_version(found.atoll, tag, found.version, version)
        return msgspec.msgpack.decode(found.content, type=decodable(kind))
    except msgspec.MsgspecError as error:
        raise JournalError(f"{tag!r} cannot be read: {error}") from None
