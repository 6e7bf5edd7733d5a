"""Shared libraries of clients in this process, and the registration of their handlers with XLA.

Invariant: a handler's name depends on its library's content, on its place there and on the tenant, and no client can
write such a name into a program. So a program only calls handlers of libraries that its own tenant has sent. XLA keeps
the address of a handler for as long as the process runs, so libraries stay loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform as machine
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.lib import xla_client as xc

from atoll.cluster.slice_placement import GPUS
from atoll.devices.compilers.compiler_messages import RenamedTarget
from atoll.devices.xla.xla_custom_calls import address_of, capsule
from atoll.errors import Code, StatusError, invalid, not_found
from atoll.protocol.ffi_libraries import (
    LibraryFile,
    check_library_size,
    files_in_archive,
    library_hash,
    private_name,
)
from atoll.protocol.messages import LibraryPlace, LibraryTarget

# Libraries of a process, which stay loaded until the process ends.
MAX_LIBRARIES = 512
MAX_BYTES = 4 << 30
_FILE = "library.so"  # name of the file of a library that needs no others
_ELF, _SHARED = b"\x7fELF", 3
_MACHINES = {"x86_64": 62, "aarch64": 183}
_LINK_MAP = 2  # request of dlinfo
_MAX_TEXT = 500


class SymbolInfo(ctypes.Structure):
    """Dl_info of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _LinkMap(ctypes.Structure):
    """The beginning of link_map of the C library."""

    _fields_ = (("difference", ctypes.c_void_p), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_void_p))


class _Library:
    """A loaded library.

    Args:
        files: The library, and after it the files that it needs.
        digest: The name of the library in messages.
    """

    def __init__(self, files: Sequence[LibraryFile], digest: str) -> None:
        self.digest = digest
        self.nbytes = sum(len(each.content) for each in files)
        # A new directory for each library, because the C library does not load a second file of the same path.
        with tempfile.TemporaryDirectory(prefix="atoll-ffi-", ignore_cleanup_errors=True) as directory:
            path = os.path.join(directory, files[0].path)
            try:
                for each in files:
                    _write(os.path.join(directory, each.path), each.content)
                self._handle = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
            except OSError as error:
                text = str(error).replace(path, "it").splitlines()[0][:_MAX_TEXT]
                raise invalid(f"the FFI library {digest[:12]} cannot be loaded on this host: {text}") from None
        self._libc = ctypes.CDLL(None)
        self._base = self._beginning()

    def address(self, place: LibraryPlace) -> int:
        """Return the address of a symbol or an offset. Raise INVALID_ARGUMENT if it is not in the library."""
        if isinstance(place, str):
            try:
                return ctypes.cast(getattr(self._handle, place), ctypes.c_void_p).value or 0
            except (AttributeError, ValueError):
                raise invalid(f"the FFI library {self.digest[:12]} has no symbol {place[:200]!r}") from None
        address = self._base + place
        if self._info(address) != self._base:
            raise invalid(f"the offset {place} is outside the FFI library {self.digest[:12]}")
        return address

    def _beginning(self) -> int:
        found = ctypes.POINTER(_LinkMap)()
        handle = ctypes.c_void_p(self._handle._handle)
        if self._libc.dlinfo(handle, _LINK_MAP, ctypes.byref(found)):
            raise StatusError(Code.INTERNAL, f"the address of the FFI library {self.digest[:12]} is unknown")
        return self._info(found.contents.dynamic)

    def _info(self, address: int) -> int:
        """Return where the library that contains `address` begins; 0 if none does."""
        info = SymbolInfo()
        return (info.base or 0) if self._libc.dladdr(ctypes.c_void_p(address), ctypes.byref(info)) else 0


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


