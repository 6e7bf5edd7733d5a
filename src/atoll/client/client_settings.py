"""Which cluster a client uses: from the arguments of `atoll.connect`, or the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.cluster.cluster_file import settings_from_environment
from atoll.cluster.settings import ClusterSettings
from atoll.protocol.messages import DEFAULT_TOKEN_VARIABLE
from atoll.security.join_token import JOIN_VARIABLE


@dataclass(frozen=True)
class Settings:
    """`address` "" without `join` stands for an embedded cluster; with it, for that of the join token."""

    address: str
    token: str
    cluster: ClusterSettings
    join: str = ""  # or a file with it

    @classmethod
    def from_environment(cls) -> Settings:
        """ATOLL_ADDRESS, ATOLL_TOKEN, ATOLL_JOIN, and as `settings_from_environment`, which may raise ClusterError."""
        return cls(
            os.environ.get("ATOLL_ADDRESS", ""),
            os.environ.get(DEFAULT_TOKEN_VARIABLE, ""),
            settings_from_environment(),
            os.environ.get(JOIN_VARIABLE, ""),
        )


def script_name() -> str:
    """A name of this process for a person: its script, or "python"."""
    first = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    return "python" if first in ("-c", "-m") else Path(first).name
