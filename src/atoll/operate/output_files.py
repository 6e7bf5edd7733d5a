"""Files that a command writes for its user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, body: bytes) -> None:
    """Write a file completely, or leave it unchanged. Raises OSError.

    Writes directly to anything but an ordinary file, such as a pipe or a terminal.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(body)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(body)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        # Name the user's path, not the partial file's.
        raise type(error)(error.errno, error.strerror, str(path)) from None
