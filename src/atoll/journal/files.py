"""The files of a journal: snapshots, and segments with the events after each snapshot.

Segment n contains the events that were handled after snapshot n. A file begins with a header that names the version of
Atoll that wrote it, for messages, and the protocol of the events, which decides whether this version can read it. The
rest of the file is encrypted and authenticated, because it contains the secrets that admit clients to data ports and
resume connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec

from atoll._version import __version__
from atoll.atomic_files import PARTIAL, write_atomically
from atoll.cluster.directories import key_file
from atoll.cluster.environment_variables import KEY_FILE
from atoll.cluster.held_directories import hold
from atoll.decodable import decodable
from atoll.errors import IncompatibleJournalError, JournalError
from atoll.journal.segment import JournalSegment
from atoll.journal.successor import NAME as SUCCESSOR
from atoll.journal.successor import Successor, decode_successor, encode_successor
from atoll.missing import MISSING
from atoll.protocol.messages import PROTOCOL
from atoll.security.user_key import user_key

_MAGIC = b"ATOLL JOURNAL\n"
_LENGTHS = struct.Struct("<II")  # of a header: its length and checksum
_MAX_HEADER = 4096
_LENGTH = struct.Struct("<Q")  # of a payload
_PART_BYTES = 1 << 20  # of a payload, encrypted at a time
_SNAPSHOT, _SEGMENT = ".snapshot", ".events"
TAG_BYTES = 16  # added to each part that is sealed
_SALT_BYTES = 16
_NONCE_BYTES = 12
_CHECK_BYTES = 8
ALL = 1 << 62  # above the number of each snapshot
DAMAGED = "damaged"  # the directory, in that of the journal, of files that cannot be read


class FileHeader(msgspec.Struct, frozen=True):
    """The header of a file. `term` is the term of the controller that wrote it."""

    number: int
    term: int
    salt: str  # see `FileCipher`
    key_check: str  # `FileCipher.key_check`
    version: str = __version__
    protocol: int = PROTOCOL


def header(number: int, term: int, cipher: FileCipher) -> bytes:
    """Return the first bytes of a file that `cipher` encrypts."""
    content = msgspec.json.encode(FileHeader(number, term, cipher.salt, cipher.key_check))
    return _MAGIC + _LENGTHS.pack(len(content), crc32(content)) + content


def read_header(content: bytes | memoryview, name: str) -> tuple[FileHeader, int]:
    """Return the header and the offset of its end. Raises JournalError if it is invalid.

    Raises IncompatibleJournalError if the file is of another protocol.
    """
    start = len(_MAGIC) + _LENGTHS.size
    if len(content) < start or bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise JournalError(f"{name} is not a journal file of Atoll")
    length, checksum = _LENGTHS.unpack_from(content, len(_MAGIC))
    body = bytes(content[start : start + length])
    if len(body) < length or crc32(body) != checksum:
        raise JournalError(f"the header of {name} is damaged")
    found = msgspec.json.decode(body, type=decodable(FileHeader))
    if found.protocol != PROTOCOL:
        raise IncompatibleJournalError(
            f"{name} was written by atoll {found.version} (protocol {found.protocol}), and this is atoll {__version__} "
            f"(protocol {PROTOCOL}): only a version with protocol {found.protocol} can read it"
        )
    return found, start + length


def write_whole(path: Path, number: int, term: int, payload: bytes, key: bytes) -> None:
    """Write a file to the disk atomically. Raises OSError."""
    cipher, view = FileCipher(key, new_salt()), memoryview(payload)

    def parts() -> Iterator[bytes]:
        yield header(number, term, cipher) + _LENGTH.pack(len(payload))
        for start in range(0, len(payload), _PART_BYTES):
            part = view[start : start + _PART_BYTES]
            yield cipher.seal(part, is_last=start + len(part) == len(payload))

    write_atomically(path, parts(), durable=True)


def read_whole(path: Path, key: bytes) -> tuple[FileHeader, bytes]:
    """Return the file's header and payload. Raises OSError, and JournalError if it cannot be read."""
    with open(path, "rb") as file:
        found, _ = read_header(file.read(_MAX_HEADER), str(path))
    return found, b"".join([part for part, _ in payload_of(path, key)])


