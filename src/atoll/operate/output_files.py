"""Files that a command writes for its user."""

from __future__ import annotations

from pathlib import Path

from atoll.atomic_files import write_atomically


def write_whole(path: Path, body: bytes) -> None:
    """Write a file completely, or leave it unchanged. Raises OSError.

    Writes directly to anything but an ordinary file, such as a pipe or a terminal.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(body)
        return
    write_atomically(path, body, mode=0o666)
