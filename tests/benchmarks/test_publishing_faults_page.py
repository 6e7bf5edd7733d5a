"""Tests that the page about named arrays shows the committed results of the tests with kills."""

from __future__ import annotations

import msgspec

from benchmarks.publishing_faults import PAGE, RESULT, FaultResult, table


def test_the_page_shows_the_committed_results() -> None:
    results = msgspec.json.decode(RESULT.read_bytes(), type=list[FaultResult])
    rows = [line for line in table(results).splitlines() if line.startswith("|")]
    assert "\n".join(rows) in PAGE.read_text()
    assert len({(each.seed, each.spill) for each in results}) == len(results), "no run counts twice"
