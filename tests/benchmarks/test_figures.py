"""Tests of figures: their points and claims, and the page written from their results. They measure nothing."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import BATCH_THREADS, Benchmark, Metric, Settings
from benchmarks.harness.machine import Machine
from benchmarks.harness.record import BenchmarkRecord, Claim, RunRecord, record_benchmark, write
from benchmarks.harness.titles import retitled
from benchmarks.micro.table import BENCHMARKS
from benchmarks.paper import fig5, fig6
from benchmarks.paper.figure import Axes, Options, apart, at_least, at_most, quotient_by_rounds
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.markdown import write_page
from benchmarks.paper.plot import lines, require_matplotlib
from benchmarks.paper.table import cells, last_words, words

MACHINE = Machine("an abacus", 2, 1 << 30, "none", "3.11", {"jax": "0"}, None)
OPTIONS = [Options(null=null, quick=quick) for null in (False, True) for quick in (False, True)]


def point(rates: dict[str, list[float]], **where: float) -> BenchmarkRecord:
    benchmark = Benchmark("fig", f"{where}", "", (Metric("rate", "rate", "computations/s"),), tuple(rates), point=where)
    rounds = {name: [{"rate": rate} for rate in each] for name, each in rates.items()}
    return record_benchmark(benchmark, list(rates), rounds, {})


def run(points: list[BenchmarkRecord], claims: list[Claim]) -> RunRecord:
    return RunRecord("fig5", "2026-01-01", 1.0, ["atoll"], 3, False, MACHINE, 0.0, 0.0, False, points, claims, 0.0)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_each_figure_has_points_and_its_claims_do_without_those_that_failed(figure):
    found = 0
    for options in OPTIONS:
        points = figure.points(options)
        found += len(points)
        failed = [
            record_benchmark(each, list(each.contestants), {}, dict.fromkeys(each.contestants, "it failed"))
            for each in points
        ]
        if failed:
            assert all(claim.reached is None for claim in figure.claims(failed, options))
        if figure.axes is not None:
            assert all(figure.axes.x in each.point for each in points)
    assert found


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_each_contestant_of_a_figure_has_an_environment(figure):
    for each in itertools.chain.from_iterable(map(figure.points, OPTIONS)):
        for contestant in each.contestants:
            assert environment_of(Settings(contestant, True, dict(each.point)))["PYTHONUNBUFFERED"]


def test_a_quotient_by_rounds_is_not_moved_by_a_machine_that_slows_down_between_them():
    slower = point({"fair": [99.0, 49.5, 9.9], "first-come": [100.0, 50.0, 10.0]})
    assert quotient_by_rounds(slower, "fair", "first-come", "rate") == pytest.approx(0.99)
    assert quotient_by_rounds(slower, "fair", "another", "rate") is None


def test_keys_are_unique():
    assert len({figure.key for figure in FIGURES}) == len(FIGURES)


def test_a_claim_holds_or_does_not_or_was_not_measured():
    assert at_least("", 0.99, 0.98).reached is True
    assert at_least("", 0.97, 0.98).reached is False
    assert at_most("", 2.0, 2.3).reached is True
    assert at_most("", math.inf, 2.3).reached is False
    assert at_least("", None, 0.98).reached is None


def test_parity_is_the_shortest_computation_from_which_on_all_keep_up():
    def at(milliseconds: float, ratio: float) -> BenchmarkRecord:
        return point({"Atoll": [100 * ratio], "ideal": [100.0]}, hosts=4, milliseconds=milliseconds)

    # A point that keeps up by chance, below one that does not, is ignored.
    points = [at(1, 0.99), at(2, 0.9), at(4, 0.985), at(8, 1.0)]
    assert fig6.parity(points, "Atoll", "ideal") == 4
    assert fig6.parity([at(1, 0.5)], "Atoll", "ideal") == math.inf
    assert fig6.parity([at(1, 0.99)], "Atoll", "none such") is None


def test_contestants_are_as_far_apart_as_in_the_worst_round():
    assert apart(point({"Atoll": [4.0, 2.0], "JAX": [4.0, 2.5], "ideal": [4.0, 2.0]}), "rate") == 0.25
    assert apart(point({"Atoll": [4.0, 2.0]}), "rate") == 0.0
    failed = Benchmark("fig", "", "", (Metric("rate", "", ""),), ("Atoll", "JAX"))
    assert apart(record_benchmark(failed, ["Atoll", "JAX"], {"Atoll": [{"rate": 1.0}]}, {"JAX": "no"}), "rate") is None


def test_there_is_a_line_for_each_contestant_and_each_value_that_splits():
    points = [point({"Atoll": [n], "ideal": [2 * n]}, clients=n, ms=ms) for n in (1, 4) for ms in (0.5, 2)]
    found = lines(points, Axes("clients", "", ("rate",), "", split="ms", split_unit="ms"))
    assert set(found) == {"Atoll, 0.5 ms", "Atoll, 2 ms", "ideal, 0.5 ms", "ideal, 2 ms"}
    assert [(x, summary.median) for x, summary in found["ideal, 2 ms"]] == [(1, 2), (4, 8)]


def test_a_table_has_a_row_for_each_point_and_contestant():
    header, first, second = cells(run([point({"Atoll": [1, 2, 3], "JAX": [4, 4, 4]}, hosts=1)], []))
    assert header[2:] == ["rate, computations/s"]
    assert first[1:] == ["Atoll", "2.00 (1.50-2.50)"]
    assert second[1:] == ["JAX", "4.00"]


@pytest.mark.parametrize("figure", [each for each in FIGURES if each.points(Options())], ids=lambda figure: figure.key)
def test_claims_about_jax_are_about_jax_with_batch_threads(figure):
    """Atoll's devices are batch threads. JAX with its usual threads is measured too, but no claim uses it."""
    points = figure.points(Options(quick=True))
    names = {name for each in points for name in each.contestants if name.startswith(("JAX", "stock"))}
    as_users_start_it = {name for name in names if not name.endswith(BATCH_THREADS)}
    assert names == as_users_start_it | {f"{name}{BATCH_THREADS}" for name in as_users_start_it}

    def verdicts(slow: set[str]) -> list[float | None]:
        records = []
        for each in points:
            values = {metric.name: 1.0 for metric in each.metrics}
            rounds = {
                name: [{k: v / (2 if name in slow else 1) for k, v in values.items()}] for name in each.contestants
            }
            records.append(record_benchmark(each, list(each.contestants), rounds, {}))
        return [claim.value for claim in figure.claims(records, Options(quick=True)) if "losses" not in claim.text]

    assert verdicts(as_users_start_it) == verdicts(set())
    if names:
        assert verdicts(names - as_users_start_it) != verdicts(set())


