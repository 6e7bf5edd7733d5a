"""Keep one watch up to date for all viewers.

The poller asks the cluster at most once a second, and only while someone views the watch.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from atoll.errors import AtollError
from atoll.telemetry.watch import Source, Watch

FRESH_SECONDS = 0.9  # younger data is not requested again
MOST_SPANS = 2_000  # per second: enough for the picture, and cheap for a busy controller


class Poller:
    """Updates `watch` from `source`, on demand."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.watch = Watch()
        self._asking = asyncio.Lock()
        self._reported = self._traced = -FRESH_SECONDS

    async def refresh(self, fresh: float = FRESH_SECONDS) -> None:
        """Update the report unless it is younger than `fresh` seconds. On failure, set `watch.problem`."""
        async with self._asking:
            if time.monotonic() - self._reported < fresh:
                return
            try:
                report = await self.source.report()
                self.watch.update(report, time.monotonic())
            except (AtollError, msgspec.MsgspecError) as error:
                self.watch.fail(str(error), time.monotonic())
            self._reported = time.monotonic()

    async def refresh_time_line(self) -> None:
        """Update the spans of the time line unless they are younger than `FRESH_SECONDS`."""
        async with self._asking:
            if time.monotonic() - self._traced < FRESH_SECONDS:
                return
            try:
                spans, position = await self.source.spans(self.watch.position, MOST_SPANS)
                self.watch.add_spans(spans, position, time.monotonic())
            except (AtollError, msgspec.MsgspecError) as error:
                self.watch.fail(str(error), time.monotonic())
            self._traced = time.monotonic()
