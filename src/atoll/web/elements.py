"""What the pages are made of: tables that follow the cluster, and questions that must be answered with yes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nicegui import ui

from atoll.errors import AtollError

CSS = """
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


@dataclass(frozen=True)
class Column:
    """`field` of the row, under this heading; numbers to the right."""

    field: str
    heading: str
    right: bool = False


class LiveTable:
    """A table whose rows are dataclasses; the browser hears of it only where they have changed.

    With an `act`, each row for which `may(row)` is true has a button with that word, which calls `act(row)`.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
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
            heading(title)
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
        """With `also_none` False, there is no table where there are no rows."""
        self.all.set_visibility(also_none or bool(rows))
        found = [{**asdict(row), "may": self._may(row)} for row in rows]
        if found != self._rows:
            self._rows = found
            self.table.props["hide-pagination"] = len(found) <= self.table.props["pagination"]["rowsPerPage"]
            self.table.rows = list(found)


def heading(text: str) -> None:
    with ui.element("h2").classes("title"):
        ui.label(text)


async def confirmed(question: str, word: str) -> bool:
    """Whether a person says yes."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button(word, on_click=lambda: dialog.submit(True)).props("no-caps color=negative")
    answer = bool(await dialog)
    dialog.delete()
    return answer


async def operate(what: str, operation: Awaitable[str]) -> None:
    """Awaits an operation, and shows what became of it."""
    notification = ui.notification(f"{what} ...", spinner=True, timeout=None)
    try:
        text, kind = await operation, "positive"
    except AtollError as error:
        text, kind = str(error), "negative"
    notification.dismiss()
    ui.notify(text, type=kind, multi_line=True, timeout=8000, close_button="Close")