@pytest.mark.parametrize("benchmark", [each for each in BENCHMARKS if "stock" in each.contestants], ids=lambda b: b.key)
def test_ratios_to_stock_jax_are_judged_with_batch_threads(benchmark: Benchmark):
    if any(metric.target and metric.target.ratio for metric in benchmark.metrics):
        assert benchmark.contestants == ("atoll", f"stock{BATCH_THREADS}", "stock")


def test_atoll_is_compared_with_tensorflow_on_one_host_alone():
    everyone = {name: [1.0] for name in (*fig5.ATOLL, *fig5.JAX, *fig5.BATCH_JAX, *fig5.RAY, *fig5.TENSORFLOW)}
    claims = fig5.FIGURE.claims([point(everyone, hosts=hosts) for hosts in (1, 2)], Options())
    assert [claim.text[-6:] for claim in claims if "TensorFlow" in claim.text] == ["1 host"] * 2


def test_the_exception_of_a_failure_is_reported():
    assert last_words("Traceback\n  File\nValueError: no\nthe end of its log:\nnoise") == "ValueError: no"


def test_the_page_has_what_was_measured_and_nothing_else(tmp_path: Path):
    write(run([point({"Atoll": [1.0]}, hosts=1)], [at_least("a ratio", 0.99, 0.98)]), tmp_path / "fig5.json")
    page = tmp_path / "docs" / "benchmarks.md"
    assert write_page(FIGURES, tmp_path, page) == ["fig5"]
    text = page.read_text()
    assert "of an unknown commit" in text
    assert "## fig5: Dispatch overhead" in text
    assert "| a ratio | 0.990 | ≥ 0.98 | yes |" in text
    assert text.count("### ") == 1
    assert msgspec.json.decode((tmp_path / "fig5.json").read_bytes(), type=RunRecord).claims[0].reached


def test_claims_of_a_run_beside_other_work_are_not_counted(tmp_path: Path) -> None:
    record = msgspec.structs.replace(run([point({"Atoll": [1.0]}, hosts=1)], [at_least("a", 0.99, 0.98)]), busy=True)
    write(record, tmp_path / "fig5.json")
    write_page(FIGURES, tmp_path, tmp_path / "page.md")
    assert "| a | 0.990 | ≥ 0.98 | not counted |" in (tmp_path / "page.md").read_text()


def test_a_claim_that_is_never_reached_says_up_to_where_it_was_measured() -> None:
    rates = {1.0: 0.9, 4.6: 0.95}
    points = [
        point({fig6.ATOLL: [rate], fig6.BATCH_JAX: [1.0]}, hosts=4, milliseconds=ms) for ms, rate in rates.items()
    ]
    (claim,) = fig6.FIGURE.claims(points, Options())
    assert words(claim) == ("above 4.60 (never reached)", "≤ 2.3", "no")


def test_a_record_gets_the_titles_of_the_code() -> None:
    (now, *_) = fig5.FIGURE.points(Options())
    before = replace(now, title="1 hosts of 2 devices", metrics=tuple(replace(each, title="?") for each in now.metrics))
    rounds = {name: [{metric.name: 1.0 for metric in now.metrics}] for name in now.contestants}
    record = record_benchmark(before, list(now.contestants), rounds, {})
    assert retitled([record], [now]) == [record_benchmark(now, list(now.contestants), rounds, {})]
    assert retitled([record], fig6.FIGURE.points(Options())) == [record]


def test_missing_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before any measurement."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="figures are drawn with matplotlib"):
        require_matplotlib()
