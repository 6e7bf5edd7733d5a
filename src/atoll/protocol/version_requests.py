"""Requests of the plug-in in the user's process to publish arrays and to read published arrays.

A request is the payload of a plugin program (see `protocol.questions`), with `MAGIC` and a struct in msgpack. The
arrays to publish were staged before (see `protocol.submission`). The reply to `PublishArrays` and to `OpenArrays` is in
the fingerprint of an executable that is never run. An error is a part of the reply, since jaxlib logs failed requests.
An open version is closed when its executable is destructed. Each run of the executable of `ReadArrays` returns arrays
of the version whose reader the run names. So a script loads it once for all versions with arrays of the same types.

The proxy sends the controller a message for each request (`protocol.messages.proxy_messages`), and makes its reply from
the answer:

    request          reply              message to the controller    answer
    PublishArrays    NumberedVersion    Publish                      Published
    OpenArrays       OpenedArrays       OpenVersion                  VersionOpened
    ReadArrays       (an executable)    ReadVersion, at each run     (none)
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import Status, invalid
from atoll.ir.types import ArraySpec
from atoll.protocol.messages import MAX_PATH, MAX_PUBLISHED, MAX_STRUCTURE, VersionArray
from atoll.wire.framing import NO_MESSAGE

MAGIC = b"atoll.arrays\0"

READER_OF_RUN = -1
MAX_LAUNCH_ID = (1 << 31) - 1  # the largest number that a run can pass

_Name = Annotated[str, msgspec.Meta(max_length=300)]
_Number = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_Path = Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class PublishArrays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="publish"):
    """Publish the staged arrays as the next version of a name. Without paths, forget the staged arrays."""

    name: _Name
    keep: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    paths: Annotated[tuple[_Path, ...], msgspec.Meta(max_length=MAX_PUBLISHED)]
    structure: Annotated[bytes, msgspec.Meta(max_length=MAX_STRUCTURE)] = b""
    replicas: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1
    on_disk: bool = False


class OpenArrays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="open"):
    """Open a version, or wait for its files: see `protocol.messages.OpenVersion`. The reply is an `OpenedArrays`."""

    name: _Name
    version: _Number = -1
    newer_than: _Number = 0
    seconds: _Seconds = 0.0
    in_files: bool = False


class NumberedVersion(msgspec.Struct, frozen=True):
    """The reply to `PublishArrays`.

    `donates` is set if the script has donated or deleted arrays of the former version.
    """

    status: Status
    version: int = 0
    donates: bool = False


class OpenedArrays(msgspec.Struct, frozen=True):
    """The reply to `OpenArrays`: an open version, and the number of its reader, or -1 if it only waited for files.

    `losses` is the number of islands that the session has lost so far.
    """

    status: Status
    reader: int = -1
    version: int = 0
    arrays: tuple[VersionArray, ...] = ()
    structure: bytes = b""
    losses: int = 0


class ReadArrays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="read"):
    """Load an executable that returns arrays of open versions from number `first` on, as arrays of these types.

    A run reads the version of `reader`. If that is `READER_OF_RUN`, it reads the version of the reader whose number is
    the `launch_id` of the run. If `is_original` is set, the arrays come from the version itself, and not from another
    subscriber.
    """

    targets: Annotated[tuple[ArraySpec, ...], msgspec.Meta(min_length=1, max_length=MAX_PUBLISHED)]
    first: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PUBLISHED)] = 0
    is_original: bool = False
    reader: _Number = READER_OF_RUN


ArrayRequest = PublishArrays | OpenArrays | ReadArrays


def write_request(request: ArrayRequest) -> bytes:
    return MAGIC + msgspec.msgpack.encode(request)


def read_request(payload: bytes) -> ArrayRequest:
    """Decode a request. Raise INVALID_ARGUMENT if it is invalid."""
    try:
        request: ArrayRequest = msgspec.msgpack.decode(payload[len(MAGIC) :], type=decodable(ArrayRequest))
    except NO_MESSAGE as error:
        raise invalid(f"invalid request for published arrays: {error}") from None
    return request
