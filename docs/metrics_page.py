"""Writes reference/metrics.md from the metrics that a cluster exposes: `python -m docs.metrics_page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.telemetry.metrics import metrics_of
from atoll.telemetry.snapshot import Snapshot

PAGE = Path(__file__).resolve().parent / "reference" / "metrics.md"
_HEAD = """\
# Metrics

<!-- Written by `python -m docs.metrics_page` from `telemetry/metrics.py`. -->

`atoll metrics` and `atoll web` serve these metrics [for Prometheus](../operate/watching.md#in-prometheus), at
`/metrics`. A histogram has the series `_bucket`, `_sum` and `_count`.

| metric | type | labels | meaning |
|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    families: list[Any] = sorted(metrics_of(Snapshot()), key=lambda each: str(each.name))
    rows = ""
    for each in families:
        name = each.name + {"counter": "_total", "info": "_info"}.get(each.type, "")
        labels = ", ".join(f"`{label}`" for label in each._labelnames)
        rows += f"| `{name}` | {each.type} | {labels} | {each.documentation} |\n"
    return _HEAD + rows


if __name__ == "__main__":
    PAGE.write_text(page())
