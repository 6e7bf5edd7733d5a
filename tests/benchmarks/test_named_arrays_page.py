"""Tests that the page about named arrays shows the committed rates."""

from __future__ import annotations

import msgspec

from benchmarks.named_arrays import PAGE, RESULT, Rates, table


def test_the_page_shows_the_committed_rates() -> None:
    result = msgspec.json.decode(RESULT.read_bytes(), type=Rates)
    rows = [line for line in table(result).splitlines() if line.startswith("|")]
    assert "\n".join(rows) in PAGE.read_text()
