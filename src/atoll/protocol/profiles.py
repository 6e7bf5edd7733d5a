"""What a session asks its hosts of the profiler: to record what they do, to end that, and to hand it over.

A host's answer to the query "profile" is empty. What was recorded is an XSpace, as XLA serializes it. It goes past the
controller: in parts to a callable of the client's (`Collect.callback`), or into a directory that the host can write to.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from atoll.errors import invalid

# A host records no longer than this: nothing else bounds what a client that forgets its profile costs.
MAX_SECONDS = 120.0
# Of what a host hands over.
MAX_BYTES = 1 << 30
# Object stores that a host can write to, where it has their package of fsspec.
STORES = ("gs", "s3", "az", "abfs")

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Value = bool | Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)] | Annotated[str, msgspec.Meta(max_length=4096)]

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is recorded, as in `jax.profiler.ProfileOptions`; for at most `seconds`.

    Python is not among it: a worker's Python is Atoll's own.
    """

    host_tracer_level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 2
    advanced: Annotated[dict[_Name, _Value], msgspec.Meta(max_length=64)] = {}
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = MAX_SECONDS


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start"):
    """Record. Refused while the host does so already, for whichever session."""

    recording: Recording = Recording()


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Record no longer, and keep what was recorded until it is collected."""


class Collect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="collect"):
    """Stop, and hand over: to the client's callable of this number, or into `directory`. With neither it is dropped.

    The callable gets an int64 array (host, offset, size in all), and the bytes from there on as uint8.
    """

    callback: int = 0
    directory: str = ""


Request = Start | Stop | Collect


def encode(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def decode(payload: bytes) -> Request:
    """Raises INVALID_ARGUMENT."""
    try:
        request: Request = msgspec.msgpack.decode(payload, type=Request)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"no request of the profiler: {error}") from None
    return request


def file_name(host: int) -> str:
    return f"host_{host}.xplane.pb"


def directory_of(location: str, run: str) -> str:
    """Where the profiles of one run go, as TensorBoard looks for them. Raises INVALID_ARGUMENT.

    A location is an absolute path, or the URL of an object store. What comes of it is one new directory of a fixed
    form.
    """
    if not _RUN.fullmatch(run):
        raise invalid(f"{run[:200]!r} is no name of a profile: letters, digits, '_', '-' and '.' are allowed")
    scheme, separator, rest = location.partition("://")
    if len(location) > 4000 or "\0" in location or "::" in location:
        raise invalid(f"{location[:200]!r} is no place for a profile")
    if separator and (scheme not in STORES or not rest.strip("/")):
        raise invalid(f"no profile can be written to {location[:200]!r}: give a path, or {', '.join(STORES)} and '://'")
    if not separator and not location.startswith("/"):
        raise invalid(f"{location[:200]!r} is relative, and hosts have no directory in common: give an absolute path")
    if ".." in rest.split("/") or ".." in location.split("/"):
        raise invalid(f"{location[:200]!r} leads out of itself")
    return f"{location.rstrip('/')}/plugins/profile/{run}"
