"""The frame of each page: links to the other pages, the headline and problems."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nicegui import ui

from atoll.telemetry import tables as t
from atoll.web.poller import Poller

_SECONDS = 1.0
_LINE_HELP = (
    "gangs/s: computations and transfers that started. late: the longest time in the last second that the controller's "
    "event loop was late for a timer, because it was busy."
)
PAGES = (
    ("/", "Cluster"),
    ("/sessions", "Sessions"),
    ("/usage", "Usage"),
    ("/timeline", "Time line"),
    ("/events", "Events"),
    ("/log", "Log"),
)


class PageFrame:
    """Builds the part that all pages have, and has the data that they show."""

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.watch = poller.watch
        self.source = poller.source

    @property
    def is_operator(self) -> bool:
        """Whether the command that serves the pages has the role of an operator."""
        return self.watch.updates > 0 and self.watch.snapshot.viewer.role == "operator"

    async def build(self, path: str, show: Callable[[], Awaitable[None] | None], *, with_spans: bool = False) -> None:
        """Build the header that all pages have, and call `show` once a second."""

        async def update() -> None:
            await self.poller.refresh()
            if with_spans:
                await self.poller.refresh_time_line()
            line.set_text(t.headline(self.watch))
            problem.set_text(self.watch.problem)
            shown = show()
            if shown is not None:
                await shown

        with ui.element("div").classes("head"):
            ui.label(f"Atoll: {self.source.name}").style("font-weight: 700; font-size: 1.2rem")
            for target, name in PAGES:
                ui.link(name, target).classes("here" if target == path else "")
        line = ui.label().classes("line").props(f'data-line="headline" title="{_LINE_HELP}"')
        problem = ui.label().classes("problem").props('data-line="problem"')
        ui.timer(_SECONDS, update)


def filter_input(fields: str, show: Callable[[], Awaitable[None] | None]) -> ui.input:
    """Return an input for a text; `show` is called when it changes."""
    found = ui.input(placeholder=f"Filter: {fields}", on_change=show)
    return found.props("dense outlined clearable data-filter debounce=200").style("width: min(100%, 24em)")
