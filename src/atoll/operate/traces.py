"""Traces in the format of Chrome's trace events (JSON), which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from atoll.protocol.spans import Span

_MOST_DEVICES = 1 << 12  # of a host


def chrome_trace(spans: Iterable[Span]) -> bytes:
    """One row for each host and device, grouped by island; times in microseconds from the first span.

    A gang on several devices is in the row of the first, where it overlaps with nothing: what shares a row shares that
    device, and ran one after another.
    """
    spans = list(spans)
    origin = min((span.started for span in spans), default=0)
    events: list[dict[str, object]] = []
    for island in sorted({span.island for span in spans}):
        events.append(_named("process_name", island, 0, f"island {island}"))
    rows = sorted({(span.island, span.host, _device(span)) for span in spans})
    rows_of = Counter((island, host) for island, host, _ in rows)
    for island, host, device in rows:
        name = f"host {host}" if rows_of[island, host] == 1 else f"host {host}, device {device}"
        events.append(_named("thread_name", island, _row(host, device), name))
    events += [
        {
            "name": span.program if span.kind == "call" else f"{span.program} ({span.kind})",
            "cat": span.kind,
            "ph": "X",
            "pid": span.island,
            "tid": _row(span.host, _device(span)),
            "ts": (span.started - origin) / 1e3,
            "dur": (span.ended - span.started) / 1e3,
            "args": {"session": span.session, "sequence": span.sequence, "nodes": span.nodes, "devices": span.devices},
        }
        for span in spans
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _device(span: Span) -> int:
    return min(span.devices, default=0)


def _row(host: int, device: int) -> int:
    """A host's rows stand together."""
    return host * _MOST_DEVICES + device


def _named(what: str, island: int, host: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": island, "tid": host, "args": {"name": name}}
