"""What `atoll status` shows a person."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATE_STYLES = {"ready": "green", "starting": "yellow", "lost": "bold red"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def status_tables(report: dict[str, Any], address: str) -> RenderableType:
    """The tables for the report of the cluster at `address`; see `atoll.controller.report`."""
    devices = sum(len(host["devices"]) for island in report["islands"] for host in island["hosts"])
    heading = Text.assemble(
        ("cluster ", "bold"),
        address,
        f"  ({report['topology']}, {devices} devices, atoll {report['version']})",
    )
    parts: list[RenderableType] = [heading, _islands(report["islands"])]
    parts.append(_sessions(report["sessions"]) if report["sessions"] else Text("no sessions are open"))
    functions = report["functions"]
    parts.append(
        Text(
            f"compiled functions: {functions['compiled']} compiled in {functions['seconds']:.1f} s, "
            f"{functions['cached']} found in the cache"
        )
    )
    return Group(*parts)


def _islands(islands: list[dict[str, Any]]) -> Table:
    table = Table("island", "state", "host", "worker", "devices", "kind", title="Islands", title_justify="left")
    for column in ("memory of each", "in flight", "waiting", "gangs started"):
        table.add_column(column, justify="right")
    for island in islands:
        gangs = (str(island["in_flight"]), str(island["waiting"]), str(island["started"]))
        first = (str(island["id"]), _state(island["state"]))
        for number, host in enumerate(island["hosts"]):
            if number == 0:
                table.add_row(*first, *_host(host), *gangs)
            else:
                table.add_row("", "", *_host(host))
        if not island["hosts"]:
            table.add_row(*first, "-", "", "", "", "", *gangs)
    return table


def _host(host: dict[str, Any]) -> tuple[str | Text, ...]:
    devices = host["devices"]
    worker = Text.assemble(f"pid {host['pid']} ", _state(host["state"]))
    kinds = ", ".join(sorted({device["kind"] for device in devices}))
    sizes = sorted({device["memory_bytes"] for device in devices})
    memory = ", ".join(human_bytes(size) if size > 0 else "unknown" for size in sizes)
    return str(host["id"]), worker, ranges([device["id"] for device in devices]), kinds, memory


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    table = Table("session", "program", "pid", title="Sessions", title_justify="left")
    for column in ("arrays", "memory", "functions", "launches", "in flight"):
        table.add_column(column, justify="right")
    for each in sessions:
        counts = (each["functions"], each["launches"], each["in_flight"])
        table.add_row(
            str(each["id"]),
            Text(each["label"]),
            str(each["pid"]),
            str(each["arrays"]),
            human_bytes(each["bytes"]),
            *map(str, counts),
        )
    return table


def _state(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def human_bytes(count: int) -> str:
    """`count` in the largest binary unit of which there is one or more: "1.5 GiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers with runs drawn together: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
