"""Reads plugin programs of Google's `pathwaysutils`, which are JSON objects with one field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from atoll.decodable import decodable
from atoll.errors import StatusError, invalid

_R = TypeVar("_R", bound=msgspec.Struct)


def beginnings(kind: type[msgspec.Struct]) -> tuple[bytes, ...]:
    """Return how requests of this kind begin, for each field of `kind`."""
    return tuple(f'{{"{each.encode_name}"'.encode() for each in msgspec.structs.fields(kind))


def read_request(kind: type[_R], payload: bytes, name: str) -> _R:
    """Read a request. Raises INVALID_ARGUMENT, with `name` for the request."""
    with reading(name):
        return msgspec.json.decode(payload, type=decodable(kind))


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert errors of the context to INVALID_ARGUMENT."""
    try:
        yield
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError, StatusError) as error:
        raise invalid(f"the {name} cannot be read: {error}") from None
