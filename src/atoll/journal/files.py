"""The files of a journal: snapshots, and segments with the events after each.

Segment n has what was handled after snapshot n. A file begins with a header that names the Atoll that wrote it: another
one does not read it, since a snapshot is what that one's objects are made of. Files are their owner's alone: what is in
them lets one in as any client of the cluster, and is run when it is read.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec

from atoll._version import __version__
from atoll.errors import JournalError
from atoll.journal.segment import Segment
from atoll.protocol.messages import PROTOCOL

_MAGIC = b"ATOLL JOURNAL\n"
_LENGTHS = struct.Struct("<II")  # of a header, with its checksum
_MOST_HEADER = 4096
_PAYLOAD = struct.Struct("<QI")  # of what a snapshot has, with its checksum
_SNAPSHOT, _SEGMENT, _UNFINISHED = ".snapshot", ".events", ".unfinished"


class FileHeader(msgspec.Struct, frozen=True):
    """What a file begins with. `term` is that of the controller that wrote it."""

    number: int
    term: int
    version: str = __version__
    protocol: int = PROTOCOL


def header(number: int, term: int) -> bytes:
    """The first bytes of a file."""
    content = msgspec.json.encode(FileHeader(number, term))
    return _MAGIC + _LENGTHS.pack(len(content), crc32(content)) + content


def read_header(content: bytes | memoryview, name: str) -> tuple[FileHeader, int]:
    """The header, and where it ends. Raises JournalError where there is none, or another version's."""
    start = len(_MAGIC) + _LENGTHS.size
    if len(content) < start or bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise JournalError(f"{name} is no file of a journal of Atoll's")
    length, checksum = _LENGTHS.unpack_from(content, len(_MAGIC))
    body = bytes(content[start : start + length])
    if len(body) < length or crc32(body) != checksum:
        raise JournalError(f"the beginning of {name} is damaged")
    found = msgspec.json.decode(body, type=FileHeader)
    if (found.version, found.protocol) != (__version__, PROTOCOL):
        raise JournalError(
            f"{name} was written by atoll {found.version} (protocol {found.protocol}), and this is atoll {__version__} "
            f"(protocol {PROTOCOL}): a journal is read by the Atoll that wrote it"
        )
    return found, start + length


def write_whole(path: Path, number: int, term: int, payload: bytes) -> None:
    """Has a file on the disk, whole, or not at all. Raises OSError."""
    unfinished = path.with_suffix(_UNFINISHED)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(header(number, term) + _PAYLOAD.pack(len(payload), crc32(payload)))
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def read_whole(path: Path) -> tuple[FileHeader, bytes]:
    """Its header and payload. Raises JournalError where it is damaged or another version's, and OSError."""
    content = path.read_bytes()
    found, start = read_header(content, str(path))
    if len(content) >= start + _PAYLOAD.size:
        length, checksum = _PAYLOAD.unpack_from(content, start)
        payload = content[start + _PAYLOAD.size :]
        if len(payload) == length and crc32(payload) == checksum:
            return found, payload
    raise JournalError(f"{path} is damaged")


def payload_of(path: Path, most: int) -> Iterator[tuple[bytes, bool]]:
    """A file's payload, at most so many bytes at a time, and whether these are the last.

    Raises as `read_whole`, before the last of them, for whoever has no room for all. OSError may come at once.
    """
    with open(path, "rb") as file:
        _, start = read_header(file.read(_MOST_HEADER), str(path))
        file.seek(start)
        fields = file.read(_PAYLOAD.size)
        left, checksum = _PAYLOAD.unpack(fields) if len(fields) == _PAYLOAD.size else (-1, 0)
        computed = 0
        while left > 0:
            part = file.read(min(most, left))
            computed, left = crc32(part, computed), left - len(part)
            if not part or (not left and computed != checksum):
                break
            yield part, not left
            if not left:
                return
    raise JournalError(f"{path} is damaged")


class Folder:
    """The folder of one journal. Holds a lock on it, which ends with the process: two controllers never share one.

    Raises JournalError where it cannot be used, is not this user's alone, or is in use.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise JournalError(
                    f"the journal's folder {self.path} is to be its owner's alone: chmod 700 {self.path}"
                )
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal's folder {self.path} cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError(f"the journal in {self.path} is in use by another controller") from None

    def close(self) -> None:
        os.close(self._lock)

    def snapshot(self, number: int) -> Path:
        return self.path / f"{number:08}{_SNAPSHOT}"

    def segment(self, number: int) -> Path:
        return self.path / f"{number:08}{_SEGMENT}"

    def snapshots(self) -> list[int]:
        """Their numbers, in order."""
        return self._numbers(_SNAPSHOT)

    def segments(self) -> list[int]:
        return self._numbers(_SEGMENT)

    def _numbers(self, suffix: str) -> list[int]:
        return sorted(int(path.stem) for path in self.path.glob(f"*{suffix}") if path.stem.isdigit())

    def forget_before(self, number: int) -> None:
        """What is older than this snapshot goes, and what was not finished."""
        for path in self.path.iterdir():
            old = path.suffix in (_SNAPSHOT, _SEGMENT) and path.stem.isdigit() and int(path.stem) < number
            if old or path.suffix == _UNFINISHED:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """All goes: the cluster has ended."""
        self.forget_before(1 << 62)

    # ---- contents

    def write_snapshot(self, number: int, term: int, payload: bytes) -> None:
        """Has it on the disk, whole, or not at all."""
        write_whole(self.snapshot(number), number, term, payload)

    def read_snapshot(self, number: int) -> tuple[FileHeader, bytes]:
        """Raises JournalError where it is damaged or another version's."""
        return read_whole(self.snapshot(number))

    def open_segment(self, number: int, term: int) -> Segment:
        """A new one, to append to. Raises OSError."""
        return Segment(self.segment(number), header(number, term))
