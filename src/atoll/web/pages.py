"""The pages that show a cluster: overview, sessions, usage, time line and events.

A page reads the poller once a second while a browser shows it. Its operations are for operators, ask for confirmation,
and are authorized by the controller.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nicegui import ui

from atoll.cluster.usage.usage_records import By
from atoll.errors import AtollError
from atoll.quantities import exact_bytes, human_bytes, human_seconds
from atoll.telemetry import tables as t
from atoll.telemetry.timeline import WINDOW_SECONDS, Row
from atoll.telemetry.usage_tables import usage_notes, usage_rows
from atoll.telemetry.watch import Watch
from atoll.web.drawing import MOST_ROWS, legend_html, sparkline_svg, tile_html, time_line_svg
from atoll.web.live_table import Act, Column, LiveTable, heading
from atoll.web.poller import Poller
from atoll.web.tenant_values import TenantValues

_CSS = """
.nicegui-content { padding: 0 16px 16px; gap: 8px; }
.nicegui-content > * { max-width: 100%; } .nicegui-content .full { width: 100%; }
.q-table th { font-weight: 600; }
.q-table td { white-space: normal; max-width: 36em; overflow-wrap: break-word; }
.q-table td.text { overflow-wrap: anywhere; } .q-table td.text:not(:empty) { min-width: 14em; }
.q-btn { white-space: nowrap; }
.bar { height: 4px; margin-top: 2px; background: #8883; } .bar i { display: block; height: 4px; background: #0072b2; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile { flex: 1 1 220px; max-width: 420px; border: 1px solid #8884; border-radius: 4px; padding: 6px 10px; }
.tile b { font-size: 1.2rem; } .tile small { opacity: 0.8; }
.sparkline { display: block; width: 100%; height: 40px; }
.sparkline .grid { stroke: #8886; } .sparkline .area { fill: #0072b2; }
.scroll { overflow-x: auto; }
@media (max-width: 600px) {
  .nicegui-content { padding: 0 8px 8px; }
  .head { gap: 6px 16px; } .head > :first-child { flex-basis: 100%; }
  .time-line { min-width: 900px; }
  .q-table td { white-space: nowrap; } .q-table td.text { white-space: normal; }
  .q-table :is(th, td):is(:first-child, .act) { position: sticky; left: 0; right: 0; z-index: 1; background: #fff; }
  .body--dark .q-table :is(th, td):is(:first-child, .act) { background: #1d1d1d; }
}
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
_HOUR, _DAY = 3600.0, 86_400.0
_LINE_HELP = (
    "gangs/s: computations and transfers that started. late: the longest time in the last second that the controller's "
    "event loop was late for a timer, because it was busy."
)
_PAGES = (
    ("/", "Cluster"),
    ("/sessions", "Sessions"),
    ("/usage", "Usage"),
    ("/timeline", "Time line"),
    ("/events", "Events"),
)
_ZOOMS = {"10 s": WINDOW_SECONDS, "5 s": 5.0, "2 s": 2.0, "1 s": 1.0, "0.5 s": 0.5, "0.1 s": 0.1}  # in seconds
_SPANS = {"last hour": _HOUR, "last day": _DAY, "last week": 7 * _DAY, "last 30 days": 30 * _DAY, "all": 0.0}
# The columns of the tables of usage: those that identify a row, and the amounts.
_USERS: dict[By, list[Column]] = {
    By.TENANT: [Column("tenant", "tenant")],
    By.SESSION: [
        Column("tenant", "tenant"),
        Column("run", "cluster started"),
        Column("session", "session", True),
        Column("label", "script"),
    ],
    By.PROGRAM: [
        Column("tenant", "tenant"),
        Column("program", "program"),
        Column("expected", "expected per launch", True),
    ],
}
_AMOUNTS = [
    Column("device_seconds", "device seconds", True),
    Column("share", "share", True),
    Column("memory", "memory x seconds", True),
    Column("moved", "moved", True),
    Column("compiling", "compiling", True),
]


@dataclass(frozen=True)
class _ShownEvent:
    number: int
    time: str
    kind: str
    where: str
    tenant: str
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
            ("/usage", self._usage_page),
            ("/timeline", self._time_line_page),
            ("/events", self._events_page),
        ):
            ui.page(path)(_free(page))

    async def _layout(self, path: str, show: Callable[[], Awaitable[None] | None], *, with_spans: bool = False) -> None:
        """Build the header that all pages have, and call `show` once a second."""

        async def update() -> None:
            await self._poller.refresh()
            if with_spans:
                await self._poller.refresh_time_line()
            line.set_text(t.headline(self._watch))
            problem.set_text(self._watch.problem)
            shown = show()
            if shown is not None:
                await shown

        with ui.element("div").classes("head"):
            ui.label(f"Atoll: {self._source.name}").style("font-weight: 700; font-size: 1.2rem")
            for target, name in _PAGES:
                ui.link(name, target).classes("here" if target == path else "")
        line = ui.label().classes("line").props(f'data-line="headline" title="{_LINE_HELP}"')
        problem = ui.label().classes("problem").props('data-line="problem"')
        ui.timer(_SECONDS, update)

    @property
    def _is_operator(self) -> bool:
        return self._watch.snapshot.viewer.role == "operator"

    # ---- Cluster

    async def _cluster_page(self) -> None:
        def show() -> None:
            found = self._watch.snapshot
            load.set_content(_load_html(self._watch))
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
        # `tile_html` and `sparkline_svg` escape their texts.
        load = ui.html(sanitize=False).classes("full")
        islands = LiveTable(
            "Islands",
            [
                Column("id", "island", True),
                Column("state", "state"),
                Column("hosts", "hosts"),
                Column("devices", "devices", True),
                Column("kind", "kind"),
                Column("memory", "memory (fullest device)", True, bar="full"),
                Column("running", "in flight", True),
                Column("waiting", "waiting", True),
                Column("started", "gangs started", True),
                Column("restarts", "restarts", True),
                Column("note", "note", is_text=True),
            ],
            "id",
            [Act("Drain", self._drain, lambda row: self._is_operator and row.state == "ready")],
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
                Column("memory", "memory", True, bar="full"),
                Column("limits", "limits", is_text=True),
                Column("running", "gangs in flight", True),
                Column("waiting", "waiting", True),
                Column("waited", "waited (median / 99 %)", True),
                Column("device_seconds", "device-seconds", True),
            ],
            "name",
            [Act("Change", self._change_tenant, lambda row: self._is_operator)],
        )
        devices = LiveTable(
            "Devices",
            [
                Column("id", "device", True),
                Column("island", "island", True),
                Column("host", "host"),
                Column("state", "state"),
                Column("kind", "kind"),
                Column("memory", "memory", True, bar="full"),
                Column("peak", "peak", True),
                Column("busy_text", "busy (5 s)", True, bar="busy"),
            ],
            "id",
        )
        transfers = LiveTable(
            "Transfers",
            [Column("kind", "kind"), Column("count", "transfers", True), Column("moved", "bytes", True)],
            "kind",
        )
        versions = LiveTable(
            "Published arrays",
            [
                Column("name", "name"),
                Column("version", "version", True),
                Column("state", "state"),
                Column("arrays", "arrays", True),
                Column("memory", "memory", True),
                Column("islands", "islands"),
                Column("readers", "readers", True),
                Column("age", "age (s)", True),
            ],
            "key",
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
        question = f"Drain island {island}? Its work and arrays move to other islands, and its workers exit."
        if await _confirmed(question, "Drain"):
            await _operate(f"draining island {island}", self._source.drain(island))

    async def _add_island(self) -> None:
        shapes = {str(island.shape) for island in self._watch.snapshot.islands}
        like = -1 if len(shapes) == 1 else self._watch.snapshot.islands[0].id
        which = "the others" if like < 0 else f"island {like}"
        if await _confirmed(f"Add an island like {which}?", "Add"):
            await _operate("starting an island", self._source.add_island(like))

    async def _change_tenant(self, row: dict[str, Any]) -> None:
        name = str(row["name"])
        before = TenantValues(row["share"], row["priority"], row["memory_limit"])
        with ui.dialog() as dialog, ui.card():
            ui.label(f"The share of {name} is {before.share:g}. New values apply at once to work that has not begun.")
            share = ui.number("share of device time", value=before.share, min=0, step=1)
            priority = ui.number("priority: its work goes before all work of lower ones", value=before.priority)
            memory = ui.input("memory per device, such as 8GiB; 0B for no limit", value=exact_bytes(before.memory))
            problem = ui.label().classes("problem")

            def submit() -> None:
                try:
                    dialog.submit(TenantValues.parse(share.value, priority.value, memory.value))
                except ValueError as error:
                    problem.set_text(str(error))

            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Set", on_click=submit).props("no-caps color=negative")
        after = await dialog
        _delete(dialog)
        if after is not None and after != before:
            await _operate(f"changing {name}", self._source.set_tenant(before.change(name, after)))

    # ---- Sessions

    async def _sessions_page(self) -> None:
        def show() -> None:
            sessions.show(t.matching(t.session_rows(self._watch.snapshot), wanted.value or ""))
            waits.show(t.matching(t.wait_rows(self._watch.snapshot), wanted.value or ""))

        await self._layout("/sessions", show)
        wanted = _filter("tenant, program or session", show)
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
                Column("devices", "slices", is_text=True),
                Column("waits_for", "waits for", is_text=True),
                Column("last_error", "last error", is_text=True),
            ],
            "id",
            [
                Act("Suspend", self._suspend, lambda row: row.state == "runs"),
                Act("Resume", self._resume, lambda row: row.state.startswith("suspended")),
                Act("End", self._end_session),
            ],
        )
        waits = LiveTable(
            "Waiting gangs",
            [
                Column("session", "session", True),
                Column("client", "program"),
                Column("tenant", "tenant"),
                Column("program", "first in line"),
                Column("island", "island", True),
                Column("gangs", "gangs", True),
                Column("seconds", "for (s)", True),
                Column("reason", "reason"),
                Column("text", "waits for", is_text=True),
            ],
            "key",
        )

    async def _suspend(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"Suspend session {session} ({row['program']})? Its arrays leave the devices, and its program waits."
        to = await _chosen(question, "To memory", "To disk")
        if to:
            await _operate(f"suspending session {session}", self._source.suspend(session, to == "To disk"))

    async def _resume(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        if await _confirmed(f"Resume session {session} ({row['program']}) on its devices?", "Resume"):
            await _operate(f"resuming session {session}", self._source.resume(session))

    async def _end_session(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"End session {session} ({row['program']})? Its program gets an error, and its arrays are deleted."
        if await _confirmed(question, "End the session"):
            await _operate(f"ending session {session}", self._source.end_session(session))

    # ---- Usage

    async def _usage_page(self) -> None:
        async def show() -> None:
            wanted = by.value, span.value
            found = await self._poller.usage(By(by.value), _SPANS[span.value])
            if found is None or wanted != (by.value, span.value):
                return
            for each, table in tables.items():
                table.all.set_visibility(each == by.value)
            tables[by.value].show(usage_rows(found))
            notes.set_text("; ".join(usage_notes(found)))

        await self._layout("/usage", show)
        with ui.row():
            by = ui.toggle([str(each) for each in By], value=str(By.TENANT), on_change=show).props("no-caps data-by")
            span = ui.select(list(_SPANS), value="last day", on_change=show).props("dense outlined data-span")
        tables = {
            str(each): LiveTable(f"Usage by {each}", [*names, *_AMOUNTS], "key") for each, names in _USERS.items()
        }
        notes = ui.label().classes("line").props('data-line="usage"')

    # ---- Time line

    async def _time_line_page(self) -> None:
        def name_of(row: Row) -> str:
            return f"island {row.island} host {row.host}:{row.ordinal}"

        kept: tuple[float, list[Row]] | None = None  # since "Pause"

        def show() -> None:
            nonlocal kept
            now, line = time.monotonic(), self._watch.time_line
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
                each.id: f"session {each.id} ({each.label or each.pid})" for each in self._watch.snapshot.sessions
            }
            names = {session: labels.get(session, f"session {session} (ended)") for session in seen}
            picture.set_content(time_line_svg(rows, names, name_of, at, window, ago))
            legend.set_content(legend_html(names))
            if len(rows) > MOST_ROWS:
                more.set_text(f"{len(rows) - MOST_ROWS} more devices are not shown")

        await self._layout("/timeline", show, with_spans=True)
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
            ui.download.content(await self._source.trace(), "trace.json", "application/json")
        except AtollError as error:
            ui.notify(str(error), type="negative", multi_line=True)

    # ---- Events

    async def _events_page(self) -> None:
        def show() -> None:
            rows = t.event_rows(self._watch, time.monotonic(), time.time())
            events.show(t.matching([_shown(row) for row in rows], wanted.value or ""))

        await self._layout("/events", show)
        wanted = _filter("tenant, session, kind or text", show)
        events = LiveTable(
            "Events",
            [
                Column("number", "event", True),
                Column("time", "when"),
                Column("kind", "what"),
                Column("where", "where"),
                Column("tenant", "tenant"),
                Column("text", "details", is_text=True),
            ],
            "number",
            most=100,
        )


def _load_html(watch: Watch) -> str:
    """Return tiles for the load of the cluster since somebody views it."""
    last, samples = watch.samples.last, list(watch.samples)
    if last is None:
        return ""
    whose = "" if watch.snapshot.viewer.role == "operator" else "own work, "
    span = f"last {human_seconds(round(watch.samples.seconds))}"
    waiting = max(sample.waiting for sample in samples)
    busy = sparkline_svg(samples, lambda sample: sample.busy, 1.0, f"busy, {whose}{span}")
    memory = sparkline_svg(samples, lambda sample: sample.memory, 1.0, f"memory, {span}")
    gangs = sparkline_svg(samples, lambda sample: sample.waiting, max(waiting, 1), f"waiting, {span}")
    limit = f" of {human_bytes(last.memory_bytes)}" if last.memory_bytes else ""
    return (
        '<div class="tiles">'
        + tile_html("busy", t.percent(last.busy), f"{whose}{span}", busy)
        + tile_html("memory", f"{human_bytes(last.used_bytes)}{limit}", span, memory)
        + tile_html("waiting gangs", str(last.waiting), f"highest {waiting}, {span}", gangs)
        + "</div>"
    )


def _filter(fields: str, show: Callable[[], None]) -> ui.input:
    """Return an input for a text; `show` is called when it changes."""
    found = ui.input(placeholder=f"Filter: {fields}", on_change=show)
    return found.props("dense outlined clearable data-filter debounce=200").style("width: min(100%, 24em)")


def _shown(row: t.EventRow) -> _ShownEvent:
    # Rounded to seconds, so that an event keeps the same row between updates.
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(round(row.wall)))
    return _ShownEvent(row.number, when, row.kind, row.where, row.tenant, row.text)


def _free(page: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Wrap a method in a function, because NiceGUI does not accept methods."""

    async def free() -> None:
        await page()

    return free


async def _confirmed(question: str, word: str) -> bool:
    """Ask a question in a dialog, and return whether the person confirms."""
    return bool(await _chosen(question, word))


async def _chosen(question: str, *words: str) -> str:
    """Ask a question in a dialog, and return the word that the person chooses, "" for none."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Cancel", on_click=lambda: dialog.submit("")).props("flat no-caps")
            for word in words:
                ui.button(word, on_click=partial(dialog.submit, word)).props("no-caps color=negative")
    answer = str(await dialog or "")
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
