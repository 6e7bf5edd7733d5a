"""The FFI handlers that the user's process has registered with JAX, and the libraries that contain them.

A handler is an address in this process. The dynamic loader knows the file of the library that contains it. Hosts load
the same file, so the handler is at the same offset there.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.client.library_dependencies import with_dependencies
from atoll.errors import Code, StatusError, invalid, unimplemented
from atoll.protocol.ffi_libraries import check_library_size, library_hash
from atoll.protocol.messages import LibraryPlace, LibraryStage, LibraryTarget, LibraryType

# JAX's names for the platforms of registrations, and XLA's.
PLATFORMS = {"cpu": "Host", "cuda": "CUDA", "gpu": "CUDA", "rocm": "ROCM"}
_EXECUTE = "execute"
# Packages whose handlers hosts have themselves: jaxlib, and JAX's plug-ins for GPUs.
_OF_JAX, _PLUGINS = "jaxlib", ("jax_cuda", "jax_rocm")
_ADVICE = "pass the file of the library to atoll.ffi.register"


@dataclass(frozen=True)
class Library:
    """A library's file, and the libraries of its package that it needs, as they were when this object was made.

    Attributes:
        path: The file.
        content: The bytes of the file, or an archive if the library needs others.
        digest: The hash of `content`.
    """

    path: str
    content: bytes
    digest: str


@dataclass(frozen=True)
class HandlerRegistration:
    """A target's handlers in a library: (stage, place)."""

    library: Library
    handlers: tuple[tuple[LibraryStage, LibraryPlace], ...]
    types: tuple[LibraryType, ...] = ()

    def target(self, name: str, is_batch_partitionable: bool) -> LibraryTarget:
        return LibraryTarget(name, self.library.digest, self.handlers, self.types, is_batch_partitionable)


def read_library(path: str | os.PathLike[str]) -> Library:
    """Read a library's file, and the libraries that it needs. Raise INVALID_ARGUMENT or RESOURCE_EXHAUSTED."""
    try:
        check_library_size(os.stat(path).st_size)
        content = Path(path).read_bytes()
    except OSError as error:
        raise invalid(f"the FFI library {os.fspath(path)!r} cannot be read: {error.strerror}") from None
    content = with_dependencies(os.fspath(path), content)
    return Library(os.fspath(path), content, library_hash(content))


class _SymbolInfo(ctypes.Structure):
    """Dl_info of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded_file(address: int) -> tuple[str, int] | None:
    """Return the file of the library that contains an address, and where the library begins; None for other memory."""
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info)) or not info.base:
        return None
    return os.fsdecode(info.file or b""), int(info.base)


@dataclass(frozen=True)
class _Location:
    """The file that is mapped at an address, and the address's offset from where the library begins."""

    path: str
    inode: int
    offset: int


def _locate(address: int) -> _Location | None:
    """Return the location of an address in a library; None if no file is known."""
    loaded = _loaded_file(address)
    if loaded is None:
        return None
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(None, 5)
                first, _, last = fields[0].partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return _Location(fields[5], int(fields[4]), address - loaded[1]) if len(fields) > 5 else None
    except OSError:  # not Linux
        return None
    return None


def _is_of_jax(address: int) -> bool:
    loaded = _loaded_file(address)
    return loaded is not None and any(part == _OF_JAX or part.startswith(_PLUGINS) for part in Path(loaded[0]).parts)


def _address(capsule: Any) -> int:
    """Return the pointer in a PyCapsule."""
    api = ctypes.pythonapi
    name_of, pointer_of = api.PyCapsule_GetName, api.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer_of(capsule, name_of(capsule)) or 0)


