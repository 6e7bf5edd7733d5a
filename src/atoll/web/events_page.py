"""The page Events: what has happened to islands, sessions and tenants."""

from __future__ import annotations

import time
from dataclasses import dataclass

from atoll.telemetry import tables as t
from atoll.web.live_table import Column, LiveTable
from atoll.web.page_frame import PageFrame, filter_input


@dataclass(frozen=True)
class _ShownEvent:
    number: int
    time: str
    kind: str
    where: str
    tenant: str
    text: str


class EventsPage:
    """Shows the latest events."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        def show() -> None:
            rows = t.event_rows(self._frame.watch, time.monotonic(), time.time())
            events.show(t.matching([_shown(row) for row in rows], wanted.value or ""))

        await self._frame.build("/events", show)
        wanted = filter_input("tenant, session, kind or text", show)
        events = LiveTable(
            "Events",
            [
                Column("number", "event", right=True),
                Column("time", "when"),
                Column("kind", "what"),
                Column("where", "where"),
                Column("tenant", "tenant"),
                Column("text", "details", is_text=True),
            ],
            "number",
            limit=100,
        )


def _shown(row: t.EventRow) -> _ShownEvent:
    # Rounded to seconds, so that an event keeps the same row between updates.
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(round(row.wall)))
    return _ShownEvent(row.number, when, row.kind, row.where, row.tenant, row.text)
