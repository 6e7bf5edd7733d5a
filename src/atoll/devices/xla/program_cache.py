"""Compiled programs on disk, per tenant, authenticated with a key that no tenant has.

An executable can do anything in the process that loads it. An entry is therefore used only if this cache wrote it for
the same tenant and the same key: `get` verifies a MAC over tenant, key and content before it returns anything. An entry
that was changed, copied or written by anyone else is a miss.

    DIRECTORY/atoll-KEY/TENANT/ENTRY

KEY identifies the cache's key, so that machines with different keys can share a directory. TENANT and ENTRY are hashes:
a name from a client is never part of a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)

# On disk, per tenant and in total. The entries that have not been used for the longest time are removed first.
MOST_TENANT_BYTES = 4 << 30
MOST_BYTES = 16 << 30
MOST_ENTRY_BYTES = 1 << 30
# Removing entries frees this fraction of the bound. Then few calls of `put` scan the directory.
_FREED = 0.25
_MAGIC = b"ATOLL PROGRAM 1\n"
_MAC_BYTES = hashlib.sha256().digest_size
_NAME_DIGITS = 32
_UNFINISHED = ".unfinished"
_UNFINISHED_SECONDS = 3600.0  # after that time its writer has ended


class Seal:
    """Authenticates the contents of a cache with `key`."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def name(self) -> str:
        """A public name of the key."""
        return hmac.digest(self._key, b"name", "sha256").hex()[:_NAME_DIGITS]

    def close(self, tenant: str, key: str, content: bytes) -> bytes:
        """Return the entry for `content`."""
        return _MAGIC + self._mac(tenant, key, content) + content

    def open(self, tenant: str, key: str, entry: bytes) -> bytes | None:
        """Return the content of an entry; None if `close` did not make it for this tenant and key."""
        start = len(_MAGIC) + _MAC_BYTES
        content = memoryview(entry)[start:]
        is_genuine = entry[: len(_MAGIC)] == _MAGIC and hmac.compare_digest(
            entry[len(_MAGIC) : start], self._mac(tenant, key, content)
        )
        return bytes(content) if is_genuine else None

    def _mac(self, tenant: str, key: str, content: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, _MAGIC, "sha256")
        for part in (tenant.encode(), key.encode()):
            mac.update(len(part).to_bytes(8, "little") + part)
        mac.update(content)
        return mac.digest()


class ProgramCache:
    """Keeps contents by tenant and key in a directory. For several threads and processes.

    `get` and `put` raise nothing: a cache whose directory cannot be used is a cache that misses.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        key: bytes,
        most_bytes: int = MOST_BYTES,
        most_tenant_bytes: int = MOST_TENANT_BYTES,
    ) -> None:
        self._seal = Seal(key)
        self._root = Path(directory)
        self._home = self._root / f"atoll-{self._seal.name}"
        self._most_bytes = most_bytes
        self._most_tenant_bytes = most_tenant_bytes
        self._lock = threading.Lock()
        self._room: dict[Path, int] = {}  # bytes that can be written below a directory before it is scanned again
        self._counts = {"hits": 0, "misses": 0, "refused": 0, "failed": 0}

    def get(self, key: str, tenant: str = "") -> bytes | None:
        """Return what `put` stored under this key for this tenant; None if the entry is missing or not genuine."""
        path = self._path(tenant, key)
        try:
            entry = _read(path)
        except FileNotFoundError:
            self._count("misses")
            return None
        except OSError as error:
            self._fail(error)
            return None
        content = None if entry is None else self._seal.open(tenant, key, entry)
        if content is None:
            self._refuse(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self._count("hits")
        return content

    def put(self, key: str, content: bytes, tenant: str = "") -> None:
        """Store `content`, and remove the entries that are beyond the bounds."""
        entry = self._seal.close(tenant, key, content)
        if len(entry) > min(MOST_ENTRY_BYTES, self._most_tenant_bytes):
            return
        path = self._path(tenant, key)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}{_UNFINISHED}")
        try:
            self._make_room(path.parent, len(entry))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(entry)
            unfinished.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._fail(error)

    def statistics(self) -> dict[str, int]:
        """Return how often `get` found something, found nothing, refused an entry, and how often the disk failed."""
        with self._lock:
            return dict(self._counts)

    def _path(self, tenant: str, key: str) -> Path:
        return self._home / _hash(tenant) / _hash(key)

    def _count(self, name: str) -> int:
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    def _refuse(self, path: Path) -> None:
        """Remove an entry that is not genuine. Log the first only: anyone who can write here could fill the log."""
        with contextlib.suppress(OSError):
            path.unlink()
        if self._count("refused") == 1:
            _log.warning(
                "%s was not written by this cache: it is removed, and the program is compiled. Someone else can write "
                "to %s. Later cases are not logged.",
                path,
                self._root,
            )

    def _fail(self, error: OSError) -> None:
        if self._count("failed") == 1:
            _log.warning("the cache of compiled programs in %s cannot be used: %s", self._root, error)

    # ---- bounds

    def _make_room(self, directory: Path, nbytes: int) -> None:
        """Remove the oldest entries of the tenant, then of all keys and tenants, so that `nbytes` fit."""
        for scanned, most in ((directory, self._most_tenant_bytes), (self._root, self._most_bytes)):
            with self._lock:
                room = self._room.get(scanned, 0) - nbytes
                self._room[scanned] = room
            if room < 0:
                room = _shrink(self._entries(scanned), most, nbytes)
                with self._lock:
                    # At most a quarter at a time: other processes write here as well.
                    self._room[scanned] = min(room, int(most * _FREED))

    def _entries(self, directory: Path) -> Iterable[Path]:
        return directory.glob("atoll-*/*/*") if directory == self._root else directory.glob("*")


def _shrink(entries: Iterable[Path], most: int, nbytes: int) -> int:
    """Remove the oldest of the entries if they and `nbytes` exceed `most`. Returns how many bytes can be added then."""
    found = []
    for path in entries:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.suffix == _UNFINISHED and time.time() - status.st_mtime > _UNFINISHED_SECONDS:
                path.unlink()
            else:
                found.append((status.st_mtime, status.st_size, path))
    total = nbytes + sum(size for _, size, _ in found)
    if total > most:
        for _, size, path in sorted(found):
            if total <= most * (1 - _FREED):
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
    return max(most - total, 0)


def _read(path: Path) -> bytes | None:
    """Return the bytes of a regular file that is not too large; None for anything else, such as a link or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:
        if path.is_symlink():
            return None
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_ENTRY_BYTES:
            return None
        return file.read(MOST_ENTRY_BYTES + 1)


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]
