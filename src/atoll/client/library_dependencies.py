"""The shared libraries that an FFI library needs from its own package.

Wheels contain such libraries in a directory beside the package. The dynamic loader finds them by paths that are
relative to the library: `$ORIGIN` in its RPATH or RUNPATH. Hosts may not have the package, and load a copy of the
library from another directory, so the libraries are sent together.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import invalid
from atoll.protocol.ffi_libraries import MAX_ARCHIVE_FILES, LibraryFile, archived, check_library_size

# Libraries of the C and C++ compilers, which each host has.
_OF_THE_SYSTEM = (
    *("ld-linux", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "libutil.", "libresolv.", "libmvec."),
    *("libgcc_s.", "libstdc++."),
)
# Packages that hosts have themselves: jaxlib, and JAX's plug-ins for GPUs with the libraries that they need.
_ON_HOSTS = ("jaxlib", "jax_cuda", "jax_rocm", "nvidia")
_ELF64 = b"\x7fELF\x02\x01"
_LOADED, _DYNAMIC = 1, 2  # kinds of segments
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH = 0, 1, 5, 15, 29  # tags of the dynamic section
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


@dataclass(frozen=True)
class _Dynamic:
    """The names in a library's dynamic section: the libraries that it needs, and directories to search for them."""

    needed: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()


def with_dependencies(path: str, content: bytes) -> bytes:
    """Return the content to send for the library at `path`: the file itself, or an archive with what it needs.

    Raise INVALID_ARGUMENT or RESOURCE_EXHAUSTED if the files cannot be read or are too large.
    """
    found = {os.path.abspath(path): content}
    _add(found, os.path.abspath(path), ())
    if len(found) == 1:
        return content
    if len(found) > MAX_ARCHIVE_FILES:
        raise invalid(f"the FFI library {path!r} needs {len(found)} libraries, and the limit is {MAX_ARCHIVE_FILES}")
    check_library_size(sum(map(len, found.values())))
    directory = os.path.commonpath([os.path.dirname(each) for each in found])
    return archived([LibraryFile(os.path.relpath(each, directory), file) for each, file in found.items()])


def _add(found: dict[str, bytes], path: str, inherited: tuple[str, ...]) -> None:
    """Add the libraries that the library at `path` needs, and those that they need. They inherit its directories."""
    dynamic = _read_dynamic(found[path])
    origin = os.path.dirname(path)
    directories = dict.fromkeys([os.path.normpath(_expanded(each, origin)) for each in dynamic.directories])
    searched = (*directories, *inherited)
    for name in dynamic.needed:
        if name.startswith(_OF_THE_SYSTEM) or "/" in name:
            continue
        file = next((each for each in (os.path.join(part, name) for part in searched) if os.path.isfile(each)), None)
        if file is None or file in found or _is_on_hosts(file):
            continue
        try:
            check_library_size(os.stat(file).st_size)
            found[file] = Path(file).read_bytes()
        except OSError as error:
            raise invalid(f"the library {file!r} of an FFI library cannot be read: {error.strerror}") from None
        _add(found, file, searched)


def _expanded(directory: str, origin: str) -> str:
    for each in _ORIGIN:
        directory = directory.replace(each, origin)
    return directory


def _is_on_hosts(file: str) -> bool:
    return any(part.startswith(_ON_HOSTS) for part in Path(file).parts)


def _read_dynamic(content: bytes) -> _Dynamic:
    """Read the dynamic section of an ELF file of 64 bits. Other files have none; the host reports what is wrong."""
    if not content.startswith(_ELF64):
        return _Dynamic()
    try:
        return _parse(content)
    except (struct.error, ValueError, StopIteration):
        return _Dynamic()


def _parse(content: bytes) -> _Dynamic:
    (start,) = struct.unpack_from("<Q", content, 0x20)
    size, count = struct.unpack_from("<HH", content, 0x36)
    segments = [struct.unpack_from("<IIQQQQ", content, start + each * size) for each in range(count)]
    entries: list[tuple[int, int]] = []
    for kind, _, offset, _, _, nbytes in segments:
        if kind == _DYNAMIC:
            entries += struct.iter_unpack("<QQ", content[offset : offset + nbytes - nbytes % 16])
    tags = [tag for tag, _ in entries]
    entries = entries[: tags.index(_END)] if _END in tags else entries
    address = next(value for tag, value in entries if tag == _STRINGS)
    strings = next(
        offset + address - at
        for kind, _, offset, at, _, nbytes in segments
        if kind == _LOADED and at <= address < at + nbytes
    )

    def names(wanted: int) -> list[str]:
        begins = [strings + value for tag, value in entries if tag == wanted]
        return [os.fsdecode(content[begin : content.index(b"\0", begin)]) for begin in begins]

    # RUNPATH takes the place of RPATH. Other directories are those of the script's machine.
    listed = names(_RUNPATH) or names(_RPATH)
    directories = [each for every in listed for each in every.split(":") if each.startswith(_ORIGIN)]
    return _Dynamic(tuple(names(_NEEDED)), tuple(directories))
