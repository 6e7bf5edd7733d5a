"""The pages that show a cluster: overview, sessions, time line and events.

A page reads the poller once a second while a browser shows it. Its operations are for operators, ask for confirmation,
and are authorized by the controller.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nicegui import ui

from atoll.errors import AtollError
from atoll.telemetry import tables as t
from atoll.telemetry.timeline import Row
from atoll.web.drawing import MOST_ROWS, legend_html, time_line_svg
from atoll.web.poller import Poller

_CSS = """
.nicegui-content { padding: 0 16px 16px; gap: 8px; }
.q-table th { font-weight: 600; }
.q-table td { white-space: normal; max-width: 36em; overflow-wrap: anywhere; }
.head { width: 100%; display: flex; gap: 20px; align-items: baseline; padding: 8px 0; flex-wrap: wrap; }
.head a { color: inherit; text-decoration: none; } .head a.here { border-bottom: 2px solid currentColor; }
.line { opacity: 0.8; } .problem { color: #b00020; font-weight: 600; }
h2.title { font-size: 1.1rem; font-weight: 600; margin: 12px 0 0; line-height: 1.6; }
.time-line { font: 11px sans-serif; max-width: 1400px; display: block; }
.time-line text { fill: currentColor; } .time-line .grid { stroke: #8884; fill: none; }
.legend { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
"""
_SECONDS = 1.0
_PAGES = (("/", "Cluster"), ("/sessions", "Sessions"), ("/timeline", "Time line"), ("/events", "Events"))


@dataclass(frozen=True)
class _ShownEvent:
    number: int
    time: str
    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class _Machine:
    name: str
    address: str
    group: str
    state: str


class Pages:
    """The pages of one process. Register them once, before the server starts."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._watch = poller.watch
        self._source = poller.source

    def register(self) -> None:
        ui.add_css(_CSS, shared=True)
        for path, page in (
            ("/", self._cluster_page),
            ("/sessions", self._sessions_page),
            ("/timeline", self._time_line_page),
            ("/events", self._events_page),
        ):
            ui.page(path)(_free(page))

    async def _layout(self, path: str, show: Callable[[], None], *, with_spans: bool = False) -> None:
        """Build the header that all pages have, and call `show` once a second."""

        async def update() -> None:
            await self._poller.refresh()
            if with_spans:
                await self._poller.refresh_time_line()
            line.set_text(t.headline(self._watch))
            problem.set_text(self._watch.problem)
            show()

        with ui.element("div").classes("head"):
            ui.label(f"Atoll: {self._source.name}").style("font-weight: 700; font-size: 1.2rem")
            for target, name in _PAGES:
                ui.link(name, target).classes("here" if target == path else "")
        line = ui.label().classes("line").props('data-line="headline"')
        problem = ui.label().classes("problem").props('data-line="problem"')
        ui.timer(_SECONDS, update)

    @property
    def _is_operator(self) -> bool:
        return self._watch.snapshot.viewer.role == "operator"

    # ---- Cluster

    async def _cluster_page(self) -> None:
        def show() -> None:
            found = self._watch.snapshot
            islands.show(t.island_rows(found))
            tenants.show(t.tenant_rows(self._watch))
            devices.show(t.device_rows(self._watch, time.monotonic()))
            transfers.show(t.transfer_rows(found))
            versions.show(t.version_rows(found), also_none=False)
            machines.show(
                [_Machine(each.name, each.address, each.group, each.state) for each in found.machines], also_none=False
            )
            add.set_visibility(self._is_operator)

        await self._layout("/", show, with_spans=True)
        islands = _LiveTable(
            "Islands",
            [
                _Column("id", "island", True),
                _Column("state", "state"),
                _Column("hosts", "hosts"),
                _Column("devices", "devices", True),
                _Column("kind", "kind"),
                _Column("memory", "memory (fullest device)", True),
                _Column("running", "in flight", True),
                _Column("waiting", "waiting", True),
                _Column("started", "gangs started", True),
                _Column("restarts", "restarts", True),
                _Column("note", ""),
            ],
            "id",
            "Drain",
            self._drain,
            lambda row: self._is_operator and row.state == "ready",
        )
        add = ui.button("Add an island", on_click=self._add_island).props('flat no-caps data-action="add-island"')
        tenants = _LiveTable(
            "Tenants",
            [
                _Column("name", "tenant"),
                _Column("role", "role"),
                _Column("priority", "priority", True),
                _Column("share", "share set", True),
                _Column("got_text", "share got", True),
                _Column("sessions", "sessions", True),
                _Column("memory", "memory", True),
                _Column("running", "gangs in flight", True),
                _Column("waiting", "waiting", True),
                _Column("waited", "waited (median / 99 %)", True),
                _Column("device_seconds", "device-seconds", True),
            ],
            "name",
            "Set share",
            self._set_share,
            lambda row: self._is_operator,
        )
        devices = _LiveTable(
            "Devices",
            [
                _Column("id", "device", True),
                _Column("island", "island", True),
                _Column("host", "host"),
                _Column("state", "state"),
                _Column("kind", "kind"),
                _Column("memory", "memory", True),
                _Column("peak", "peak", True),
                _Column("busy_text", "busy (5 s)", True),
            ],
            "id",
        )
        transfers = _LiveTable(
            "Transfers",
            [_Column("kind", "kind"), _Column("count", "transfers", True), _Column("moved", "bytes", True)],
            "kind",
        )
        versions = _LiveTable(
            "Published arrays",
            [
                _Column("name", "name"),
                _Column("version", "version", True),
                _Column("state", "state"),
                _Column("arrays", "arrays", True),
                _Column("memory", "memory", True),
                _Column("islands", "islands"),
                _Column("readers", "readers", True),
                _Column("age", "age (s)", True),
            ],
            "key",
        )
        machines = _LiveTable(
            "Machines",
            [
                _Column("name", "machine"),
                _Column("address", "address"),
                _Column("group", "group"),
                _Column("state", "does"),
            ],
            "name",
        )

    async def _drain(self, row: dict[str, Any]) -> None:
        island = int(row["id"])
        question = f"Drain island {island}? Its work and arrays move to other islands, and its workers exit."
        if await _confirmed(question, "Drain"):
            await _operate(f"draining island {island}", self._source.drain(island))

    async def _add_island(self) -> None:
        shapes = {str(island.shape) for island in self._watch.snapshot.islands}
        like = -1 if len(shapes) == 1 else self._watch.snapshot.islands[0].id
        which = "the others" if like < 0 else f"island {like}"
        if await _confirmed(f"Add an island like {which}?", "Add"):
            await _operate("starting an island", self._source.add_island(like))

    async def _set_share(self, row: dict[str, Any]) -> None:
        name = str(row["name"])
        with ui.dialog() as dialog, ui.card():
            ui.label(
                f"The share of {name} is {row['share']:g}. A new share applies at once to launches that have not begun."
            )
            number = ui.number(value=row["share"], min=0, step=1)
            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Set", on_click=lambda: dialog.submit(number.value)).props("no-caps color=negative")
        share = await dialog
        _delete(dialog)
        if share is not None:
            await _operate(f"setting the share of {name}", self._source.set_share(name, float(share)))

    # ---- Sessions

    async def _sessions_page(self) -> None:
        def show() -> None:
            sessions.show(t.session_rows(self._watch.snapshot))
            waits.show(t.wait_rows(self._watch.snapshot))

        await self._layout("/sessions", show)
        sessions = _LiveTable(
            "Sessions",
            [
                _Column("id", "session", True),
                _Column("program", "program"),
                _Column("state", "state"),
                _Column("tenant", "tenant"),
                _Column("pid", "pid", True),
                _Column("arrays", "arrays", True),
                _Column("memory", "memory", True),
                _Column("functions", "functions", True),
                _Column("launches", "launches", True),
                _Column("in_flight", "in flight", True),
                _Column("devices", "slices"),
                _Column("waits_for", "waits for"),
            ],
            "id",
            "End",
            self._end_session,
        )
        waits = _LiveTable(
            "Waiting gangs",
            [
                _Column("session", "session", True),
                _Column("program", "first in line"),
                _Column("island", "island", True),
                _Column("gangs", "gangs", True),
                _Column("seconds", "for (s)", True),
                _Column("reason", "reason"),
                _Column("text", "waits for"),
            ],
            "key",
        )

    async def _end_session(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"End session {session} ({row['program']})? Its program gets an error, and its arrays are deleted."
        if await _confirmed(question, "End the session"):
            await _operate(f"ending session {session}", self._source.end_session(session))

    # ---- Time line

    async def _time_line_page(self) -> None:
        def name_of(row: Row) -> str:
            return f"island {row.island} host {row.host}:{row.ordinal}"

        def show() -> None:
            now, line = time.monotonic(), self._watch.time_line
            line.trim(now)
            rows = line.rows()
            seen = {bar.session for row in rows for bar in row.bars}
            labels = {
                each.id: f"session {each.id} ({each.label or each.pid})" for each in self._watch.snapshot.sessions
            }
            names = {session: labels.get(session, f"session {session} (ended)") for session in seen}
            picture.set_content(time_line_svg(rows, names, name_of, now, line.window))
            legend.set_content(legend_html(names))
            if len(rows) > MOST_ROWS:
                more.set_text(f"{len(rows) - MOST_ROWS} more devices are not shown")

        await self._layout("/timeline", show, with_spans=True)
        _heading("Gangs by device")
        # `legend_html` and `time_line_svg` escape names.
        legend = ui.html(sanitize=False)
        picture = ui.html(sanitize=False).classes("w-full").style("width: 100%")
        more = ui.label()

    # ---- Events

    async def _events_page(self) -> None:
        def show() -> None:
            rows = t.event_rows(self._watch, time.monotonic(), time.time())
            events.show([_shown(row) for row in rows])

        await self._layout("/events", show)
        events = _LiveTable(
            "Events",
            [
                _Column("number", "", True),
                _Column("time", "when"),
                _Column("kind", "what"),
                _Column("where", "where"),
                _Column("text", ""),
            ],
            "number",
            most=100,
        )


def _shown(row: t.EventRow) -> _ShownEvent:
    # Rounded to seconds, so that an event keeps the same row between updates.
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(round(row.wall)))
    return _ShownEvent(row.number, when, row.kind, row.where, row.text)


def _free(page: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Wrap a method in a function, because NiceGUI does not accept methods."""

    async def free() -> None:
        await page()

    return free


@dataclass(frozen=True)
class _Column:
    """A column that shows `field` of each row; `right` aligns numbers to the right."""

    field: str
    heading: str
    right: bool = False


class _LiveTable:
    """A table whose rows are dataclasses. The browser receives an update only if rows have changed.

    If `act` is given, each row for which `may(row)` is true has a button with the label `word` that calls `act(row)`.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[_Column],
        key: str,
        word: str = "",
        act: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        may: Callable[[Any], bool] = lambda row: True,
        most: int = 50,
    ) -> None:
        self._rows: list[dict[str, Any]] = []
        self._may = may
        listed = [
            {
                "name": each.field,
                "label": each.heading,
                "field": each.field,
                "align": "right" if each.right else "left",
                "sortable": True,
            }
            for each in columns
        ]
        if act is not None:
            listed.append({"name": "act", "label": "", "field": "may", "align": "right", "sortable": False})
        self.all = ui.element("div").classes("w-full")
        with self.all:
            _heading(title)
            self.table = ui.table(rows=[], columns=listed, row_key=key, pagination=most).classes("w-full")
        self.table.props(f'dense flat bordered hide-pagination data-table="{title}" no-data-label="none"')
        if act is not None:
            self.table.add_slot(
                "body-cell-act",
                '<q-td :props="props"><q-btn v-if="props.row.may" flat dense no-caps color="primary" '
                f'label="{word}" @click="() => $parent.$emit(\'act\', props.row)"/></q-td>',
            )
            self.table.on("act", lambda event: act(event.args))

    def show(self, rows: Sequence[Any], *, also_none: bool = True) -> None:
        """Update the rows. If `also_none` is false, hide the table while it has no rows."""
        self.all.set_visibility(also_none or bool(rows))
        found = [{**asdict(row), "may": self._may(row)} for row in rows]
        if found != self._rows:
            self._rows = found
            self.table.props["hide-pagination"] = len(found) <= self.table.props["pagination"]["rowsPerPage"]
            self.table.rows = list(found)


def _heading(text: str) -> None:
    with ui.element("h2").classes("title"):
        ui.label(text)


async def _confirmed(question: str, word: str) -> bool:
    """Ask a question in a dialog, and return whether the person confirms."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button(word, on_click=lambda: dialog.submit(True)).props("no-caps color=negative")
    answer = bool(await dialog)
    _delete(dialog)
    return answer


async def _operate(what: str, operation: Awaitable[str]) -> None:
    """Await an operation, and show its result or its error."""
    notification = ui.notification(f"{what} ...", spinner=True, timeout=None)
    try:
        text, kind = await operation, "positive"
    except AtollError as error:
        text, kind = str(error), "negative"
    notification.dismiss()
    ui.notify(text, type=kind, multi_line=True, timeout=8000, close_button="Close")


def _delete(dialog: ui.dialog) -> None:
    """Delete a dialog, unless it was deleted with its page when its browser closed the page."""
    if not dialog.is_deleted:
        dialog.delete()
