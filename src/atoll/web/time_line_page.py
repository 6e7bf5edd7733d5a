"""The page Time line: the gangs of each device in the last seconds."""

from __future__ import annotations

import time

from nicegui import ui

from atoll.errors import AtollError
from atoll.quantities import counted
from atoll.telemetry.timeline import WINDOW_SECONDS, Row
from atoll.web.drawing import MAX_ROWS, legend_html, time_line_svg
from atoll.web.live_table import heading
from atoll.web.page_frame import PageFrame

_ZOOMS = {"10 s": WINDOW_SECONDS, "5 s": 5.0, "2 s": 2.0, "1 s": 1.0, "0.5 s": 0.5, "0.1 s": 0.1}  # in seconds


class TimeLinePage:
    """Shows the time line, and downloads a trace."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        def name_of(row: Row) -> str:
            return f"island {row.island} host {row.host}:{row.ordinal}"

        kept: tuple[float, list[Row]] | None = None  # since "Pause"

        def show() -> None:
            nonlocal kept
            now, line = time.monotonic(), self._frame.watch.time_line
            line.trim(now)
            if not pause.value:
                kept = None
            elif kept is None:
                kept = now, [row.copy() for row in line.rows()]
            at, rows = kept or (now, line.rows())
            window = _ZOOMS[zoom.value]
            ago = min(float(back.value), line.window - window)
            seen = {bar.session for row in rows for bar in row.bars}
            labels = {
                each.id: f"session {each.id} ({each.label or each.pid})" for each in self._frame.watch.snapshot.sessions
            }
            names = {session: labels.get(session, f"session {session} (ended)") for session in seen}
            picture.set_content(time_line_svg(rows, names, name_of, at, window, ago))
            legend.set_content(legend_html(names))
            if len(rows) > MAX_ROWS:
                more.set_text(f"not shown: {counted(len(rows) - MAX_ROWS, 'more device')}")

        await self._frame.build("/timeline", show, with_spans=True)
        heading("Gangs by device")
        with ui.row().style("align-items: center"):
            zoom = ui.select(list(_ZOOMS), value="10 s", on_change=show).props("dense outlined data-zoom")
            ui.label("ending, in seconds ago:")
            back = ui.slider(min=0, max=WINDOW_SECONDS, step=0.1, value=0, on_change=show).props("label data-back")
            back.style("width: 12em")
            pause = ui.switch("Pause", on_change=show).props("data-pause")
            ui.button("Download a trace", on_click=self._download_trace).props("flat no-caps")
        # `legend_html` and `time_line_svg` escape names.
        legend = ui.html(sanitize=False)
        picture = ui.html(sanitize=False).classes("full scroll")
        more = ui.label()

    async def _download_trace(self) -> None:
        """Send the browser a file for https://ui.perfetto.dev."""
        try:
            ui.download.content(await self._frame.source.trace(), "trace.json", "application/json")
        except AtollError as error:
            ui.notify(str(error), type="negative", multi_line=True)
