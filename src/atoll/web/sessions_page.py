"""The page Sessions: the sessions and the gangs that wait."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from atoll.cluster.migration_target import read_migration_target
from atoll.protocol import messages as m
from atoll.telemetry import tables as t
from atoll.web.dialogs import chosen, confirmed, delete, operate
from atoll.web.live_table import Act, Column, LiveTable
from atoll.web.page_frame import PageFrame, filter_input

_RESUME_SECONDS = 600.0  # for a resumption to wait for memory and devices
# The columns of the tables.
_SESSIONS = (
    Column("id", "session", right=True),
    Column("program", "program"),
    Column("state", "state"),
    Column("tenant", "tenant"),
    Column("pid", "pid", right=True),
    Column("machine", "machine"),
    Column("arrays", "arrays", right=True),
    Column("memory", "memory", right=True),
    Column("functions", "functions", right=True),
    Column("launches", "launches", right=True),
    Column("in_flight", "in flight", right=True),
    Column("devices", "slices", is_text=True),
    Column("waits_for", "waits for", is_text=True),
    Column("last_error", "last error", is_text=True),
)
_SLICES = (
    Column("session", "session", right=True),
    Column("program", "program"),
    Column("tenant", "tenant"),
    Column("slice", "slice", right=True),
    Column("shape", "shape"),
    Column("island", "island", right=True),
    Column("devices", "devices", is_text=True),
)
_WAITS = (
    Column("session", "session", right=True),
    Column("client", "program"),
    Column("tenant", "tenant"),
    Column("program", "first in line"),
    Column("island", "island", right=True),
    Column("gangs", "gangs", right=True),
    Column("seconds", "for (s)", right=True),
    Column("reason", "reason"),
    Column("text", "waits for", is_text=True),
)


class SessionsPage:
    """Shows sessions, and suspends, resumes and ends them."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        def show() -> None:
            sessions.show(t.matching(t.session_rows(self._frame.watch.snapshot), wanted.value or ""))
            slices.show(t.matching(t.slice_rows(self._frame.watch.snapshot), wanted.value or ""), also_none=False)
            waits.show(t.matching(t.wait_rows(self._frame.watch.snapshot), wanted.value or ""))

        await self._frame.build("/sessions", show)
        wanted = filter_input("tenant, program or session", show)
        sessions = LiveTable(
            "Sessions",
            _SESSIONS,
            "id",
            [
                Act("Suspend", self._suspend, lambda row: row.state == "runs"),
                Act("Resume", self._resume, lambda row: row.state.startswith("suspended")),
                Act("End", self._end_session),
            ],
        )
        slices = LiveTable(
            "Slices",
            _SLICES,
            "key",
            [Act("Move", self._move)],
        )
        waits = LiveTable("Waiting gangs", _WAITS, "key")

    async def _suspend(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"Suspend session {session} ({row['program']})? Its arrays leave the devices, and its program waits."
        to = await chosen(question, "To memory", "To disk")
        if to:
            request = m.SuspendRequest(session, to == "To disk")
            await operate(f"suspending session {session}", self._frame.source.operate(request))

    async def _resume(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        if await confirmed(f"Resume session {session} ({row['program']}) on its devices?", "Resume"):
            request = m.ResumeRequest(session, (), _RESUME_SECONDS)
            await operate(f"resuming session {session}", self._frame.source.operate(request))

    async def _move(self, row: dict[str, Any]) -> None:
        session, number = int(row["session"]), int(row["slice"])
        with ui.dialog() as dialog, ui.card():
            ui.label(
                f"Move slice {number} of session {session} ({row['program']}), which is on island {row['island']}? Its "
                "arrays are copied, its functions are recompiled, and the program pauses meanwhile."
            )
            to = ui.input("island, such as 1, or with its devices 1:4-7").props("data-target")
            problem = ui.label().classes("problem")

            def submit() -> None:
                try:
                    dialog.submit(read_migration_target(to.value or ""))
                except ValueError as error:
                    problem.set_text(str(error))

            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Move the slice", on_click=submit).props("no-caps color=negative")
        target = await dialog
        delete(dialog)
        if target is not None:
            request = m.RemapRequest(session, number, *target)
            await operate(f"moving slice {number}", self._frame.source.operate(request))

    async def _end_session(self, row: dict[str, Any]) -> None:
        session = int(row["id"])
        question = f"End session {session} ({row['program']})? Its program gets an error, and its arrays are deleted."
        if await confirmed(question, "End the session"):
            await operate(f"ending session {session}", self._frame.source.operate(m.EndSessionRequest(session)))
