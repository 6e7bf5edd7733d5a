"""The pages that show a cluster: what there is, who uses it, what ran when, and what happened.

Each page asks the poller once a second while a browser shows it. What a person may do there is for operators, is asked
for again, and is decided by the controller.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from atoll.telemetry import tables as t
from atoll.telemetry.timeline import Row
from atoll.web.drawing import MOST_ROWS, legend_html, time_line_svg
from atoll.web.elements import CSS, Column, LiveTable, confirmed, heading, operate
from atoll.web.poller import Poller

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
    """To be registered once, before the server starts."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._watch = poller.watch
        self._source = poller.source

    def register(self) -> None:
        ui.add_css(CSS, shared=True)
        for path, page in (
            ("/", self._cluster_page),
            ("/sessions", self._sessions_page),
            ("/timeline", self._time_line_page),
            ("/events", self._events_page),
        ):
            ui.page(path)(_free(page))

    async def _layout(self, path: str, show: Callable[[], None], *, with_spans: bool = False) -> None:
        """What all pages have, above what `show` shows once a second."""

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

    # ---- what there is

    async def _cluster_page(self) -> None:
        def show() -> None:
            found = self._watch.snapshot
            islands.show(t.island_rows(found))
            tenants.show(t.tenant_rows(self._watch))
            devices.show(t.device_rows(self._watch, time.monotonic()))
            transfers.show(t.transfer_rows(found))
            machines.show(
                [_Machine(each.name, each.address, each.group, each.state) for each in found.machines], also_none=False
            )
            add.set_visibility(self._is_operator)

        await self._layout("/", show, with_spans=True)
        islands = LiveTable(
            "Islands",
            [
                Column("id", "island", True),
                Column("state", "state"),
                Column("hosts", "hosts"),
                Column("devices", "devices", True),
                Column("kind", "kind"),
                Column("memory", "memory (fullest device)", True),
                Column("running", "in flight", True),
                Column("waiting", "waiting", True),
                Column("started", "gangs started", True),
                Column("restarts", "restarts", True),
                Column("note", ""),
            ],
            "id",
            "Drain",
            self._drain,
            lambda row: self._is_operator and row.state == "ready",
        )
        add = ui.button("Add an island", on_click=self._add_island).props('flat no-caps data-action="add-island"')
        tenants = LiveTable(
            "Tenants",
            [
                Column("name", "tenant"),
                Column("role", "role"),
                Column("priority", "priority", True),
                Column("share", "share set", True),
                Column("got_text", "share got", True),
                Column("sessions", "sessions", True),
                Column("memory", "memory", True),
                Column("running", "gangs in flight", True),
                Column("waiting", "waiting", True),
                Column("waited", "waited (median / 99 %)", True),
                Column("device_seconds", "device-seconds", True),
            ],
            "name",
            "Set share",
            self._set_share,
            lambda row: self._is_operator,
        )
        devices = LiveTable(
            "Devices",
            [
                Column("id", "device", True),
                Column("island", "island", True),
                Column("host", "host"),
                Column("state", "state"),
                Column("kind", "kind"),
                Column("memory", "memory", True),
                Column("peak", "peak", True),
                Column("busy_text", "busy (5 s)", True),
            ],
            "id",
        )
        transfers = LiveTable(
            "Transfers",
            [Column("kind", "kind"), Column("count", "transfers", True), Column("moved", "bytes", True)],
            "kind",
        )
        machines = LiveTable(
            "Machines",
            [
                Column("name", "machine"),
                Column("address", "address"),
                Column("group", "group"),
                Column("state", "does"),
            ],
            "name",
        )

    async def _drain(self, row: dict[str, Any]) -> None:
        island = int(row["id"])
        question = f"Drain island {island}? All that is on it moves to others, and its workers end."
        if await confirmed(question, "Drain"):
            await operate(f"draining island {island}", self._source.drain(island))

    async def _add_island(self) -> None:
        shapes = {str(island.shape) for island in self._watch.snapshot.islands}
        like = -1 if len(shapes) == 1 else self._watch.snapshot.islands[0].id
        which = "the others" if like < 0 else f"island {like}"
        if await confirmed(f"Add an island like {which}?", "Add"):
            await operate("starting an island", self._source.add_island(like))

    async def _set_share(self, row: dict[str, Any]) -> None:
        name = str(row["name"])
        with ui.dialog() as dialog, ui.card():
            ui.label(f"The share of {name} is {row['share']:g}. What has not begun counts by the new one at once.")
            number = ui.number(value=row["share"], min=0, step=1)
            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Set", on_click=lambda: dialog.submit(number.value)).props("no-caps color=negative")
        share = await dialog
        dialog.delete()
        if share is not None:
            await operate(f"setting the share of {name}", self._source.set_share(name, float(share)))

    # ---- who uses it

    async def _sessions_page(self) -> None:
        def show() -> None:
            sessions.show(t.session_rows(self._watch.snapshot))
            waits.show(t.wait_rows(self._watch.snapshot))

        await self._layout("/sessions", show)
        sessions = LiveTable(
            "Sessions",
            [
                Column("id", "session", True),
                Column("program", "program"),
                Column("state", "state"),
                Column("tenant", "tenant"),
                Column("pid", "pid", True),
                Column("arrays", "arrays", True),
                Column("memory", "memory", True),
                Column("functions", "functions", True),
                Column("launches", "launches", True),
                Column("in_flight", "in flight", True),
                Column("devices", "slices"),
                Column("waits_for", "waits for"),
            ],
            "id",
            "End",
            self._end_session,
        )
        waits = LiveTable(
            "Who waits for what",
            [
                Column("session", "session", True),
                Column("program", "first in line"),
                Column("island", "island", True),
                Column("gangs", "gangs", True),
                Column("seconds", "for (s)", True),
                Column("reason", "reason"),
                Column("text", "waits for"),
            ],
            "key",
        )

    async def _end_session(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"End session {session} ({row['program']})? Its program gets an error, and all that it owns goes."
        if await confirmed(question, "End the session"):
            await operate(f"ending session {session}", self._source.end_session(session))

    # ---- what ran

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
        heading("Gangs by device")
        # Names in it are escaped where it is made.
        legend = ui.html(sanitize=False)
        picture = ui.html(sanitize=False).classes("w-full").style("width: 100%")
        more = ui.label()

    # ---- what happened

    async def _events_page(self) -> None:
        def show() -> None:
            rows = t.event_rows(self._watch, time.monotonic(), time.time())
            events.show([_shown(row) for row in rows])

        await self._layout("/events", show)
        events = LiveTable(
            "Events",
            [
                Column("number", "", True),
                Column("time", "when"),
                Column("kind", "what"),
                Column("where", "where"),
                Column("text", ""),
            ],
            "number",
            most=100,
        )


def _shown(row: t.EventRow) -> _ShownEvent:
    # To the second, so that the same event is the same row at the next look.
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(round(row.wall)))
    return _ShownEvent(row.number, when, row.kind, row.where, row.text)


def _free(page: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """A function for a page: NiceGUI takes no methods."""

    async def free() -> None:
        await page()

    return free
