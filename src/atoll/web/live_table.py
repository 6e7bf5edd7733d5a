"""A table of the page whose rows change while a browser shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nicegui import ui


@dataclass(frozen=True)
class Column:
    """A column that shows `field` of each row; `right` aligns numbers to the right.

    A column with `is_text` has sentences, which may take several lines. `bar` is a field with a fraction, which a bar
    below the text shows.
    """

    field: str
    heading: str
    right: bool = False
    is_text: bool = False
    bar: str = ""


_BAR_CELL = (
    '<q-td :props="props">{{ props.value }}'
    '<div v-if="FRACTION" class="bar"><i :style="{width: 100 * FRACTION + \'%\'}"/></div></q-td>'
)


class LiveTable:
    """A table whose rows are dataclasses. The browser receives an update only if rows have changed.

    If `act` is given, each row for which `may(row)` is true has a button with the label `word` that calls `act(row)`.
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
                "classes": "text" if each.is_text else "",
            }
            for each in columns
        ]
        if act is not None:
            acts: dict[str, bool | str] = {
                "name": "act",
                "label": "",
                "field": "may",
                "align": "right",
                "sortable": False,
                "classes": "act",
            }
            listed.append(acts | {"headerClasses": "act"})
        self.all = ui.element("div").classes("full")
        with self.all:
            heading(title)
            self.table = ui.table(rows=[], columns=listed, row_key=key, pagination=most).classes("full")
        self.table.props(f'dense flat bordered hide-pagination data-table="{title}"')
        self.table.add_slot("no-data", "none")
        for each in columns:
            if each.bar:
                self.table.add_slot(f"body-cell-{each.field}", _BAR_CELL.replace("FRACTION", f"props.row.{each.bar}"))
        if act is not None:
            self.table.add_slot(
                "body-cell-act",
                '<q-td :props="props"><q-btn v-if="props.row.may" flat dense no-caps no-wrap color="primary" '
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


def heading(text: str) -> None:
    with ui.element("h2").classes("title"):
        ui.label(text)
