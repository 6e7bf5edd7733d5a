"""Memory without a name that its maker shares with another process, and whose size nobody can change."""

from __future__ import annotations

import fcntl
import os

from atoll.errors import Code, StatusError


def is_available() -> bool:
    """Return whether the system has such memory. Only Linux has it."""
    return hasattr(os, "memfd_create")


def sealed_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of new memory: a memfd that is sealed against changes of its size.

    Raises:
        OSError: there is no memory, or this process has too many open files.
        StatusError: UNIMPLEMENTED, if the system has no such memory.
    """
    if not is_available():
        raise StatusError(Code.UNIMPLEMENTED, "this system has no memory that processes share without a name")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
