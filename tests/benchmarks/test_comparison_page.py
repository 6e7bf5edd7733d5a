"""Tests of the table with the speed beside that of an earlier version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks import comparison_page
from benchmarks.harness.benchmark import AT, Metric
from benchmarks.harness.record import RunRecord, record_benchmark, write
from tests.benchmarks.test_compare import BENCHMARK, compared


def figure_record(rate: float) -> RunRecord:
    """Return the record of a figure with two rounds of one point."""
    benchmark = replace(BENCHMARK, metrics=(Metric("rate", "op by op", "computations/s"),), contestants=("Atoll",))
    point = record_benchmark(benchmark, ["Atoll"], {"Atoll": [{"rate": rate}, {"rate": rate}]}, {})
    return msgspec.structs.replace(compared("/base"), name="fig6-null", benchmarks=[point])


def test_the_table_has_micro_benchmarks_in_turn_and_figures_of_both_versions(tmp_path: Path) -> None:
    write(compared("/base"), tmp_path / "micro.json")
    write(figure_record(8.0), tmp_path / "fig6-null.json")
    write(figure_record(4.0), tmp_path / "fig6-null-earlier.json")
    heading, _, *rows = comparison_page.render(tmp_path).splitlines()
    assert f"beside commit {compared('/base').benchmarks[0].contestants[-1].partition(AT)[2][:9]}" in heading
    assert rows[2:] == [
        "| x | a time | ms | 2.00 (2.00-2.00) | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) |",
        "| x | a rate | calls/s | 0.500 (0.500-0.500) | 1.00 (1.00-1.00) | 2.00 (2.00-2.00) |",
        "| fig6-null | a benchmark: op by op | computations/s | 4.00 (4.00-4.00) | 8.00 (8.00-8.00) | 2.00 |",
    ]
