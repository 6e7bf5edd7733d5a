"""Files that a command writes for its user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, body: bytes) -> None:
    """Writes a file that has all of `body`, or leaves what was there as it was. Raises OSError.

    What is no ordinary file (a pipe, a terminal) is written to directly.
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
        # The path that the user knows.
        raise type(error)(error.errno, error.strerror, str(path)) from None
