"""How much one compiler process may use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from atoll.cluster.settings import parse_seconds
from atoll.errors import SettingsError
from atoll.quantities import human_bytes, parse_bytes

MEMORY_VARIABLE = "ATOLL_COMPILER_MEMORY"
SECONDS_VARIABLE = "ATOLL_COMPILER_SECONDS"
DEFAULT_SECONDS = 1800
# A compilation may take this many times its CPU time: others may use the host's CPUs meanwhile.
_WALL_FACTOR = 10


@dataclass(frozen=True)
class CompilerLimits:
    """The limits of one process, and of one compilation in it.

    `memory_bytes` is for the data of a process. `seconds` is CPU time of all threads of a compilation, and
    `wall_seconds` is how long it may take, without the time in which it waits for its client.
    """

    memory_bytes: int
    seconds: int
    wall_seconds: int


def limits_from_environment() -> CompilerLimits:
    """Return the limits that the environment states, or the defaults. Raises SettingsError."""
    chosen = os.environ.get(MEMORY_VARIABLE, "")
    try:
        memory = parse_bytes(chosen) if chosen else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except ValueError as error:
        raise SettingsError(f"{MEMORY_VARIABLE}: {error}") from None
    seconds = parse_seconds(os.environ.get(SECONDS_VARIABLE, ""), SECONDS_VARIABLE)
    limit = max(1, round(seconds)) if seconds else DEFAULT_SECONDS
    return CompilerLimits(memory, limit, limit * _WALL_FACTOR)


def memory_text(memory_bytes: int) -> str:
    """Say that a compilation needed more memory than it may use."""
    return (
        f"the compilation needs more than the {human_bytes(memory_bytes)} of memory that a compiler process may use; "
        f"the operator can raise {MEMORY_VARIABLE}"
    )


def seconds_text(seconds: int, kind: str) -> str:
    """Say that a compilation took more time than it may; `kind` is "CPU time" or "time"."""
    return (
        f"the compilation took more than the {seconds} s of {kind} that it may use; "
        f"the operator can raise {SECONDS_VARIABLE}"
    )
