"""The files of a journal: snapshots, and segments with the events after each.

Segment n has what was handled after snapshot n. A file begins with a header that names the Atoll that wrote it: another
version does not read it, since a snapshot consists of that version's objects. The content after the header is encrypted
and authenticated (`journal.cipher`): it has the secrets that admit to data ports and resume connections, and reading a
snapshot runs it.
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
from atoll.journal.cipher import TAG_BYTES, FileCipher, journal_key, new_salt
from atoll.journal.segment import Segment
from atoll.protocol.messages import PROTOCOL

_MAGIC = b"ATOLL JOURNAL\n"
_LENGTHS = struct.Struct("<II")  # of a header, with its checksum
_MOST_HEADER = 4096
_LENGTH = struct.Struct("<Q")  # of what a snapshot has
_PART_BYTES = 1 << 20  # of it, encrypted at a time
_SNAPSHOT, _SEGMENT, _UNFINISHED = ".snapshot", ".events", ".unfinished"


class FileHeader(msgspec.Struct, frozen=True):
    """What a file begins with. `term` is that of the controller that wrote it."""

    number: int
    term: int
    salt: str  # see `FileCipher`
    version: str = __version__
    protocol: int = PROTOCOL


def header(number: int, term: int, salt: str) -> bytes:
    """The first bytes of a file."""
    content = msgspec.json.encode(FileHeader(number, term, salt))
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


def write_whole(path: Path, number: int, term: int, payload: bytes, key: bytes) -> None:
    """Has a file on the disk, whole, or not at all. Raises OSError."""
    unfinished, salt = path.with_suffix(_UNFINISHED), new_salt()
    cipher, view = FileCipher(key, salt), memoryview(payload)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(header(number, term, salt) + _LENGTH.pack(len(payload)))
        for start in range(0, len(payload), _PART_BYTES):
            part = view[start : start + _PART_BYTES]
            file.write(cipher.seal(part, is_last=start + len(part) == len(payload)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def read_whole(path: Path, key: bytes) -> tuple[FileHeader, bytes]:
    """Its header and payload. Raises JournalError where it is damaged or another version's, and OSError."""
    with open(path, "rb") as file:
        found, _ = read_header(file.read(_MOST_HEADER), str(path))
    return found, b"".join([part for part, _ in payload_of(path, key)])


def payload_of(path: Path, key: bytes) -> Iterator[tuple[bytes, bool]]:
    """A file's payload, part by part, and whether each is the last.

    Raises as `read_whole`, before the last of them, for whoever has no room for all. OSError may come at once.
    """
    with open(path, "rb") as file:
        found, start = read_header(file.read(_MOST_HEADER), str(path))
        cipher = FileCipher(key, found.salt)
        file.seek(start)
        field = file.read(_LENGTH.size)
        left = _LENGTH.unpack(field)[0] if len(field) == _LENGTH.size else 0
        while left > 0:
            length = min(_PART_BYTES, left)
            left -= length
            try:
                part = cipher.open(file.read(length + TAG_BYTES), is_last=not left)
            except JournalError as error:
                raise JournalError(f"{path} is damaged: {error}") from None
            yield part, not left
            if not left:
                return
    raise JournalError(f"{path} is damaged")


class Directory:
    """The directory of one journal. Holds a lock on it, which ends with the process: two controllers never share one.

    Raises JournalError if the directory cannot be used, is open to other users, or is in use; AccessError without a
    key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._key = journal_key()
        FileCipher(self._key, "")  # loads what encrypts: in this process, once, and not in each child with a snapshot
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise JournalError(
                    f"the journal's directory {self.path} is to be its owner's alone: chmod 700 {self.path}"
                )
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal's directory {self.path} cannot be used: {error}") from None
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
        write_whole(self.snapshot(number), number, term, payload, self._key)

    def read_snapshot(self, number: int) -> tuple[FileHeader, bytes]:
        """Raises JournalError where it is damaged or another version's."""
        return read_whole(self.snapshot(number), self._key)

    def payload_of(self, number: int) -> Iterator[tuple[bytes, bool]]:
        """That of a snapshot, part by part: see `payload_of`."""
        return payload_of(self.snapshot(number), self._key)

    def write_persisted(self, name: str, term: int, payload: bytes) -> None:
        """Has a file of this name beside the journal, whole, or not at all. Raises OSError."""
        write_whole(self.path / name, 0, term, payload, self._key)

    def open_segment(self, number: int, term: int) -> tuple[Segment, FileCipher]:
        """A new one, to append to, and what encrypts its turns. Raises OSError."""
        salt = new_salt()
        return Segment(self.segment(number), header(number, term, salt)), FileCipher(self._key, salt)

    def cipher_of(self, found: FileHeader) -> FileCipher:
        """Return the cipher that opens the turns of the segment with this header."""
        return FileCipher(self._key, found.salt)