class XlaLibraries:
    """The libraries of this process: a `devices.device.LibraryLoader`."""

    def __init__(self, platform: str) -> None:
        self._platform = platform.upper() if platform in GPUS else platform
        self._lock = threading.Lock()
        self._libraries: dict[tuple[str, str], _Library] = {}  # by tenant and hash
        self._needed: dict[str, str] = {}  # hashes of the files that libraries need, by name
        self._types: set[str] = set()  # names that XLA knows
        self._targets: set[str] = set()

    def load(self, content: bytes, tenant: str) -> None:
        check_library_size(len(content))
        digest = library_hash(content)
        with self._lock:
            if (tenant, digest) in self._libraries:
                return
            files = files_in_archive(content) or (LibraryFile(_FILE, content),)
            for each in files:
                _check_format(each.content, digest)
            needed = {os.path.basename(each.path): library_hash(each.content) for each in files[1:]}
            self._check_names(needed, digest)
            used = sum(each.nbytes for each in self._libraries.values())
            if len(self._libraries) >= MAX_LIBRARIES or used + len(content) > MAX_BYTES:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"this host has loaded {len(self._libraries)} FFI libraries of {used} bytes, and it cannot unload "
                    f"them: the limit is {MAX_LIBRARIES} libraries and {MAX_BYTES} bytes until its island restarts",
                )
            self._libraries[tenant, digest] = _Library(files, digest)
            self._needed.update(needed)

    def _check_names(self, needed: Mapping[str, str], digest: str) -> None:
        """Raise FAILED_PRECONDITION if the C library would use a file of the same name that it has loaded before."""
        for name, content in needed.items():
            if self._needed.get(name, content) != content and _is_loaded(name):
                raise StatusError(
                    Code.FAILED_PRECONDITION,
                    f"the FFI library {digest[:12]} needs {name}, and this host has loaded another file of this name, "
                    "which it cannot unload until its island restarts: give the file another name (-soname) when you "
                    "link it",
                )

    def register(self, targets: Sequence[LibraryTarget], tenant: str) -> tuple[RenamedTarget, ...]:
        with self._lock:
            return tuple(self._register(each, tenant) for each in targets)

    def _register(self, target: LibraryTarget, tenant: str) -> RenamedTarget:
        library = self._libraries.get((tenant, target.library))
        if library is None:
            raise not_found(f"the FFI library {target.library[:12]} of {target.name!r} is not on this host")
        renamed = RenamedTarget(target.name, private_name(target, tenant), target.is_batch_partitionable)
        if renamed.private_name in self._targets:
            return renamed
        for each in target.types:
            name = f"{private_name(LibraryTarget('', target.library, ()), tenant)}.{each.name}"
            if name not in self._types:
                places = {"type_id": each.type_id, "type_info": each.type_info}
                addresses = {key: capsule(library.address(at)) for key, at in places.items() if at is not None}
                xc.register_custom_type(name, addresses, platform=self._platform)
                self._types.add(name)
        handlers = {stage: capsule(library.address(place)) for stage, place in target.handlers}
        xc.register_custom_call_target(renamed.private_name, handlers, platform=self._platform, api_version=1)
        make_partitionable(renamed)
        self._targets.add(renamed.private_name)
        return renamed


class StandIns:
    """Handlers for targets of libraries in a compiler process, which runs no programs and loads no libraries."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._address = 0

    def register(self, targets: Sequence[RenamedTarget]) -> None:
        for each in targets:
            if each.private_name not in self._names:
                self._address = self._address or address_of(lambda frame: None)
                handlers: dict[str, Any] = {"execute": capsule(self._address)}
                xc.register_custom_call_target(each.private_name, handlers, platform="cpu", api_version=1)
                make_partitionable(each)
                self._names.add(each.private_name)


def make_partitionable(target: RenamedTarget) -> None:
    """Let XLA divide a target's operands along their leading dimensions if the client has registered it so."""
    if target.is_batch_partitionable:
        xc.register_custom_call_as_batch_partitionable(target.private_name)


def _is_loaded(name: str) -> bool:
    """Return whether the C library uses a loaded file for libraries that need this name."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _check_format(content: bytes, digest: str) -> None:
    """Raise INVALID_ARGUMENT unless the file is a shared object for this machine, so that the error is clear."""
    header = content[:20]
    if len(header) < 20 or header[:4] != _ELF or header[4:6] != b"\x02\x01":
        raise invalid(f"the FFI library {digest[:12]} is not a shared library for Linux (ELF, 64 bits)")
    kind, built_for = struct.unpack_from("<HH", header, 16)
    wanted = _MACHINES.get(machine.machine(), built_for)
    if kind != _SHARED or built_for != wanted:
        names = {number: name for name, number in _MACHINES.items()}
        other = names.get(built_for, f"machine {built_for}") if kind == _SHARED else "no shared library"
        raise invalid(
            f"the FFI library {digest[:12]} is for {other}, and this host is {machine.machine()}: pass a shared "
            "library for the hosts to atoll.ffi.register"
        )
