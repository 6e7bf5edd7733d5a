"""Tests that figures in virtual time use measured costs, and that the page says so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.virtual.simulated_costs import Costs
from benchmarks.harness.machine import Machine
from benchmarks.harness.record import RESULTS, RunRecord, record_benchmark, write
from benchmarks.paper.costs import FILE, costs_of, measured_costs, points, read_costs
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.markdown import same_costs, write_page

MACHINE = Machine("an abacus", 2, 1 << 30, "none", "3.11", {"jax": "0"}, None)


def measured(failed: str = "") -> RunRecord:
    """Return costs of a controller that takes 20 us per gang, 5 us and 125 bytes per host, and so on."""
    records = []
    for each in points(quick=False):
        hosts = float(each.point.get("hosts", 0))
        values = {
            "gang_us": 20.0 + 5.0 * hosts,
            "gang_bytes": 100.0 + 125.0 * hosts,
            "worker_us": 40.0,
            "message_us": 7.0,
            "latency_us": 11.0,
            "rate": 2.0,
            "copy": 8.0,
        }
        (name,) = each.contestants
        failures = {name: "it failed"} if each.key == failed else {}
        records.append(record_benchmark(each, [name], {name: [values]}, failures))
    return RunRecord("costs", "2026-01-01", 1.0, ["x"], 1, False, MACHINE, 0.0, 0.0, False, records)


def test_costs_are_those_that_were_measured():
    found = costs_of(measured())
    assert found == Costs(
        latency=pytest.approx(11e-6),
        controller_gang_host=pytest.approx(5e-6 + 125 / 12.5e9),  # plus the time of its messages on the link
        controller_gang=pytest.approx(20e-6),
        host_gang=pytest.approx(40e-6),
        message=pytest.approx(7e-6),
        data_bandwidth=pytest.approx(2e9),
        staging_bandwidth=pytest.approx(8e9),
    )


@pytest.mark.parametrize("key", ["control", "worker", "message", "latency", "data", "staging"])
def test_nothing_is_made_up_for_what_was_not_measured(key: str):
    with pytest.raises(ValueError, match=r"was not measured: .*it failed"):
        costs_of(measured(failed=key))


def test_without_a_file_the_error_says_what_to_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="python -m benchmarks costs"):
        read_costs(tmp_path)


def test_the_repository_has_measured_costs():
    assert 0 < measured_costs().controller_gang_host < 1


def test_the_page_has_the_costs_and_says_which_figures_were_computed_with_others(tmp_path: Path):
    def page(costs: dict[str, float]) -> str:
        run = RunRecord("table1-null", "2026-01-01", 1.0, ["x"], 1, False, MACHINE, 0.0, 0.0, False, [], costs=costs)
        write(run, tmp_path / "table1-null.json")
        write_page(FIGURES, tmp_path, tmp_path / "page.md")
        return (tmp_path / "page.md").read_text()

    write(measured(), tmp_path / FILE)
    same = page(msgspec.to_builtins(costs_of(measured())))
    assert "| controller, a gang as such | 20.0 us |" in same
    assert "computed with other costs" not in same
    assert "computed with other costs" in page({})
    assert "computed with other costs" in page(msgspec.to_builtins(costs_of(measured())) | {"latency": 1.0})


def test_costs_that_were_added_after_a_result_do_not_count() -> None:
    recorded = {"latency": 4.450479185747325e-05, "message": 2e-6}
    later = {"latency": 4.450479185747323e-05, "message": 2e-6, "controller_delegated_run": 1e-4}
    assert same_costs(recorded, later)
    assert not same_costs(recorded, later | {"message": 3e-6})
    assert not same_costs({}, later)


def test_the_committed_figures_in_virtual_time_were_computed_with_the_committed_costs() -> None:
    current = msgspec.to_builtins(measured_costs())
    names = [figure.key for figure in FIGURES if figure.virtual and (RESULTS / f"{figure.key}-null.json").exists()]
    runs = [msgspec.json.decode((RESULTS / f"{name}-null.json").read_bytes(), type=RunRecord) for name in names]
    assert [run.name for run in runs if not same_costs(run.costs, current)] == []
