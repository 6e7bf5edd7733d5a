"""The protocol for shared libraries with FFI handlers, between the client's plug-in, its proxy and hosts.

A script registers a handler of a library that its process has loaded (`jax.ffi.register_ffi_target`). The plug-in
sends the library's file to the proxy once, as a plugin program, and names it by its hash from then on: a compile
request has an option with the targets of its program. The proxy registers the file as a function with each host that
compiles such a program. The host loads the file, and renames the targets of the program, so that targets of the same
name in different libraries are different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

import msgspec

from atoll.decodable import decodable
from atoll.errors import Code, StatusError, invalid
from atoll.protocol.messages import LibraryTarget

# Prefix of the plugin program; the file follows. The fingerprint of its executable is the file's hash.
LIBRARY_REQUEST = b"atoll library\0"
# The compile option, sent in `env_option_overrides`: a list of `LibraryTarget` in JSON, which the proxy removes.
TARGETS_OPTION = "atoll_ffi_targets"
# Prefix of the names under which hosts register targets. No client may use it in a program.
PRIVATE_PREFIX = "atoll_ffi."

# Prefix of an archive; a list of `LibraryFile` in msgpack follows, with the library itself as the first.
_ARCHIVE = b"atoll archive\0"

MAX_LIBRARY_BYTES = 256 << 20
MAX_ARCHIVE_FILES = 64
MAX_TARGETS = 1024  # of a program
_DIGITS = 32


class LibraryFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of an archive.

    Attributes:
        path: Relative to the directory of the archive.
        content: The bytes of the file.
    """

    path: str
    content: bytes


_Files = Annotated[tuple[LibraryFile, ...], msgspec.Meta(min_length=1, max_length=MAX_ARCHIVE_FILES)]
_decode_files = msgspec.msgpack.Decoder(decodable(_Files)).decode
_Targets = Annotated[tuple[LibraryTarget, ...], msgspec.Meta(max_length=MAX_TARGETS)]
_decode = msgspec.json.Decoder(decodable(_Targets)).decode
_encode = msgspec.msgpack.Encoder().encode


def library_hash(content: bytes | memoryview) -> str:
    """Return the name of a library in messages."""
    return hashlib.sha256(content).hexdigest()


def check_library_size(nbytes: int) -> None:
    """Raise RESOURCE_EXHAUSTED if a library is too large."""
    if nbytes > MAX_LIBRARY_BYTES:
        raise StatusError(
            Code.RESOURCE_EXHAUSTED,
            f"an FFI library has {nbytes} bytes, and the limit is {MAX_LIBRARY_BYTES}: strip it (strip --strip-debug)",
        )


def archived(files: Sequence[LibraryFile]) -> bytes:
    """Return the content of a library that needs the files after the first."""
    return _ARCHIVE + _encode(files)


def files_in_archive(content: bytes) -> tuple[LibraryFile, ...]:
    """Return the files of an archive, or nothing if the content is a library. Raise INVALID_ARGUMENT."""
    if not content.startswith(_ARCHIVE):
        return ()
    try:
        files = _decode_files(memoryview(content)[len(_ARCHIVE) :])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"invalid files of an FFI library: {error}") from None
    paths = {each.path for each in files}
    if len(paths) != len(files) or not all(map(_is_inside, paths)):
        raise invalid("the files of an FFI library have invalid paths")
    return files


def _is_inside(path: str) -> bool:
    """Return whether a path is in canonical form and stays in the directory that it is relative to."""
    pure = PurePosixPath(path)
    is_canonical = str(pure) == path and path.isprintable() and bool(pure.parts)
    return is_canonical and not pure.is_absolute() and ".." not in pure.parts


def read_targets(text: str) -> tuple[LibraryTarget, ...]:
    """Decode the option with a program's targets. Raise INVALID_ARGUMENT if it is invalid."""
    try:
        targets = _decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"invalid FFI targets: {error}") from None
    if len({each.name for each in targets}) != len(targets):
        raise invalid("the FFI targets of a program contain a name twice")
    return targets


def private_name(target: LibraryTarget, tenant: str) -> str:
    """Return the name under which a host registers a target. It depends on the library's content and on the tenant."""
    digest = hashlib.sha256(_encode((target, tenant))).hexdigest()
    return f"{PRIVATE_PREFIX}{digest[:_DIGITS]}"
