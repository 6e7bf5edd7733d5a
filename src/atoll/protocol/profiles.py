"""Requests of a session to the profilers of its hosts, as payloads of the query "profile".

A host's answer is empty. It delivers the profile, a serialized XSpace of XLA, without going through the controller: in
parts to a callable of the client (`Collect.callback`), or to a directory to which the host can write.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid

# Limit for the duration of a profile. Nothing else bounds the cost of a client that forgets its profile.
MAX_SECONDS = 120.0
# Limit for the size of a host's profile.
MAX_BYTES = 1 << 30
# Schemes of object stores to which a host can write if it has their fsspec packages.
STORES = ("gs", "s3", "az", "abfs")

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Value = bool | Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)] | Annotated[str, msgspec.Meta(max_length=4096)]

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options as in `jax.profiler.ProfileOptions`, for a recording of at most `seconds`.

    Python is not recorded, because a worker's Python is Atoll's own.
    """

    host_tracer_level: Annotated[int, msgspec.Meta(ge=0, le=3)] = 2
    advanced: Annotated[dict[_Name, _Value], msgspec.Meta(max_length=64)] = {}
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = MAX_SECONDS


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="start"):
    """Start recording. A host refuses this while it records for any session."""

    recording: Recording = Recording()


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Stop recording, and keep the profile until it is collected."""


class Collect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="collect"):
    """Stop recording, and send the profile to the client's callable `callback` or write it to `directory`, or drop it.

    The callable receives an int64 array (host, offset, total size) and the bytes from that offset on as uint8.
    """

    callback: int = 0
    directory: str = ""


Request = Start | Stop | Collect


def encode(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def decode(payload: bytes) -> Request:
    """Decode a request. Raise INVALID_ARGUMENT if it is invalid."""
    try:
        request: Request = msgspec.msgpack.decode(payload, type=decodable(Request))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"invalid request to the profiler: {error}") from None
    return request


def file_name(host: int) -> str:
    return f"host_{host}.xplane.pb"


def directory_of(location: str, run: str) -> str:
    """Return the directory for the profiles of one run, at which TensorBoard expects them.

    A location is an absolute path or the URL of an object store. Raise INVALID_ARGUMENT if an argument is invalid.
    """
    if not _RUN.fullmatch(run):
        raise invalid(f"invalid profile name {run[:200]!r}: use letters, digits, '_', '-' and '.'")
    scheme, separator, rest = location.partition("://")
    if len(location) > 4000 or "\0" in location or "::" in location:
        raise invalid(f"invalid location {location[:200]!r} for a profile")
    if separator and (scheme not in STORES or not rest.strip("/")):
        raise invalid(f"cannot write a profile to {location[:200]!r}: use a path or a URL of {', '.join(STORES)}")
    if not separator and not location.startswith("/"):
        raise invalid(f"{location[:200]!r} is relative, but hosts have no common directory: use an absolute path")
    if ".." in rest.split("/") or ".." in location.split("/"):
        raise invalid(f"invalid location {location[:200]!r} for a profile: '..' is not allowed")
    return f"{location.rstrip('/')}/plugins/profile/{run}"
