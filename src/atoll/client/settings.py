"""Which cluster a client uses: from the arguments of `atoll.connect`, or the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ClusterError
from atoll.quantities import parse_bytes
from atoll.transport.messages import DEFAULT_TOKEN_VARIABLE

DEFAULT_ISLANDS = "1x1x8"


@dataclass(frozen=True)
class Settings:
    """`address` "" stands for an embedded cluster of `islands`."""

    address: str = ""
    islands: str = DEFAULT_ISLANDS
    token: str = ""
    platform: str = "cpu"
    device_memory: int = 0  # bytes of each device; 0: what the platform says
    dispatch: str = "parallel"  # or "sequential"
    mesh: str = ""  # of an island's devices, such as 4x4; "": a line

    @classmethod
    def from_environment(cls) -> Settings:
        """What the variables ATOLL_... of README.md say.

        Raises ClusterError where ATOLL_DEVICE_MEMORY or ATOLL_DISPATCH says what cannot be.
        """
        try:
            device_memory = parse_bytes(os.environ.get("ATOLL_DEVICE_MEMORY", "") or "0")
        except ValueError as error:
            raise ClusterError(f"ATOLL_DEVICE_MEMORY: {error}") from None
        dispatch = os.environ.get("ATOLL_DISPATCH", "") or "parallel"
        if dispatch not in ("parallel", "sequential"):
            raise ClusterError(f"ATOLL_DISPATCH is {dispatch!r}: expected parallel or sequential")
        return cls(
            os.environ.get("ATOLL_ADDRESS", ""),
            os.environ.get("ATOLL_ISLANDS", "") or DEFAULT_ISLANDS,
            os.environ.get(DEFAULT_TOKEN_VARIABLE, ""),
            os.environ.get("ATOLL_PLATFORM", "") or "cpu",
            device_memory,
            dispatch,
            os.environ.get("ATOLL_TOPOLOGY", ""),
        )


def script_name() -> str:
    """What a person would call this process: its script, or how Python was started."""
    first = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    return "python" if first in ("-c", "-m") else Path(first).name
