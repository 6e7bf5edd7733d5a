"""The plugin programs of Google's `pathwaysutils`: requests in JSON, each an object of one field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from atoll.errors import StatusError, invalid

_R = TypeVar("_R", bound=msgspec.Struct)


def beginnings(kind: type[msgspec.Struct]) -> tuple[bytes, ...]:
    """How requests of this kind begin: with one of its fields."""
    return tuple(f'{{"{each.encode_name}"'.encode() for each in msgspec.structs.fields(kind))


def read_request(kind: type[_R], payload: bytes, name: str) -> _R:
    """Raises INVALID_ARGUMENT."""
    with reading(name):
        return msgspec.json.decode(payload, type=kind)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Whatever the block makes no sense of is INVALID_ARGUMENT."""
    try:
        yield
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, StatusError) as error:
        raise invalid(f"a {name} that cannot be read: {error}") from None