class FfiHandlers:
    """The handlers by platform and target. Thread-safe.

    A patch of JAX records registrations (`record_target`, `record_type`). If a script has used JAX's CPUs before Atoll
    was loaded, XLA has some of them, and lists the handlers of the stage `execute` only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[tuple[str, str], HandlerRegistration] = {}  # by XLA's platform and target
        self._types: dict[tuple[str, str], Mapping[str, Any]] = {}  # by XLA's platform and name
        self._recorded: dict[tuple[str, str], Any] = {}  # capsules by stage, or one capsule of the older interface
        self._files: dict[tuple[str, int, int, int], Library] = {}
        self._partitionable: set[str] = set()
        self._checked: dict[str, bool] = {}  # whether all handlers of a target are JAX's own

    def give(self, platform: str, registrations: Mapping[str, HandlerRegistration]) -> None:
        """Use these registrations instead of JAX's, for a platform in JAX's name."""
        with self._lock:
            self._given.update({(PLATFORMS[platform], name): each for name, each in registrations.items()})

    def record_target(self, name: str, handlers: Any, platform: str, version: int) -> None:
        """Record a target that the script registers."""
        stages = {_EXECUTE: handlers} if version == 1 and not isinstance(handlers, Mapping) else handlers
        with self._lock:
            self._recorded[PLATFORMS.get(platform, platform), name] = stages

    def record_type(self, name: str, registration: Any, platform: str) -> None:
        """Record a type that the script registers for the states of handlers."""
        if isinstance(registration, Mapping):
            with self._lock:
                self._types[PLATFORMS.get(platform, platform), name] = registration

    def record_batch_partitionable(self, name: str) -> None:
        """Record that XLA may divide the operands of a target along their leading dimensions."""
        with self._lock:
            self._partitionable.add(name)

    def is_batch_partitionable(self, name: str) -> bool:
        with self._lock:
            return name in self._partitionable

    def names(self, platform: str) -> set[str]:
        """Return the targets in the user's libraries, for a platform in JAX's name. Hosts have all others."""
        xla_platform = PLATFORMS.get(platform, platform)
        registered = self._registered(xla_platform)
        with self._lock:
            for name in registered.keys() - self._checked.keys():
                self._checked[name] = all(map(_is_of_jax, map(_address, _stages(registered[name]).values())))
            given = {name for its_platform, name in self._given if its_platform == xla_platform}
            return given | {name for name in registered if not self._checked[name]}

    def find(self, platform: str, names: Iterable[str]) -> dict[str, HandlerRegistration]:
        """Return the registrations of targets among `names(platform)`. Raise StatusError if one cannot be sent."""
        xla_platform = PLATFORMS.get(platform, platform)
        registered = self._registered(xla_platform)
        found = {}
        for name in names:
            with self._lock:
                given = self._given.get((xla_platform, name))
            found[name] = given or self._registration(name, registered[name], xla_platform)
        return found

    def _registered(self, xla_platform: str) -> dict[str, Any]:
        """Return the registrations by target: capsules by stage, or one capsule of the older interface."""
        from jax._src.lib import xla_client

        with self._lock:
            recorded = {name: each for (platform, name), each in self._recorded.items() if platform == xla_platform}
        return {**xla_client.custom_call_targets(xla_platform), **recorded}

    def _registration(self, name: str, handlers: Any, xla_platform: str) -> HandlerRegistration:
        located = {stage: _locate(_address(capsule)) for stage, capsule in _stages(handlers).items()}
        if not isinstance(handlers, Mapping):
            raise unimplemented(
                f"the FFI target {name!r} has XLA's older interface (api_version=0), which Atoll does not run: define "
                "the handler with XLA_FFI_DEFINE_HANDLER_SYMBOL"
            )
        places = []
        for stage, each in located.items():
            if each is None:
                raise unimplemented(
                    f"the handler of the FFI target {name!r} ({stage}) is in no file that this process has loaded, so "
                    f"it cannot be sent to hosts: {_ADVICE}, or use jax.pure_callback for functions made at run time"
                )
            places.append((stage, each))
        paths = sorted({each.path for _, each in places})
        if len(paths) > 1:
            raise unimplemented(f"the handlers of the FFI target {name!r} are in several libraries: {', '.join(paths)}")
        library = self._library(name, places[0][1])
        types = tuple(self._types_in(paths[0], xla_platform))
        return HandlerRegistration(library, tuple((stage, each.offset) for stage, each in places), types)

    def _types_in(self, path: str, xla_platform: str) -> Iterator[LibraryType]:
        with self._lock:
            types = [(name, each) for (platform, name), each in self._types.items() if platform == xla_platform]
        for name, registration in types:
            located = {key: _locate(_address(capsule)) for key, capsule in registration.items() if capsule is not None}
            places = {key: each.offset for key, each in located.items() if each is not None and each.path == path}
            if "type_id" in places:
                yield LibraryType(name, places["type_id"], places.get("type_info"))

    def _library(self, name: str, location: _Location) -> Library:
        """Return the file of a loaded library. Raise FAILED_PRECONDITION if it is another one now."""
        path = location.path.removesuffix(" (deleted)")
        try:
            status = os.stat(path)
        except OSError:
            status = None
        if status is None or status.st_ino != location.inode:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"the file {path} of the FFI target {name!r} was replaced or deleted after this process had loaded it: "
                f"start the script again, or {_ADVICE}",
            )
        key = path, status.st_ino, status.st_mtime_ns, status.st_size
        with self._lock:
            library = self._files.get(key)
        if library is None:
            library = read_library(path)
            with self._lock:
                self._files[key] = library
        return library


def _stages(handlers: Any) -> Mapping[LibraryStage, Any]:
    return handlers if isinstance(handlers, Mapping) else {"execute": handlers}


HANDLERS = FfiHandlers()
