"""Helpers of the page's tests: a `SnapshotSource` without a cluster, and the page's process for a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from atoll.cluster.usage.usage_records import By
from atoll.errors import ConnectError
from atoll.protocol.messages import Operation
from atoll.protocol.spans import Span
from atoll.telemetry.log_rows import LogRow
from tests.cluster_process import User, finish, first_line


class ScriptedSource:
    """Source like `telemetry.watch.Source` with given replies, which counts requests."""

    name = "of the test"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.asked = 0
        self.fails = ""
        self.new: list[Span] = []

    async def report(self) -> bytes:
        self.asked += 1
        if self.fails:
            raise ConnectError(self.fails)
        return msgspec.json.encode(self.fields)

    async def spans(self, position: int, limit: int) -> tuple[list[Span], int]:
        new, self.new = self.new[-limit:], []
        return new, position + len(new)

    async def usage(self, by: By, seconds: float) -> dict[str, Any]:
        self.asked += 1
        if self.fails:
            raise ConnectError(self.fails)
        return {"by": str(by), "since": seconds}

    async def log(self) -> list[LogRow]:
        if self.fails:
            raise ConnectError(self.fails)
        return []

    async def trace(self) -> bytes:
        raise NotImplementedError

    async def operate(self, operation: Operation) -> str:
        raise NotImplementedError


@contextmanager
def serving(user: User, *arguments: str, listen: str = "127.0.0.1:0", **env: str) -> Iterator[str]:
    """Yield the URL that a serving command prints, and end the command after the block."""
    process = user.start_atoll(*arguments, "--listen", listen, **env)
    try:
        yield first_line(process)
    finally:
        process.terminate()
        ended = finish(process)
    assert ended.returncode == 0, ended.stderr
