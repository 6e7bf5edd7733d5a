"""The table of `atoll usage`."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.quantities import human_bytes

_TITLES = {"tenant": "tenant", "run": "cluster started", "session": "session", "label": "script", "program": "program"}


def usage_table(usage: dict[str, Any]) -> RenderableType:
    """The table for what a cluster answers to `UsageRequest`; see `atoll.cluster.usage.usage_store`."""
    rows = usage["rows"]
    names = [name for name in _TITLES if any(name in row for row in rows)]
    has_expected = usage["by"] == "program"
    table = Table(*(_TITLES[name] for name in names), title="Usage", title_justify="left")
    for column in ("device seconds", "memory x seconds", "moved", "compiling", *(["expected"] if has_expected else [])):
        table.add_column(column, justify="right")
    for row in rows:
        expected = [_milliseconds(row["expected_ms"])] if has_expected else []
        table.add_row(*(_name(name, row[name]) for name in names), *_amounts(row), *expected)
    lines: list[RenderableType] = [table] if rows else [Text("nothing was used")]
    present = usage.get("present_device_seconds")
    if present:
        total, idle = usage["total"]["device_seconds"], usage["idle_device_seconds"]
        share = 100 * total / present
        lines.append(
            Text(f"of {present:.1f} s of all devices {total:.1f} s were used ({share:.1f} %), {idle:.1f} s idle")
        )
    if not usage["kept"]:
        lines.append(Text("this is not kept when the cluster ends"))
    return Group(*lines)


def _name(column: str, value: Any) -> Text:
    if column == "run":
        return Text(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else "")
    return Text(str(value or ""))


def _amounts(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['device_seconds']:.3f}",
        f"{human_bytes(round(row['memory_byte_seconds']))} s",
        human_bytes(row["bytes_moved"]),
        f"{row['compile_seconds']:.2f} s",
    )


def _milliseconds(expected: float | None) -> str:
    return "" if expected is None else f"{expected:.3f} ms"
