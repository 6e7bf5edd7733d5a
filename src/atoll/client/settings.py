"""Which cluster a client uses: from the arguments of `atoll.connect`, or the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.transport.messages import DEFAULT_TOKEN_VARIABLE

DEFAULT_ISLANDS = "1x1x8"


@dataclass(frozen=True)
class Settings:
    """`address` "" stands for an embedded cluster of `islands`."""

    address: str = ""
    islands: str = DEFAULT_ISLANDS
    token: str = ""
    platform: str = "cpu"

    @classmethod
    def from_environment(cls) -> Settings:
        """ATOLL_ADDRESS, ATOLL_ISLANDS, ATOLL_TOKEN and ATOLL_PLATFORM."""
        return cls(
            os.environ.get("ATOLL_ADDRESS", ""),
            os.environ.get("ATOLL_ISLANDS", "") or DEFAULT_ISLANDS,
            os.environ.get(DEFAULT_TOKEN_VARIABLE, ""),
            os.environ.get("ATOLL_PLATFORM", "") or "cpu",
        )


def script_name() -> str:
    """What a person would call this process: its script, or how Python was started."""
    first = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    return "python" if first in ("-c", "-m") else Path(first).name
