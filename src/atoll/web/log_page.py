"""The page Log: the last records of the cluster's log, for operators."""

from __future__ import annotations

from nicegui import ui

from atoll.telemetry import tables as t
from atoll.telemetry.log_rows import LEVELS, chosen_rows
from atoll.web.live_table import Column, LiveTable
from atoll.web.page_frame import PageFrame, filter_input

_ALL = "all processes"
_PROCESSES = (_ALL, "engine", "controller", "worker", "host")
_MAX_SHOWN = 200
_FOR_OPERATORS = "The log has messages about all tenants: only operators can read it."


class LogPage:
    """Shows the newest records first, filtered by process, level, session and text."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        async def show() -> None:
            may_read = self._frame.is_operator
            choices.set_visibility(may_read)
            log.all.set_visibility(may_read)
            if not may_read:
                note.set_text(_FOR_OPERATORS if self._frame.watch.updates else "")
                return
            rows, problem = await self._frame.poller.log()
            of_process = "" if process.value == _ALL else process.value
            number = int(session.value) if session.value is not None else None
            found = t.matching(chosen_rows(rows, of_process, number, level.value), wanted.value or "")
            note.set_text(problem or f"{len(found)} of the last {len(rows)} records, the newest first")
            log.show(found[: -_MAX_SHOWN - 1 : -1])

        await self._frame.build("/log", show)
        with ui.row().style("align-items: center") as choices:
            process = ui.select(list(_PROCESSES), value=_ALL, on_change=show).props("dense outlined data-process")
            level = ui.select(list(LEVELS), value="debug", on_change=show, label="from level")
            level.props("dense outlined data-level").style("min-width: 8em")
            session = ui.number("session", min=0, precision=0, on_change=show)
            session.props("dense outlined clearable data-session").style("width: 7em")
            wanted = filter_input("tenant, logger or text", show)
        note = ui.label().classes("line").props('data-line="log"')
        log = LiveTable(
            "Log",
            [
                Column("time", "when"),
                Column("process", "process"),
                Column("level", "level"),
                Column("text", "message", is_text=True),
            ],
            "number",
            limit=_MAX_SHOWN,
        )
