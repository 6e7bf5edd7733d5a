"""A memory-mapped segment of a journal, to which turns are appended.

An append is a copy into the map, without a system call. The kernel owns copied data, as after a `write`: it survives
the process. Allocated space after the data contains zeros, which no turn begins with; closing the segment removes them.

Invariant: no copy fails. Touching a mapped page for which the disk has no space ends the process (SIGBUS). The segment
therefore allocates space first, where a full disk is an error that can be handled. Some file systems need new space for
each change despite the allocation (btrfs, ZFS) or detect a full disk later (NFS). On file systems that are not known
to keep the allocation, turns are written with `write`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from pathlib import Path

# The file grows in steps of this size.
STEP_BYTES = 4 << 20
# Types of file systems (statfs(2)) in which allocated space is always writable: ext2 to ext4, XFS, tmpfs.
_KEEP_ROOM = frozenset((0xEF53, 0x58465342, 0x01021994))
_KIND = struct.Struct("l")  # the first field of the result of fstatfs(2)
_STATFS_BYTES = 256  # larger than the result
_libc = ctypes.CDLL(None)


class JournalSegment:
    """A new segment that begins with `header`. For one thread. The constructor and `append` raise OSError."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._start = 0  # offset of the map in the file
        self._place = self._room = 0  # bytes of the map in use, and its length
        try:
            self._is_mapped = _keeps_room(self.descriptor)
            self.append(header)
        except OSError:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """Append data, which survives the process when this returns."""
        end = self._place + len(data)
        if end < self._room:
            self._map[self._place : end] = data  # type: ignore[index]
            self._place = end
        else:
            self._append_beyond(memoryview(data))

    def _append_beyond(self, data: memoryview) -> None:
        """Append data beyond the end of the current map: to the next map, or with `write` if the file is not mapped."""
        while data:
            if self._is_mapped:
                if self._place == self._room:
                    self._map_next()
                count = min(len(data), self._room - self._place)
                self._map[self._place : self._place + count] = data[:count]  # type: ignore[index]
                self._place += count
            else:
                count = os.write(self.descriptor, data)
                self._start += count
            data = data[count:]

    def _map_next(self) -> None:
        start = self._start + self._room
        os.posix_fallocate(self.descriptor, start, STEP_BYTES)
        following = mmap.mmap(self.descriptor, STEP_BYTES, offset=start)
        following.madvise(mmap.MADV_DONTFORK)  # the child that writes a snapshot does not use it
        self._unmap()
        self._map, self._start, self._place, self._room = following, start, 0, STEP_BYTES

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()

    def close(self) -> None:
        """Close the file and remove the zeros after the last turn."""
        self._unmap()
        with contextlib.suppress(OSError):  # the zeros are harmless
            os.ftruncate(self.descriptor, self._start + self._place)
        os.close(self.descriptor)


def _keeps_room(descriptor: int) -> bool:
    """Whether allocated space in this file stays writable when the disk is full."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    return not _libc.fstatfs(descriptor, found) and _KIND.unpack_from(found)[0] in _KEEP_ROOM
