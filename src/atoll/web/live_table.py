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


@dataclass(frozen=True)
class Act:
    """A button with the label `word`, in each row for which `may(row)` is true. It calls `call` with the row."""

    word: str
    call: Callable[[dict[str, Any]], Awaitable[None]]
    may: Callable[[Any], bool] = lambda row: True


_BAR_CELL = (
    '<q-td :props="props">{{ props.value }}'
    '<div v-if="FRACTION" class="bar"><i :style="{width: 100 * FRACTION + \'%\'}"/></div></q-td>'
)


class LiveTable:
    """A table whose rows are dataclasses. The browser receives an update only if rows have changed."""

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        key: str,
        acts: Sequence[Act] = (),
        limit: int = 50,
    ) -> None:
        self._rows: list[dict[str, Any]] = []
        self._acts = acts
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
        if acts:
            buttons: dict[str, bool | str] = {
                "name": "act",
                "label": "",
                "field": "may",
                "align": "right",
                "sortable": False,
                "classes": "act",
            }
            listed.append(buttons | {"headerClasses": "act"})
        self.all = ui.element("div").classes("full")
        with self.all:
            heading(title)
            self.table = ui.table(rows=[], columns=listed, row_key=key, pagination=limit).classes("full")
        self.table.props(f'dense flat bordered hide-pagination data-table="{title}"')
        self.table.add_slot("no-data", "none")
        for each in columns:
            if each.bar:
                self.table.add_slot(f"body-cell-{each.field}", _BAR_CELL.replace("FRACTION", f"props.row.{each.bar}"))
        if acts:
            drawn = "".join(
                f'<q-btn v-if="props.row.may[{number}]" flat dense no-caps no-wrap color="primary" label="{act.word}" '
                f"@click=\"() => $parent.$emit('act-{number}', props.row)\"/>"
                for number, act in enumerate(acts)
            )
            self.table.add_slot("body-cell-act", f'<q-td :props="props">{drawn}</q-td>')
        for number, act in enumerate(acts):
            self.table.on(f"act-{number}", lambda event, act=act: act.call(event.args))

    def show(self, rows: Sequence[Any], *, also_none: bool = True) -> None:
        """Update the rows. If `also_none` is false, hide the table while it has no rows."""
        self.all.set_visibility(also_none or bool(rows))
        found = [{**asdict(row), "may": [act.may(row) for act in self._acts]} for row in rows]
        if found != self._rows:
            self._rows = found
            self.table.props["hide-pagination"] = len(found) <= self.table.props["pagination"]["rowsPerPage"]
            self.table.rows = list(found)


def heading(text: str) -> None:
    with ui.element("h2").classes("title"):
        ui.label(text)
