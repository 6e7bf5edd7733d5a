"""Titles of benchmarks and metrics on pages: those of the code, also if a record was made before a title changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.record import BenchmarkRecord


def retitled(records: Sequence[BenchmarkRecord], benchmarks: Sequence[Benchmark]) -> list[BenchmarkRecord]:
    """Return the records with the titles of `benchmarks`. Keep the titles of records that belong to none of them."""
    return [_retitled(record, _benchmark_of(record, benchmarks)) for record in records]


def _benchmark_of(record: BenchmarkRecord, benchmarks: Sequence[Benchmark]) -> Benchmark | None:
    """Return the benchmark with the record's key, point and metrics."""
    names = {metric.name for metric in record.metrics}
    for benchmark in benchmarks:
        same = (benchmark.key, dict(benchmark.point)) == (record.key, record.point)
        if same and names <= {metric.name for metric in benchmark.metrics}:
            return benchmark
    return None


def _retitled(record: BenchmarkRecord, benchmark: Benchmark | None) -> BenchmarkRecord:
    if benchmark is None:
        return record
    titles = {metric.name: metric.title for metric in benchmark.metrics}
    metrics = [msgspec.structs.replace(metric, title=titles[metric.name]) for metric in record.metrics]
    return msgspec.structs.replace(record, title=benchmark.title, metrics=metrics)
