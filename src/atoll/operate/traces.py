"""Traces in the format of Chrome's trace events (JSON), which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.protocol.spans import Span


def chrome_trace(spans: Iterable[Span]) -> bytes:
    """One row a host, grouped by island; times in microseconds from the first span."""
    spans = list(spans)
    origin = min((span.started for span in spans), default=0)
    events: list[dict[str, object]] = []
    for island in sorted({span.island for span in spans}):
        events.append(_named("process_name", island, 0, f"island {island}"))
    for island, host in sorted({(span.island, span.host) for span in spans}):
        events.append(_named("thread_name", island, host, f"host {host}"))
    events += [
        {
            "name": span.program if span.work == "call" else f"{span.program} ({span.work})",
            "cat": span.work,
            "ph": "X",
            "pid": span.island,
            "tid": span.host,
            "ts": (span.started - origin) / 1e3,
            "dur": (span.ended - span.started) / 1e3,
            "args": {"session": span.session, "sequence": span.sequence, "nodes": span.nodes},
        }
        for span in spans
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, island: int, host: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": island, "tid": host, "args": {"name": name}}
