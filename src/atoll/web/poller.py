"""Keeps one watch up to date for all who look: asks the cluster once a second, and never where nobody looks."""

from __future__ import annotations

import asyncio
import time

import msgspec

from atoll.errors import AtollError
from atoll.telemetry.watch import Source, Watch

# A report that is younger is good enough.
FRESH_SECONDS = 0.9
# Of each second: what a picture can show, and a busy controller hands out in passing.
MOST_SPANS = 2_000


class Poller:
    """`watch` is what the cluster has said last."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.watch = Watch()
        self._asking = asyncio.Lock()
        self._reported = self._traced = -FRESH_SECONDS

    async def refresh(self, fresh: float = FRESH_SECONDS) -> None:
        """Returns when the watch is at most `fresh` seconds old, or says why it is not."""
        async with self._asking:
            if time.monotonic() - self._reported < fresh:
                return
            try:
                report = await self.source.report()
                self.watch.update(report, time.monotonic())
            except (AtollError, msgspec.MsgspecError) as error:
                self.watch.fail(str(error))
            self._reported = time.monotonic()

    async def refresh_time_line(self) -> None:
        """The same for the time line."""
        async with self._asking:
            if time.monotonic() - self._traced < FRESH_SECONDS:
                return
            try:
                spans, position = await self.source.spans(self.watch.position, MOST_SPANS)
                self.watch.add_spans(spans, position, time.monotonic())
            except (AtollError, msgspec.MsgspecError) as error:
                self.watch.fail(str(error))
            self._traced = time.monotonic()
