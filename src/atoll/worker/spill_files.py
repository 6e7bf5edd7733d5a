"""Files of spilled arrays, which have only the bytes of pieces, and one manifest per host for a session.

A large piece has its own file. The small pieces of a request share one, since a disk takes longer to sync a file than
to write such a piece.

With the manifests, another cluster can open the session. A manifest has the controller's description of the session,
and the host's pieces with sizes and checksums. It is written last and atomically.
"""

from __future__ import annotations

import glob
import os
import shutil
import threading
import zlib
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.atomic_files import sync_directory, write_atomically
from atoll.cluster.directories import suspended_directory
from atoll.cluster.processes.process_table import this_machine
from atoll.errors import Code, Details, Kind, StatusError, failed
from atoll.missing import MISSING
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.transfers.piece_contents import read_file
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS

FORMAT = 2  # 1 lacks the offsets of pieces
# Bytes that are checksummed and written at a time, so that they are in the CPU's cache for the second step.
_CHUNK = 1 << 20
# Pieces of up to this size may share a file.
MAX_SHARED_BYTES = 1 << 20


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
    except OSError as error:
        raise _failed("make the directory", path, error) from None


def sync(directory: str) -> None:
    """Make the names of a directory and of its files survive a loss of power. Raise StatusError if that fails."""
    path = path_of(directory)
    try:
        sync_directory(path)
        sync_directory(path.parent)
    except OSError as error:
        raise _failed("write", path, error) from None


def write(directory: str, number: int, contents: memoryview) -> m.SpilledPiece:
    """Write a piece to a new file. Raise StatusError if that fails; then no file is left."""
    path = path_of(directory) / f"{number}.piece"
    try:
        descriptor = _create(path)
        try:
            checksum = _write(descriptor, contents, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with suppress(OSError):
                path.unlink()
        raise _not_written(contents, path, error) from None
    return m.SpilledPiece(number, contents.nbytes, str(path), checksum)


class SharedFile:
    """A file of pieces that are dropped together. It is made for the first piece, whose number is in its name.

    Threads may write pieces at the same time. `finish` or `remove` follows when all of them have done so.
    """

    def __init__(self, directory: str) -> None:
        self._directory = path_of(directory)
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._descriptor = -1
        self._end = 0

    def write(self, number: int, contents: memoryview) -> m.SpilledPiece:
        """Write a piece behind the others. Raise StatusError if that fails."""
        with self._lock:
            path = self._path or self._directory / f"{number}.piece"
            offset = self._end
            try:
                if self._path is None:
                    self._descriptor = _create(path)
                    self._path = path
            except OSError as error:
                raise _not_written(contents, path, error) from None
            self._end += contents.nbytes
        try:
            checksum = _write(self._descriptor, contents, offset)
        except OSError as error:
            raise _not_written(contents, path, error) from None
        return m.SpilledPiece(number, contents.nbytes, str(path), checksum, offset)

    def finish(self) -> None:
        """Make the pieces survive a loss of power, and close the file. Raise StatusError if that fails."""
        if self._path is None:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _failed(f"write {human_bytes(self._end)} to", self._path, error) from None
        finally:
            self._close()

    def remove(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._close()
            with suppress(OSError):
                self._path.unlink()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _create(path: Path) -> int:
    """Create a file, which must not exist, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, contents: memoryview, offset: int) -> int:
    """Write contents to a file from `offset` on, and return their checksum."""
    checksum = 0
    for start in range(0, contents.nbytes, _CHUNK):
        chunk = contents[start : start + _CHUNK]
        checksum = zlib.crc32(chunk, checksum)
        position = offset + start
        while chunk.nbytes:
            written = os.pwrite(descriptor, chunk, position)
            chunk, position = chunk[written:], position + written
    return checksum


def write_manifest(directory: str, host: int, session: bytes, pieces: Sequence[m.SpilledPiece]) -> None:
    """Write the manifest of a host. Raise StatusError if that fails."""
    path = path_of(directory) / f"host-{host}.json"
    rows = tuple(
        {
            "number": each.number,
            "file": Path(each.path).name,
            "offset": each.offset,
            "nbytes": each.nbytes,
            "crc32": each.checksum,
        }
        for each in sorted(pieces, key=lambda piece: piece.number)
    )
    manifest = Manifest(format=FORMAT, host=host, session=msgspec.Raw(session or b"null"), pieces=rows)
    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(manifest)), durable=True)
    except OSError as error:
        raise _failed("write", path, error) from None


def read(piece: m.SpilledPiece) -> Any:
    """Return the contents of a piece.

    Raise StatusError: DATA_LOSS if they are not those that were written, and UNAVAILABLE if the operating system cannot
    read the file, which may be intact.
    """
    end = piece.offset + piece.nbytes
    try:
        descriptor = os.open(piece.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe there does not block
        try:
            found = os.fstat(descriptor).st_size
            if not 0 <= piece.offset <= end <= found:
                text = f"{piece.path} has {found} bytes, and bytes {piece.offset} to {end} were spilled there"
                raise _lost(text)
            content = RECEIVE_BUFFERS.take(piece.nbytes)
            read_file(descriptor, content.data, piece.offset)
        finally:
            os.close(descriptor)
    except (*MISSING, IsADirectoryError) as error:
        where = f"on {this_machine()}. {_OTHER_MACHINE}"
        raise _lost(f"{_text('read', Path(piece.path), error)} {where}") from None
    except OSError as error:
        text = f"{_text('read', Path(piece.path), error)}. The file is kept: fix the reason, and read the array again"
        raise failed(Code.UNAVAILABLE, text, Details(retriable=True)) from None
    if zlib.crc32(content.data) != piece.checksum:
        text = f"{piece.path} is not what was spilled there: the checksum of bytes {piece.offset} to {end} differs"
        raise _lost(text)
    return content


def remove(pieces: Iterable[m.SpilledPiece]) -> None:
    """Remove the files of pieces, and their directories if these have no more files of pieces."""
    paths = {Path(piece.path) for piece in pieces}
    for path in paths:
        with suppress(OSError):
            path.unlink()
    for directory in {path.parent for path in paths}:
        _remove_unused(directory)


def remove_unused(directory: str) -> None:
    """Remove a directory and its manifests if it has no files of pieces."""
    _remove_unused(path_of(directory))


def _remove_unused(directory: Path) -> None:
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


# A host reads what the host with its number has written, which may have been another machine.
_OTHER_MACHINE = (
    "If another machine was this host when the file was written, copy the file here, or give that machine its former "
    "place (`--island` and `--rank` of `atoll host`)"
)


def _not_written(contents: memoryview, path: Path, error: OSError) -> StatusError:
    return _failed(f"write {human_bytes(contents.nbytes)} to", path, error)


def _failed(what: str, path: Path, error: OSError) -> StatusError:
    return StatusError(Code.INTERNAL, _text(what, path, error))


def _lost(text: str) -> StatusError:
    return failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS))


def _text(what: str, path: Path, error: OSError) -> str:
    return f"cannot {what} {path}: {error.strerror or error}"
