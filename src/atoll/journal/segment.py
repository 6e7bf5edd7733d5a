"""A segment of a journal while turns are appended to it: a file that is mapped into memory.

To append is to copy: there is no system call. What was copied is the kernel's, as after a `write`, and survives the
process however it ends. Behind it, as far as room was allocated, the file has zeros, which no turn begins with; they go
when the segment is closed.

Invariant: no copy fails. A page of a map for which the disk has no room ends the process (SIGBUS), so room is allocated
first, where that is an error that can be handled. Some file systems take new room for each change whatever was
allocated (btrfs, ZFS), or find out later (NFS): where it is none of those that are known to keep it, turns are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from pathlib import Path

# Allocated at a time: the file grows in such steps.
STEP_BYTES = 4 << 20
# Kinds of file systems (statfs(2)) in which what was allocated can be written: ext2 to ext4, XFS, tmpfs.
_KEEP_ROOM = frozenset((0xEF53, 0x58465342, 0x01021994))
_KIND = struct.Struct("l")  # the first field of what fstatfs(2) gives
_STATFS_BYTES = 256  # more than it has
_libc = ctypes.CDLL(None)


class Segment:
    """A new one, which begins with `header`. For one thread. Without room it, and `append`, raise OSError."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        self._start = 0  # of the map, in the file
        self._place = self._room = 0  # what is used of the map, and its length
        try:
            self._is_mapped = _keeps_room(self.descriptor)
            self.append(header)
        except OSError:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """When this returns, the data survives the process."""
        end = self._place + len(data)
        if end < self._room:
            self._map[self._place : end] = data  # type: ignore[index]
            self._place = end
        else:
            self._append_beyond(memoryview(data))

    def _append_beyond(self, data: memoryview) -> None:
        """What does not fit into the map: it goes into the next, or is written where there is none."""
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
        following.madvise(mmap.MADV_DONTFORK)  # who writes a snapshot needs none
        self._unmap()
        self._map, self._start, self._place, self._room = following, start, 0, STEP_BYTES

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()

    def close(self) -> None:
        """The file ends with the last turn from now on."""
        self._unmap()
        with contextlib.suppress(OSError):  # zeros do no harm
            os.ftruncate(self.descriptor, self._start + self._place)
        os.close(self.descriptor)


def _keeps_room(descriptor: int) -> bool:
    """Whether what is allocated in this file can be written, however full the disk is."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    return not _libc.fstatfs(descriptor, found) and _KIND.unpack_from(found)[0] in _KEEP_ROOM
