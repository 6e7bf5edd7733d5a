"""How a proxy is started, and what it answers."""

from __future__ import annotations

import msgspec


class ProxyOptions(msgspec.Struct, frozen=True):
    """How to start a proxy. `parent` is the process that it must not outlive.

    With `client` (a pid) it serves that client alone: it opens the session at once, reports over `ready_fd`
    whether that worked, and ends with the client's session.
    """

    listen: str
    controller: str
    parent: int
    label: str = ""
    client: int = 0
    directory: str = ""  # of the client's own, with this proxy's socket; removed in the end
    transfer_directory: str = ""  # shared with the client for large arrays; removed in the end
    fail_on_loss: bool = False  # what is sent to a failed island fails, and does not wait until that is back
    losses: str = ""  # a file that grows by a byte whenever hosts fail: the client looks at its size
    ready_fd: int = -1
    patience: float = 60.0


class Ready(msgspec.Struct, frozen=True):
    """What a proxy says once it listens, or cannot: the error's class in `atoll.errors`, and its text."""

    address: str = ""
    error: str = ""
    message: str = ""
