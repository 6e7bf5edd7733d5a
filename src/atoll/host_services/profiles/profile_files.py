"""Profiles in files: on a path of this host, or in an object store that fsspec reaches from here."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from atoll.errors import unimplemented


def write(directory: str, name: str, content: bytes) -> None:
    """Writes a file that does not exist yet. Raises OSError, and UNIMPLEMENTED where nothing here reaches the place."""
    if "://" in directory:
        _write_to_store(f"{directory}/{name}", content)
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = os.path.join(directory, name)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _write_to_store(url: str, content: bytes) -> None:
    try:
        import fsspec

        opened: Any = fsspec.open(url, "wb")
    except ImportError as error:
        raise unimplemented(
            f"this host cannot write {url[:300]}: {error}. Install fsspec and its package there"
        ) from None
    with opened as file:
        file.write(content)
