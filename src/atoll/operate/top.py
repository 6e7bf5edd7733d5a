"""`atoll top`: show a watched cluster in a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from atoll.errors import AtollError
from atoll.operate.cluster_queries import ClusterSource
from atoll.operate.status_tables import ranges, state_text
from atoll.operate.text_tables import TextTable, number_column, text_column
from atoll.telemetry import tables as t
from atoll.telemetry.snapshot import SnapshotStruct
from atoll.telemetry.watch import ClusterRates, Watch

_SECONDS = 1.0
_MAX_SPANS = 2_000
_MAX_EVENTS = 8
_MAX_WAITS = 10
_MAX_VERSIONS = 8
_WIDTH = 140  # without a terminal
_BAR = 20
_DEVICES_PART = 3  # the part of a terminal's lines that devices may take


async def show(source: ClusterSource) -> None:
    """Show the cluster until canceled. Raises AtollError if the first request fails."""
    watch = Watch()
    watch.update(await source.report(), time.monotonic())
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                max_devices = live.console.height // _DEVICES_PART
                live.update(view(watch, source.name, time.monotonic(), time.time(), max_devices), refresh=True)
                await asyncio.sleep(_SECONDS)
                await _ask(source, watch)
    finally:
        source.close()


async def poll(source: ClusterSource, display: Callable[[Watch], None], *, once: bool = False) -> None:
    """Display the cluster once per second until canceled, or `once`. Raises AtollError if the first request fails.

    The first display follows two reports with a pause between them, because rates need an interval.
    """
    watch = Watch()
    try:
        watch.update(await source.report(), time.monotonic())
        while True:
            await asyncio.sleep(_SECONDS)
            await _ask(source, watch)
            display(watch)
            if once:
                return
    finally:
        source.close()


async def print_once(source: ClusterSource) -> None:
    """Print the tables of the cluster once."""
    console = Console(width=_WIDTH, highlight=False)
    await poll(source, lambda watch: console.print(view(watch, source.name, time.monotonic(), time.time())), once=True)


class WatchReport(SnapshotStruct, frozen=True):
    """Figures that follow from several reports."""

    problem: str  # why the fields of the cluster are not current; empty: they are
    rates: ClusterRates
    shares: dict[str, float]  # fraction of the used device time of the last interval by tenant
    busy: dict[str, float]  # fraction of the last 5 seconds in which a device computed, by its number


def json_fields(watch: Watch) -> dict[str, Any]:
    """Return the fields of the JSON of `atoll top`: those of the last report, and those of `WatchReport`."""
    busy = {str(row.id): row.busy for row in t.device_rows(watch, time.monotonic())}
    derived = WatchReport(problem=watch.problem, rates=watch.rates, shares=watch.shares, busy=busy)
    return {**msgspec.to_builtins(derived), **msgspec.to_builtins(watch.snapshot)}


async def _ask(source: ClusterSource, watch: Watch) -> None:
    try:
        watch.update(await source.report(), time.monotonic())
        spans, position = await source.spans(watch.position, _MAX_SPANS)
        watch.add_spans(spans, position, time.monotonic())
    except (AtollError, msgspec.MsgspecError) as error:
        watch.fail(str(error), time.monotonic())


def view(watch: Watch, name: str, now: float, wall: float, max_devices: int = sys.maxsize) -> RenderableType:
    """Return the display of the watched cluster, with one row for each host if it has more than `max_devices`."""
    parts: list[RenderableType] = [Text.assemble((f"cluster {name}  ", "bold"), t.headline(watch))]
    if watch.problem:
        parts.append(Text(watch.problem, "bold red"))
    parts.append(_islands(watch))
    parts.append(_devices(watch, now, max_devices))
    parts.append(_tenants(watch))
    parts.append(_sessions(watch))
    versions = t.version_rows(watch.snapshot)[:_MAX_VERSIONS]
    if versions:
        parts.append(_versions(versions))
    waits = t.wait_rows(watch.snapshot)
    if waits:
        parts.append(_waits(waits))
    events = t.event_rows(watch, now, wall)[:_MAX_EVENTS]
    if events:
        parts.append(_events(events))
    return Group(*parts)


def _table(title: str, words: Iterable[str], numbers: Iterable[str] = ()) -> TextTable:
    return TextTable(title, *map(text_column, words), *map(number_column, numbers))


def _islands(watch: Watch) -> TextTable:
    table = _table(
        "Islands", ("island", "state", "hosts", "memory"), ("in flight", "waiting", "gangs started", "restarts")
    )
    for row in t.island_rows(watch.snapshot):
        counts = (row.running, row.waiting, row.started, row.restarts)
        table.add_row(str(row.id), state_text(row.state), row.hosts, row.memory, *map(str, counts))
    return table


def _devices(watch: Watch, now: float, max_rows: int) -> TextTable:
    """Return a table with a row for each device, or for each host if there are more than `max_rows` devices."""
    rows = t.device_rows(watch, now)
    if len(rows) <= max_rows:
        table = _table("Devices", ("device", "island", "host", "memory", "busy"))
        for row in rows:
            table.add_row(str(row.id), str(row.island), row.host, row.memory, _bar(row.busy))
        return table
    table = _table("Devices by host", ("devices", "island", "host", "fullest", "busy"))
    for _, group in groupby(rows, key=lambda row: row.host):
        devices = list(group)
        fullest = max(devices, key=lambda row: row.used_bytes)
        busy = sum(row.busy for row in devices) / len(devices)
        numbers = ranges([row.id for row in devices])
        table.add_row(numbers, str(fullest.island), fullest.host, fullest.memory, _bar(busy))
    return table


def _bar(fraction: float) -> str:
    return f"{'█' * round(fraction * _BAR):<{_BAR}} {100 * fraction:3.0f} %"


def _tenants(watch: Watch) -> TextTable:
    table = _table(
        "Tenants",
        ("tenant", "memory", "waited (median / 99 %)"),
        ("share set", "share got", "sessions", "in flight", "waiting"),
    )
    for row in t.tenant_rows(watch):
        counts = (row.sessions, row.running, row.waiting)
        table.add_row(row.name, row.memory, row.waited, f"{row.share:g}", f"{100 * row.got:.1f} %", *map(str, counts))
    return table


def _sessions(watch: Watch) -> TextTable:
    rows = t.session_rows(watch.snapshot)
    show_state = any(each.state for each in watch.snapshot.sessions)
    table = TextTable(
        "Sessions",
        *map(text_column, ("session", "program", "tenant", "memory")),
        *map(number_column, ("arrays", "launches", "in flight")),
        *([text_column("state")] if show_state else []),
    )
    for row in rows:
        counts = (row.arrays, row.launches, row.in_flight)
        state = [Text(row.state)] if show_state else []
        table.add_row(str(row.id), Text(row.program), row.tenant, row.memory, *map(str, counts), *state)
    return table


def _versions(rows: list[t.VersionRow]) -> TextTable:
    table = _table(
        "Published arrays", ("name", "state", "memory", "islands"), ("version", "arrays", "readers", "age (s)")
    )
    for row in rows:
        counts = (str(row.version), str(row.arrays), str(row.readers), f"{row.age:.0f}")
        table.add_row(Text(row.name), Text(row.state), row.memory, row.islands, *counts)
    return table


def _waits(rows: list[t.WaitRow]) -> TextTable:
    table = _table("Waiting gangs", ("session", "first in line", "waits for"), ("island", "gangs", "for (s)"))
    for row in rows[:_MAX_WAITS]:
        counts = (str(row.island), str(row.gangs), f"{row.seconds:.3f}")
        table.add_row(str(row.session), Text(row.program), Text(row.text), *counts)
    return table


def _events(rows: list[t.EventRow]) -> TextTable:
    table = _table("Events", ("when", "what", "where", ""))
    for row in rows:
        table.add_row(time.strftime("%H:%M:%S", time.localtime(row.wall)), row.kind, row.where, Text(row.text))
    return table
