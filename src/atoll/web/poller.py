"""Keep one watch up to date for all viewers.

The poller asks the cluster at most once a second, for each kind of usage at most every ten seconds, and only while
someone views the watch.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from atoll.cluster.usage.usage_records import By
from atoll.errors import AtollError
from atoll.telemetry.log_rows import LogRow
from atoll.telemetry.watch import SnapshotSource, Watch

FRESH_SECONDS = 0.9  # younger data is not requested again
USAGE_SECONDS = 10.0
MAX_SPANS = 2_000  # per second: enough for the picture, and cheap for a busy controller


class Poller:
    """Updates `watch` from `source`, on demand."""

    def __init__(self, source: SnapshotSource) -> None:
        self.source = source
        self.watch = Watch()
        self._asking = asyncio.Lock()
        self._reported = self._traced = -FRESH_SECONDS
        self._usage: dict[tuple[By, float], tuple[float, dict[str, Any]]] = {}  # replies, with their time

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
                spans, position = await self.source.spans(self.watch.position, MAX_SPANS)
                self.watch.add_spans(spans, position, time.monotonic())
            except (AtollError, msgspec.MsgspecError) as error:
                self.watch.fail(str(error), time.monotonic())
            self._traced = time.monotonic()

    async def log(self) -> tuple[list[LogRow], str]:
        """Return the last rows of the cluster's log, oldest first, or none and the reason why it cannot be read."""
        async with self._asking:
            try:
                return await self.source.log(), ""
            except AtollError as error:
                return [], str(error)

    async def usage(self, by: By, seconds: float) -> dict[str, Any] | None:
        """Return the usage of the last `seconds`, or of all time if 0. Return None if the cluster does not answer.

        The page offers few values of `seconds`, so the answers that are kept are few.
        """
        async with self._asking:
            at, found = self._usage.get((by, seconds), (-USAGE_SECONDS, None))
            if found is None or time.monotonic() - at >= USAGE_SECONDS:
                try:
                    found = await self.source.usage(by, seconds)
                except (AtollError, msgspec.MsgspecError) as error:
                    self.watch.fail(str(error), time.monotonic())
                    return None
                self._usage[by, seconds] = time.monotonic(), found
            return found