def cipher_for(found: FileHeader, key: bytes, name: str) -> FileCipher:
    """Return the cipher that opens the file with this header.

    Raises IncompatibleJournalError if the file was encrypted with another key.
    """
    cipher = FileCipher(key, found.salt)
    if found.key_check != cipher.key_check:
        raise IncompatibleJournalError(
            f"{name} was encrypted with another key than the one in {key_file()}: restore that file, or set "
            f"{KEY_FILE.variable} to a file with the earlier key"
        )
    return cipher


def payload_of(path: Path, key: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a file's payload, and whether each is the last, for callers that cannot hold all of it.

    Raises the errors of `read_whole` before the last part.
    """
    with open(path, "rb") as file:
        found, start = read_header(file.read(_MAX_HEADER), str(path))
        cipher = cipher_for(found, key, str(path))
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


def snapshots_in(directory: Path) -> list[int]:
    """Return the numbers of the snapshots in a directory, in order. Raises OSError if it cannot be read."""
    return _numbers(directory, _SNAPSHOT)


def _numbers(directory: Path, suffix: str) -> list[int]:
    """Return the numbers of the files with this suffix. `Path.glob` would find none in an unreadable directory."""
    try:
        paths = [directory / name for name in os.listdir(directory)]
    except MISSING:
        return []
    return sorted(int(path.stem) for path in paths if path.suffix == suffix and path.stem.isdigit())


def _is_numbered(path: Path) -> bool:
    """Return whether the file is a snapshot or a segment."""
    return path.suffix in (_SNAPSHOT, _SEGMENT) and path.stem.isdigit()


class ReadableDirectory:
    """The files of a journal, which a controller may be writing. Raises AccessError if the user has no key."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._key = journal_key()

    def snapshot(self, number: int) -> Path:
        return self.path / f"{number:08}{_SNAPSHOT}"

    def segment(self, number: int) -> Path:
        return self.path / f"{number:08}{_SEGMENT}"

    def snapshots(self) -> list[int]:
        """Return the numbers of the snapshots in order. Raises OSError if the directory cannot be read."""
        return snapshots_in(self.path)

    def segments(self) -> list[int]:
        return _numbers(self.path, _SEGMENT)

    def read_snapshot(self, number: int) -> tuple[FileHeader, bytes]:
        """Return a snapshot's header and payload. Raises as `read_whole`."""
        return read_whole(self.snapshot(number), self._key)

    def payload_of(self, number: int) -> Iterator[tuple[bytes, bool]]:
        """Yield the parts of a snapshot's payload; see the function `payload_of`."""
        return payload_of(self.snapshot(number), self._key)

    def cipher_of(self, number: int, found: FileHeader) -> FileCipher:
        """Return the cipher that opens the turns of a segment with this header. Raises as `cipher_for`."""
        return cipher_for(found, self._key, str(self.segment(number)))


class JournalDirectory(ReadableDirectory):
    """The directory of one journal. Holds a lock on it until the process ends: two controllers never share one.

    Raises JournalError if the directory is unusable, in use, or accessible to other users, and AccessError if the user
    has no key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        FileCipher(self._key, "")  # imports the cryptography once in this process, not in each child with a snapshot
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
            if found.st_uid != os.getuid():
                raise JournalError(
                    f"the journal's directory {self.path} belongs to another user (UID {found.st_uid}; this process "
                    f"has {os.getuid()}): run as that user, or `chown -R {os.getuid()} {self.path}`"
                )
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise JournalError(
                    f"other users can access the journal's directory {self.path}: run `chmod 700 {self.path}`"
                )
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
            raise JournalError(
                f"the journal's directory {self.path} cannot be used: {reason}: choose a directory that this "
                "user may write"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise JournalError(f"the journal's directory {self.path} cannot be locked: {error.strerror}") from None
            raise JournalError(
                f"the journal in {self.path} is in use by another controller: give each cluster its own directory, or "
                "end the other cluster with `atoll down`"
            ) from None
        self._held = -1  # the lock of the directory itself, which keeps programs from cleaning it
        with contextlib.suppress(OSError):
            self._held = hold(self.path)

    def close(self) -> None:
        os.close(self._lock)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def forget_before(self, number: int) -> None:
        """Remove the files before this snapshot, and all partial ones.

        Snapshots are the last to go: segments without a snapshot mean that one was lost.
        """
        for path in sorted(self.path.iterdir(), key=lambda path: path.suffix == _SNAPSHOT):
            old = _is_numbered(path) and int(path.stem) < number
            if old or path.suffix == PARTIAL:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all snapshots and segments, because the cluster has ended, and the record of its successor."""
        self.forget_before(ALL)
        self.forget_successor()

    def set_aside(self) -> Path:
        """Move all snapshots and segments to the directory DAMAGED, and return its path. Raises OSError.

        The directory has the files of one journal: those of an earlier one are removed.
        """
        aside = self.path / DAMAGED
        aside.mkdir(mode=0o700, exist_ok=True)
        for path in aside.iterdir():
            if _is_numbered(path):
                path.unlink()
        for path in self.path.iterdir():
            if _is_numbered(path):
                path.rename(aside / path.name)
        return aside

    # ---- contents

    def write_snapshot(self, number: int, term: int, payload: bytes) -> None:
        """Write a snapshot to the disk atomically. Raises OSError."""
        write_whole(self.snapshot(number), number, term, payload, self._key)

    def write_persisted(self, name: str, term: int, payload: bytes) -> None:
        """Write a file with this name beside the journal, atomically. Raises OSError."""
        write_whole(self.path / name, 0, term, payload, self._key)

    def successor(self) -> Successor:
        """Return the controller that may have continued from a copy of this journal; an empty record if none may."""
        try:
            return decode_successor((self.path / SUCCESSOR).read_bytes())
        except OSError:
            return Successor()

    def forget_successor(self) -> None:
        """Remove the record of a successor, because the cluster has ended. Raises OSError."""
        (self.path / SUCCESSOR).unlink(missing_ok=True)

    def write_successor(self, successor: Successor) -> None:
        """Record the controller that may continue, or has continued, from a copy of this journal. Raises OSError."""
        write_atomically(self.path / SUCCESSOR, encode_successor(successor), durable=True)

    def check_space(self, nbytes: int) -> None:
        """Raise OSError if the disk has no space for a file of `nbytes`."""
        path = self.path / "space"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(1, nbytes))
            finally:
                os.close(descriptor)
        finally:
            path.unlink(missing_ok=True)

    def open_segment(self, number: int, term: int) -> tuple[JournalSegment, FileCipher]:
        """Create a segment to append to, and the cipher that encrypts its turns. Raises OSError."""
        cipher = FileCipher(self._key, new_salt())
        return JournalSegment(self.segment(number), header(number, term, cipher)), cipher


