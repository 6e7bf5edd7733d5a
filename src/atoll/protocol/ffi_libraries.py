"""The protocol for shared libraries with FFI handlers, between the client's plug-in, its proxy and hosts.

A script registers a handler of a library that its process has loaded (`jax.ffi.register_ffi_target`). The plug-in
sends the library's file to the proxy once, as a plugin program, and names it by its hash from then on: a compile
request has an option with the targets of its program. The proxy registers the file as a function with each host that
compiles such a program. The host loads the file, and renames the targets of the program, so that targets of the same
name in different libraries are different.
"""

from __future__ import annotations

import hashlib
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

MAX_LIBRARY_BYTES = 256 << 20
MAX_TARGETS = 1024  # of a program
_DIGITS = 32

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
