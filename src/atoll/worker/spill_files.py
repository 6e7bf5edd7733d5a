"""Files of spilled arrays: one per piece, which holds only the piece's bytes, and one manifest per host.

With the manifests, another cluster can open the session. A manifest has the controller's description of the session,
and the host's pieces with sizes and checksums. It is written last and atomically.
"""

from __future__ import annotations

import glob
import os
import shutil
import zlib
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.atomic_files import sync_directory, write_atomically
from atoll.cluster.directories import suspended_directory
from atoll.errors import Code, Details, Kind, StatusError, failed
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.transfers.piece_contents import read_file
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS

FORMAT = 1
# Bytes that are checksummed and written at a time, so that they are in the CPU's cache for the second step.
_CHUNK = 1 << 20


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a directory that belong to one host."""

    format: int
    host: int
    session: msgspec.Raw  # the controller's description (`migration.manifest`)
    pieces: tuple[dict[str, Any], ...]


def path_of(directory: str) -> Path:
    """Return the path of a directory, which may be relative to this host's directory for suspended sessions."""
    return Path(suspended_directory()) / directory


def make_directory(directory: str) -> None:
    """Make a directory. Raise StatusError if that fails."""
    path = path_of(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise _failed("make the directory", path, error) from None


def write(directory: str, number: int, contents: memoryview) -> m.SpilledPiece:
    """Write a piece to a new file. Raise StatusError if that fails; then no file is left."""
    path = path_of(directory) / f"{number}.piece"
    checksum = 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for start in range(0, contents.nbytes, _CHUNK):
                chunk = contents[start : start + _CHUNK]
                checksum = zlib.crc32(chunk, checksum)
                while chunk.nbytes:
                    chunk = chunk[os.write(descriptor, chunk) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with suppress(OSError):
                path.unlink()
        raise _failed(f"write {human_bytes(contents.nbytes)} to", path, error) from None
    return m.SpilledPiece(number, contents.nbytes, str(path), checksum)


def write_manifest(directory: str, host: int, session: bytes, pieces: Sequence[m.SpilledPiece]) -> None:
    """Write the manifest of a host. Raise StatusError if that fails."""
    path = path_of(directory) / f"host-{host}.json"
    rows = tuple(
        {"number": each.number, "file": Path(each.path).name, "nbytes": each.nbytes, "crc32": each.checksum}
        for each in sorted(pieces, key=lambda piece: piece.number)
    )
    manifest = Manifest(format=FORMAT, host=host, session=msgspec.Raw(session or b"null"), pieces=rows)
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(manifest)), durable=True)
    except OSError as error:
        raise _failed("write", path, error) from None


def read(piece: m.SpilledPiece) -> Any:
    """Return the contents of a piece. Raise StatusError (DATA_LOSS) if they are not those that were written."""
    content = RECEIVE_BUFFERS.take(piece.nbytes)
    try:
        descriptor = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor).st_size
            if found != piece.nbytes:
                text = f"{piece.path} has {found} bytes instead of the {piece.nbytes} that were spilled there"
                raise _lost(text)
            read_file(descriptor, content.data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _lost(_text("read", Path(piece.path), error)) from None
    if zlib.crc32(content.data) != piece.checksum:
        raise _lost(f"{piece.path} is not what was spilled there: its checksum differs")
    return content


def remove(pieces: Iterable[m.SpilledPiece]) -> None:
    """Remove the files of pieces. If a directory has no more pieces, remove its manifests and the directory."""
    directories = set()
    for piece in pieces:
        path = Path(piece.path)
        directories.add(path.parent)
        with suppress(OSError):
            path.unlink()
    for directory in directories:
        with suppress(OSError):
            if not any(each.suffix == ".piece" for each in directory.iterdir()):
                for each in directory.glob("host-*.json"):
                    each.unlink(missing_ok=True)
                directory.rmdir()


def remove_others(prefix: str, before: int, numbers: Container[int]) -> None:
    """Remove the directories whose name is `prefix` and a number below `before` that is not one of `numbers`."""
    start = path_of(prefix)
    for path in start.parent.glob(f"{glob.escape(start.name)}*"):
        number = path.name.removeprefix(start.name)
        if number.isdecimal() and int(number) < before and int(number) not in numbers:
            shutil.rmtree(path, ignore_errors=True)


def _failed(what: str, path: Path, error: OSError) -> StatusError:
    return StatusError(Code.INTERNAL, _text(what, path, error))


def _lost(text: str) -> StatusError:
    return failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS))


def _text(what: str, path: Path, error: OSError) -> str:
    return f"cannot {what} {path}: {error.strerror or error}"
