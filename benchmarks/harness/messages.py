"""Messages between a benchmark and its workers: one JSON message per line, and one reply per request."""

import msgspec

from benchmarks.harness.benchmark import Settings


class PrepareRequest(msgspec.Struct, frozen=True, tag="prepare"):
    """Resolve "module:function" and call it. Once, before all rounds."""

    function: str
    settings: Settings
    deadline: float  # seconds


class RoundRequest(msgspec.Struct, frozen=True, tag="round"):
    deadline: float  # seconds


Request = PrepareRequest | RoundRequest


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    pass


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    values: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: str


Reply = Prepared | Measured | Failed
