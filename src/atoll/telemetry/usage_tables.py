"""The rows of the tables of usage that `atoll usage` and the page show.

The rows come from a reply to `UsageRequest`; see `atoll.cluster.usage.usage_store`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.quantities import human_bytes

# The columns that identify a row, with their titles. A reply has some of them.
TITLES = {
    "tenant": "tenant",
    "run": "cluster started",
    "session": "session",
    "label": "script",
    "program": "program",
}


@dataclass(frozen=True)
class UsageRow:
    """The usage of a tenant, a session or a program. Fields that do not apply are ""."""

    key: str
    tenant: str
    run: str
    session: str
    label: str
    program: str
    device_seconds: float
    share: str  # of the device time of all rows
    memory: str  # bytes times seconds
    moved: str
    compiling: str
    expected: str  # device time of a launch of the program


def usage_rows(usage: Mapping[str, Any]) -> list[UsageRow]:
    """Return the rows by decreasing device time, as in the reply."""
    total = usage["total"]["device_seconds"]
    return [_row(row, total) for row in usage["rows"]]


def _row(row: Mapping[str, Any], total: float) -> UsageRow:
    names = {name: _name(name, row.get(name)) for name in TITLES}
    expected = row.get("expected_ms")
    return UsageRow(
        key=" ".join(names.values()),
        **names,
        device_seconds=round(row["device_seconds"], 3),
        share=f"{100 * row['device_seconds'] / total:.1f} %" if total else "",
        memory=f"{human_bytes(round(row['memory_byte_seconds']))} s",
        moved=human_bytes(row["bytes_moved"]),
        compiling=f"{row['compile_seconds']:.2f} s",
        expected="" if expected is None else f"{expected:.3f} ms",
    )


def _name(column: str, value: Any) -> str:
    if column == "run":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else ""
    return str(value or "")


def usage_notes(usage: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: the idle device time, which operators see, and whether usage is stored."""
    lines = []
    present = usage.get("present_device_seconds")
    if present:
        total, idle = usage["total"]["device_seconds"], usage["idle_device_seconds"]
        share = 100 * total / present
        lines.append(f"of {present:.1f} device seconds, {total:.1f} were used ({share:.1f} %) and {idle:.1f} were idle")
    if not usage["kept"]:
        lines.append("this usage is lost when the cluster ends")
    return lines
