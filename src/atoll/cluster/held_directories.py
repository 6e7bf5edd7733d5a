"""Directories of processes that run. Each process holds a lock of its directory.

`systemd-tmpfiles`, which removes old files from temporary directories, skips a locked directory. The kernel releases
the lock when the process ends, however it ends.

The engine of a cluster also keeps the cluster's record in its directory. The lock is the proof that the cluster runs,
also if a program that cleans temporary directories has removed the record. Other such programs go by the age of files,
so the engine also keeps the record young, and writes it again if it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from atoll.atomic_files import write_atomically
from atoll.missing import read_if_exists

RECORD_FILE = "cluster.json"
KEEP_SECONDS = 10.0  # between two calls of `keep_record`
_YOUNG_SECONDS = 3600.0


def hold(path: Path) -> int:
    """Lock a directory until the returned descriptor is closed. Others may also hold it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class HeldDirectory:
    """A lock of a cluster's directory, until `release`. The constructor raises OSError."""

    def __init__(self, path: Path) -> None:
        self._record = path / RECORD_FILE
        self._content = b""
        self._descriptor = hold(path)

    @property
    def has_record(self) -> bool:
        """Whether the content of the record is known, so that it can be written again."""
        return bool(self._content)

    def keep_record(self) -> bool:
        """Write the record again if it was removed. Return whether it was. Raises OSError."""
        content = read_if_exists(self._record)
        if content is None and self._content:
            write_atomically(self._record, self._content)
            return True
        self._content = content or self._content
        if content and time.time() - self._record.stat().st_mtime > _YOUNG_SECONDS:
            os.utime(self._record)
        return False

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def is_held(path: Path) -> bool:
    """Return whether the engine of a cluster holds the lock of its directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        return True
    finally:
        os.close(descriptor)
