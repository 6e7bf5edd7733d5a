"""Tables of the commands for people, such as those of `atoll status`."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

_WIDE, _NARROW = (0, 2, 0, 0), (0, 1, 0, 0)
_UNBOUNDED = 10_000


class TextTable(Table):
    """A table without lines, with headings in capitals, as of `kubectl` and `docker`.

    If it is wider than the terminal, its columns are closer together, and texts take several lines. Words and numbers
    are always shown in full.
    """

    def __init__(self, title: str, *columns: Column) -> None:
        for each in columns:
            each.header = str(each.header).upper()
        lines = max(str(each.header).count("\n") for each in columns)
        for each in columns:  # headings end on the same line
            each.header = "\n" * (lines - str(each.header).count("\n")) + str(each.header)
        super().__init__(
            *columns,
            title=title,
            title_justify="left",
            title_style="bold",
            header_style="",
            box=None,
            pad_edge=False,
            padding=_WIDE,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = self.__rich_measure__(console, options.update(max_width=_UNBOUNDED)).maximum
        self.padding = _WIDE if wanted <= options.max_width else _NARROW
        yield from super().__rich_console__(console, options)


def word_column(heading: str) -> Column:
    """Return a column of names or states."""
    return Column(heading, no_wrap=True)


def number_column(heading: str) -> Column:
    """Return a column of numbers, whose heading may have several lines."""
    return Column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)


def text_column(heading: str) -> Column:
    """Return a column whose values may take several lines."""
    return Column(heading, min_width=_width_of(heading), overflow="fold")


def amount_column(heading: str) -> Column:
    """Return a column of numbers with units, which may take several lines, as the heading may."""
    heading = heading.replace(" ", "\n", 1)
    return Column(heading, justify="right", min_width=_width_of(heading), overflow="fold")


def _width_of(heading: str) -> int:
    return max(map(len, heading.split()), default=1)
