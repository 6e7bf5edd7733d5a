"""How a cluster on this machine is started, and where what belongs to it is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from atoll.cluster.settings import ClusterSettings


class EngineOptions(msgspec.Struct, frozen=True):
    """How to start a cluster. `parent` is the process that it must not outlive; 0 for a cluster that stays.

    With a `note` (see `cluster.processes.adopted_process`) another process may take the parent's place within the grace
    time.
    """

    settings: ClusterSettings
    directory: str
    listen: str = ""  # of the controller; "": a socket in `directory`
    advertise: str = ""  # by which others know it, in the join tokens; "": see `security.start_security.advertised`
    parent: int = 0
    note: str = ""
    cache_directory: str = ""
    usage_file: str = ""  # where the controller keeps usage; "": in memory
    journal: str = ""  # the directory of the controller's journal, from which it is started again; "": it has none
    standby: str = ""  # the address of a controller: this is to be its standby, and has no hosts of its own
    ready_fd: int = -1
    client_directories: tuple[str, ...] = ()  # of its client, to remove in this order: the proxy may be killed

    @property
    def has_one_client(self) -> bool:
        """Whether the cluster is embedded: it belongs to the client that started it."""
        return bool(self.client_directories)

    @property
    def controller_address(self) -> str:
        return self.listen or f"unix:{self.directory}/controller.sock"


class Started(msgspec.Struct, frozen=True):
    """What the engine says once the cluster is up, or is not."""

    address: str = ""
    error: str = ""


def sockets_base() -> Path:
    """$XDG_RUNTIME_DIR, or the system's temporary directory."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())


def registry_directory() -> Path:
    """Return the directory for the standing clusters of this user: see `operate.cluster_registry`."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK):
        return Path(base) / "atoll"
    return Path(tempfile.gettempdir()) / f"atoll-{os.getuid()}"


def make_directory(kind: str) -> Path:
    """A fresh private directory for a cluster's sockets."""
    return Path(tempfile.mkdtemp(prefix=f"atoll-{kind}-", dir=sockets_base()))
