"""Records of the usage of a cluster and of the durations of functions."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_ESTIMATES = 10_000


class By(StrEnum):
    """The key by which a report sums usage."""

    TENANT = "tenant"
    SESSION = "session"
    PROGRAM = "program"


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The usage of a program of a session since the previous record, summed over devices and hosts."""

    tenant: str
    session: int
    label: str  # of the session
    program: str
    device_ns: int = 0  # less than 0 if charges in advance were taken back
    byte_seconds: float = 0.0  # one GiB on each of eight devices for a second is 8 GiB s
    bytes_moved: int = 0  # counted by the writer
    compile_seconds: float = 0.0


class Expected(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The expected device time of a launch of a tenant's program."""

    tenant: str
    program: str
    nanoseconds: int


class Estimate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The estimated duration of a gang after `runs` observations. `key` identifies it: see `state.estimates`."""

    key: str
    nanoseconds: int
    runs: int
