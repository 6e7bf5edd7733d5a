"""The page Usage: device time, memory and data by tenant, session or program."""

from __future__ import annotations

from nicegui import ui

from atoll.cluster.usage.usage_records import By
from atoll.telemetry.usage_tables import usage_notes, usage_rows
from atoll.web.live_table import Column, LiveTable
from atoll.web.page_frame import PageFrame

_HOUR, _DAY = 3600.0, 86_400.0
_SPANS = {"last hour": _HOUR, "last day": _DAY, "last week": 7 * _DAY, "last 30 days": 30 * _DAY, "all": 0.0}
# The columns of the tables of usage: those that identify a row, and the amounts.
_USERS: dict[By, list[Column]] = {
    By.TENANT: [Column("tenant", "tenant")],
    By.SESSION: [
        Column("tenant", "tenant"),
        Column("run", "cluster started"),
        Column("session", "session", right=True),
        Column("label", "script"),
    ],
    By.PROGRAM: [
        Column("tenant", "tenant"),
        Column("program", "program"),
        Column("expected", "expected per launch", right=True),
    ],
}
_AMOUNTS = [
    Column("device_seconds", "device seconds", right=True),
    Column("share", "share", right=True),
    Column("memory", "memory x seconds", right=True),
    Column("moved", "moved", right=True),
    Column("compiling", "compiling", right=True),
]


class UsagePage:
    """Shows the usage of a time span."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        async def show() -> None:
            wanted = by.value, span.value
            found = await self._frame.poller.usage(By(by.value), _SPANS[span.value])
            if found is None or wanted != (by.value, span.value):
                return
            for each, table in tables.items():
                table.all.set_visibility(each == by.value)
            tables[by.value].show(usage_rows(found))
            notes.set_text("; ".join(usage_notes(found)))

        await self._frame.build("/usage", show)
        with ui.row():
            by = ui.toggle([str(each) for each in By], value=str(By.TENANT), on_change=show).props("no-caps data-by")
            span = ui.select(list(_SPANS), value="last day", on_change=show).props("dense outlined data-span")
        tables = {
            str(each): LiveTable(f"Usage by {each}", [*names, *_AMOUNTS], "key") for each, names in _USERS.items()
        }
        notes = ui.label().classes("line").props('data-line="usage"')
