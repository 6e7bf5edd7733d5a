"""Duration estimates of functions, in the directory of compiled programs.

All clusters that use the directory share the file. Each writes what it has learnt over what the file has then, and a
reader finds the one or the other as a whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.cluster.usage.usage_records import Estimate

MOST_ESTIMATES = 10_000
FILE_NAME = "atoll-estimates.json"
_MOST_BYTES = 16 << 20

_decode = msgspec.json.Decoder(tuple[Estimate, ...]).decode


def read_estimates(directory: str) -> tuple[Estimate, ...]:
    """Those that the directory has, the newest last; none where there is no directory, or its file is damaged."""
    try:
        with open(Path(directory) / FILE_NAME, "rb") as file:
            found = _decode(file.read(_MOST_BYTES))
    except (OSError, msgspec.MsgspecError):
        return ()
    return found[-MOST_ESTIMATES:]


def write_estimates(directory: str, learnt: Sequence[Estimate]) -> None:
    """Puts these into the directory's file, in the place of older ones. Raises OSError."""
    merged = {each.key: each for each in read_estimates(directory)}
    for each in learnt:
        merged.pop(each.key, None)
        merged[each.key] = each
    os.makedirs(directory, exist_ok=True)
    file = Path(directory) / FILE_NAME
    partial = file.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.encode(list(merged.values())[-MOST_ESTIMATES:]))
        partial.rename(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
