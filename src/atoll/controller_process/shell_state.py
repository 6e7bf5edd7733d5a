"""What outlives a controller's process, beside the state machine itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from atoll.wire.resumption.resumable_connections import LinkState


@dataclass
class ShellState:
    """What another process needs, beside the controller's state, to go on with this one's connections. Plain data."""

    seconds: float = 0.0  # of its clock, which never goes back
    next: int = 1  # number of a connection
    key: bytes = field(default_factory=lambda: os.urandom(32))  # of the secrets by which they are resumed
    links: list[LinkState] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)  # connections that end with the process, and their roles
    timers: dict[int, float] = field(default_factory=dict)  # when they are due
