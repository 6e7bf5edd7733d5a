"""Tests of the page about GPUs and of its results."""

from __future__ import annotations

import json

from benchmarks.gpu import RESULTS, table
from benchmarks.harness.backends import ROOT


def test_the_page_has_the_table_of_the_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in (ROOT / "docs" / "guides" / "gpus.md").read_text()
