"""The key of a user on a machine, from which Atoll derives the keys for its data on disk.

The key file outlives clusters, so that a cluster can verify and read the data of earlier ones. The file is in no
directory that it protects, and no process that runs users' code can read it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from atoll.atomic_files import write_atomically
from atoll.cluster.directories import key_file
from atoll.cluster.environment_variables import KEY_FILE, STATE_DIRECTORY
from atoll.errors import AccessError

_BYTES = 32
_MAX_BYTES = 4096


def user_key(purpose: str) -> bytes:
    """Return the key for this purpose, 32 bytes. The first use creates the user's key.

    Raises AccessError if the key file cannot be read or created, if other users can read it, or if it holds no key.
    """
    return hmac.digest(_read(Path(key_file())), purpose.encode(), "sha256")


def _read(path: Path) -> bytes:
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process created it at the same time
                write_atomically(path, secrets.token_bytes(_BYTES), durable=True, replace=False)
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(_MAX_BYTES)
    except OSError as error:
        raise AccessError(
            f"cannot read or create the key file {path}: {error.strerror}; set {KEY_FILE.variable} to another file, or "
            f"{STATE_DIRECTORY.variable} to another directory"
        ) from None
    if found.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise AccessError(f"other users can read the key file {path}: chmod 600 {path}")
    if len(key) < _BYTES:
        raise AccessError(f"the key file {path} has {len(key)} bytes, but a key has at least {_BYTES}: remove the file")
    return key
