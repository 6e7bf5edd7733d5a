"""Which cluster a client uses: from the arguments of `atoll.connect`, or the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.cluster.settings import ClusterSettings
from atoll.protocol.messages import DEFAULT_TOKEN_VARIABLE


@dataclass(frozen=True)
class Settings:
    """`address` "" stands for an embedded cluster."""

    address: str
    token: str
    cluster: ClusterSettings

    @classmethod
    def from_environment(cls) -> Settings:
        """ATOLL_ADDRESS, ATOLL_TOKEN, and as `ClusterSettings` has it. Raises ClusterError as that does."""
        return cls(
            os.environ.get("ATOLL_ADDRESS", ""),
            os.environ.get(DEFAULT_TOKEN_VARIABLE, ""),
            ClusterSettings.from_environment(),
        )


def script_name() -> str:
    """A name of this process for a person: its script, or "python"."""
    first = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    return "python" if first in ("-c", "-m") else Path(first).name
