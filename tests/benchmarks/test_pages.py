"""Tests that each measured figure is on one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import commit_history, comparison_page, fault_runs
from benchmarks.elastic import recovery_command
from benchmarks.harness.pages import between
from benchmarks.micro import markdown

ROOT = Path(__file__).resolve().parents[2]


def test_each_micro_benchmark_is_in_the_table_of_one_page() -> None:
    found: list[str] = []
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        owners = [name for name in markdown.OWNERS if markdown.BEGIN_OF.format(name) in text]
        markers = [(markdown.BEGIN, markdown.END), *(markdown.markers(page, name) for name in owners)]
        tables = [between(text, *each) for each in markers if each[0] in text]
        for table in tables:
            found += re.findall(r"^\| ([a-z]+) \| \*\*", table, re.MULTILINE)
    assert len(found) > 20
    assert sorted(found) == sorted(set(found))


def test_the_history_on_its_page_is_that_of_the_file() -> None:
    shown = between(commit_history.PAGE.read_text(), commit_history.BEGIN, commit_history.END)
    assert shown.strip() == commit_history.render(commit_history.read()), "run python -m benchmarks.commit_history"


def test_the_speed_beside_an_earlier_version_is_that_of_the_records() -> None:
    shown = between(comparison_page.PAGE.read_text(), comparison_page.BEGIN, comparison_page.END)
    assert shown.strip() == comparison_page.render(), "run python -m benchmarks.comparison_page"


def test_the_recoveries_on_their_page_are_those_of_the_file() -> None:
    shown = between(recovery_command.PAGE.read_text(), recovery_command.BEGIN, recovery_command.END)
    assert shown.strip() == recovery_command.render(), "run python -m benchmarks.elastic.recovery_command"


@pytest.mark.parametrize("table", fault_runs.TABLES, ids=lambda table: table.page.stem)
def test_a_page_shows_the_committed_results_of_tests_that_kill_processes(table: fault_runs.Table) -> None:
    shown = between(table.page.read_text(), table.begin, table.end)
    assert shown.strip() == table.render(), "run python -m benchmarks.fault_runs"


def test_no_run_with_kills_counts_twice() -> None:
    for kind in fault_runs.KINDS:
        runs = [repr(each) for each in kind.read()]
        assert len(set(runs)) == len(runs)
    publishing = fault_runs.PUBLISHING.read()
    assert len({(each.seed, each.spill) for each in publishing}) == len(publishing)
