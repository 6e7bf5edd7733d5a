"""Tests of the benchmark of suspensions: the page shows its committed result."""

from __future__ import annotations

import msgspec

from benchmarks.suspension import MEDIA, PAGE, RESULT, WAYS, Suspensions, table


def test_the_page_shows_the_committed_result() -> None:
    result = msgspec.json.decode(RESULT.read_bytes(), type=Suspensions)
    assert [(each.medium, each.way) for each in result.rates] == [(medium, way) for medium in MEDIA for way in WAYS]
    assert table(result) in PAGE.read_text(), "run python -m benchmarks suspension"
