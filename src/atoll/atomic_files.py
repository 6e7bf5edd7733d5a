"""Write files so that a reader finds the complete old content or the complete new content, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

# The suffix of files that are not complete yet. A process that is killed while it writes leaves such a file.
PARTIAL = ".partial"


def write_atomically(
    path: str | os.PathLike[str],
    content: bytes | Iterable[bytes],
    *,
    mode: int = 0o600,
    durable: bool = False,
    replace: bool = True,
) -> None:
    """Write a file under another name in the same directory, then rename it to `path`.

    Args:
      path: The file. If it is a link, the link is replaced, not its target.
      content: The content, or its parts in order.
      mode: The permissions that the file is created with, from which the process's umask is removed.
      durable: Whether the file survives a loss of power from when this function returns.
      replace: Whether to replace a file that exists.

    Raises:
      FileExistsError: `path` exists and `replace` is False. Of several processes, one creates the file.
      OSError: The file cannot be written. `path` is unchanged, and the error names it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(partial, flags, mode), "wb") as file:
                file.writelines((content,) if isinstance(content, bytes) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            if replace:
                partial.replace(path)
            else:
                os.link(partial, path)
        finally:  # after a rename, the partial file no longer exists
            with contextlib.suppress(OSError):
                partial.unlink()
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # name this file, not the partial one


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names of a directory's files survive a loss of power. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without this function
            raise
    finally:
        os.close(descriptor)
