"""The records of a cluster's log, for displays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("debug", "info", "warning", "error", "critical")  # in the order of their importance


@dataclass(frozen=True)
class LogRow:
    """A record. `number` is its position in the log, `level` one of `LEVELS`, and `time` that of this machine."""

    number: int
    time: str
    process: str  # its kind, such as "worker"
    level: str
    text: str


def chosen_rows(rows: Sequence[LogRow], process: str, session: int | None, level: str) -> list[LogRow]:
    """Return the rows of a kind of process ("" for all) that name a session, if given, from a `level` on."""
    least = LEVELS.index(level)
    names = re.compile(rf"\bsession {session}\b") if session is not None else None
    return [
        row
        for row in rows
        if process in ("", row.process)
        and (row.level not in LEVELS or LEVELS.index(row.level) >= least)
        and (names is None or names.search(row.text))
    ]
