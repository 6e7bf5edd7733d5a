"""Compiled programs on disk, per tenant, authenticated with a key that tenants do not have.

An executable can do anything in the process that loads it. Therefore `get` verifies a MAC of tenant, key and content
before it returns an entry. An entry that was modified, copied or written by anyone else is a miss.

    DIRECTORY/atoll-KEY/TENANT/ENTRY

KEY identifies the cache's key, so that machines with different keys can share a directory. TENANT and ENTRY are hashes,
so that names from clients are never part of a path.
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

from atoll.atomic_files import PARTIAL, write_atomically

_log = logging.getLogger(__name__)

# Bounds per tenant and in total. The least recently used entries are removed first.
MAX_TENANT_BYTES = 4 << 30
MAX_BYTES = 16 << 30
MAX_ENTRY_BYTES = 1 << 30
# Removal frees this fraction of the bound, so that few calls of `put` scan the directory.
_FREED = 0.25
_MAGIC = b"ATOLL PROGRAM 1\n"
_MAC_BYTES = hashlib.sha256().digest_size
_NAME_DIGITS = 32
_PARTIAL_SECONDS = 3600.0  # the writer of an older file has ended


class Seal:
    """Authenticates the contents of a cache with `key`."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def name(self) -> str:
        """The public name of the key."""
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
    """Contents by tenant and key in a directory. Several threads and processes may use it.

    `get` and `put` raise no errors: if the directory cannot be used, every call of `get` is a miss.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        key: bytes,
        max_bytes: int = MAX_BYTES,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
    ) -> None:
        self._seal = Seal(key)
        self._root = Path(directory)
        self._home = self._root / f"atoll-{self._seal.name}"
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
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
        """Store `content`, and remove old entries beyond the bounds."""
        entry = self._seal.close(tenant, key, content)
        if len(entry) > min(MAX_ENTRY_BYTES, self._max_tenant_bytes):
            return
        path = self._path(tenant, key)
        try:
            self._make_room(path.parent, len(entry))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, entry)
        except OSError as error:
            self._fail(error)

    def statistics(self) -> dict[str, int]:
        """Return the number of hits, misses and refused entries in `get`, and of failures of the disk."""
        with self._lock:
            return dict(self._counts)

    def _path(self, tenant: str, key: str) -> Path:
        return self._home / _hash(tenant) / _hash(key)

    def _count(self, name: str) -> int:
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    def _refuse(self, path: Path) -> None:
        """Remove an entry that is not genuine. Only log the first: anyone who can write here could fill the log."""
        with contextlib.suppress(OSError):
            path.unlink()
        if self._count("refused") == 1:
            _log.warning(
                "removed %s, which this cache has not written: someone else can write to %s. The program is compiled "
                "again. Later cases are not logged.",
                path,
                self._root,
            )

    def _fail(self, error: OSError) -> None:
        if self._count("failed") == 1:
            _log.warning("the cache of compiled programs in %s cannot be used: %s", self._root, error)

    # ---- bounds

    def _make_room(self, directory: Path, nbytes: int) -> None:
        """Remove the oldest entries of the tenant, then of all tenants and keys, until `nbytes` fit."""
        for scanned, most in ((directory, self._max_tenant_bytes), (self._root, self._max_bytes)):
            with self._lock:
                room = self._room.get(scanned, 0) - nbytes
                self._room[scanned] = room
            if room < 0:
                room = _shrink(self._entries(scanned), most, nbytes)
                with self._lock:
                    # Use at most a quarter before the next scan, because other processes write here as well.
                    self._room[scanned] = min(room, int(most * _FREED))

    def _entries(self, directory: Path) -> Iterable[Path]:
        return directory.glob("atoll-*/*/*") if directory == self._root else directory.glob("*")


def _shrink(entries: Iterable[Path], limit: int, nbytes: int) -> int:
    """Remove the oldest entries if they and `nbytes` exceed `limit`. Return how many bytes can be added then."""
    found = []
    for path in entries:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.suffix == PARTIAL and time.time() - status.st_mtime > _PARTIAL_SECONDS:
                path.unlink()
            else:
                found.append((status.st_mtime, status.st_size, path))
    total = nbytes + sum(size for _, size, _ in found)
    if total > limit:
        for _, size, path in sorted(found):
            if total <= limit * (1 - _FREED):
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
    return max(limit - total, 0)


def _read(path: Path) -> bytes | None:
    """Return the bytes of a regular file of limited size; None for anything else, such as a link or a pipe."""
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
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_ENTRY_BYTES:
            return None
        return file.read(MAX_ENTRY_BYTES + 1)


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]