def journal_key() -> bytes:
    """Return the key of this user's journals. Raises AccessError."""
    return user_key("journal")


def new_salt() -> str:
    return secrets.token_hex(_SALT_BYTES)


class FileCipher:
    """Seals or opens the parts of one file in order; an instance does only one of the two.

    Each file has its own key, derived from the user's key and a random salt in the file's header. The parts are
    encrypted with AES-256-GCM, with the part's number as nonce, so a part that was changed, moved, or copied from
    another file does not open.
    """

    def __init__(self, key: bytes, salt: str) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        file_key = hmac.digest(key, b"file " + salt.encode(), "sha256")
        self.salt = salt
        # Tells another key from damage. It reveals nothing about the key.
        self.key_check = hmac.digest(file_key, b"check", "sha256")[:_CHECK_BYTES].hex()
        self._aead = AESGCM(file_key)
        self._invalid = InvalidTag
        self._number = 0

    def seal(self, part: bytes | memoryview, *, is_last: bool = False) -> bytes:
        """Encrypt the next part."""
        return self._aead.encrypt(self._nonce(is_last), part, None)

    def open(self, part: bytes | memoryview, *, is_last: bool = False) -> bytes:
        """Decrypt the next part. Raises JournalError if a different part was sealed in this position."""
        try:
            return self._aead.decrypt(self._nonce(is_last), part, None)
        except self._invalid:
            raise JournalError("a part was changed, or written with another key") from None

    def _nonce(self, is_last: bool) -> bytes:
        self._number += 1
        return (2 * self._number + is_last).to_bytes(_NONCE_BYTES, "little")
