"""What is kept about the past of a cluster: what was used, and how long functions took."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class By(StrEnum):
    """What usage is summed up by."""

    TENANT = "tenant"
    SESSION = "session"
    PROGRAM = "program"


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a program of a session used since the record before.

    Device time is summed over devices, and so is memory: a gibibyte on each of eight devices for a second is 8 GiB s.
    Bytes that are moved count where they are written.
    """

    tenant: str
    session: int
    label: str  # of the session
    program: str
    device_ns: int = 0
    byte_seconds: float = 0.0
    bytes_moved: int = 0
    compile_seconds: float = 0.0  # summed over hosts


class Expected(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a launch of a tenant's program is expected to take of its devices."""

    tenant: str
    program: str
    nanoseconds: int


class Estimate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How long a gang takes, learnt from so many runs. `key` says of what: see `scheduling.estimates`."""

    key: str
    nanoseconds: int
    runs: int
