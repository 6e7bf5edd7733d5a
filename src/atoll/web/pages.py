"""The pages that show a cluster.

A page reads the poller once a second while a browser shows it. Its operations are for operators, ask for confirmation,
and are authorized by the controller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from nicegui import ui

from atoll.web.cluster_page import ClusterPage
from atoll.web.events_page import EventsPage
from atoll.web.log_page import LogPage
from atoll.web.page_frame import PAGES, PageFrame
from atoll.web.page_style import CSS
from atoll.web.poller import Poller
from atoll.web.sessions_page import SessionsPage
from atoll.web.time_line_page import TimeLinePage
from atoll.web.usage_page import UsagePage


class _Page(Protocol):
    async def build(self) -> None: ...


def register_pages(poller: Poller) -> None:
    """Register the pages of this process. Call it once, before the server starts."""
    ui.add_css(CSS, shared=True)
    frame = PageFrame(poller)
    pages: tuple[_Page, ...] = (
        ClusterPage(frame),
        SessionsPage(frame),
        UsagePage(frame),
        TimeLinePage(frame),
        EventsPage(frame),
        LogPage(frame),
    )
    for (path, _), page in zip(PAGES, pages, strict=True):
        ui.page(path)(_free(page.build))


def _free(page: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Wrap a method in a function, because NiceGUI does not accept methods."""

    async def free() -> None:
        await page()

    return free
