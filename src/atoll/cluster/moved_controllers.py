"""The address of a controller that has moved because a standby took over.

The record of a standing cluster has the address at which its engine started the controller. If the controller moves to
another machine and the engine stays, the engine writes the new address to a file in the cluster's directory.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from atoll.atomic_files import write_atomically
from atoll.missing import read_if_exists

_FILE = "controller-address"


def record_controller(directory: str, address: str) -> None:
    """Record that the cluster's controller is at `address` now. Does nothing if the file cannot be written."""
    with contextlib.suppress(OSError):
        write_atomically(Path(directory) / _FILE, address.encode())


def recorded_controller(directory: str) -> str:
    """Return the address of a controller that has moved, or "" if it has not. Raise OSError if that is unknown."""
    try:
        return (read_if_exists(Path(directory) / _FILE) or b"").decode().strip()
    except UnicodeDecodeError:
        return ""
