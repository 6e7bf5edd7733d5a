"""Tests that each measured figure is on one page."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks import commit_history, comparison_page, fault_runs
from benchmarks.elastic import recovery_command
from benchmarks.harness import result_list
from benchmarks.harness.pages import between
from benchmarks.harness.record import RESULTS
from benchmarks.micro import cpu_time_page, markdown
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.markdown import write_page

ROOT = Path(__file__).resolve().parents[2]
# Results whose table is between the markers without a name.
MAIN_TABLES = {"micro", *markdown.OWNERS}


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


def test_the_page_of_figures_is_that_of_the_results(tmp_path: Path) -> None:
    page = ROOT / result_list.FIGURES
    written = tmp_path / result_list.FIGURES
    write_page(FIGURES, RESULTS, written)
    pictures = os.path.relpath(RESULTS, written.parent)
    text = written.read_text().replace(pictures, os.path.relpath(RESULTS, page.parent))
    assert page.read_text() == text, "run python -m benchmarks report"


def test_each_result_is_in_the_list_with_the_page_that_shows_it() -> None:
    listed = (ROOT / result_list.FIGURES).read_text().partition(result_list.HEADING)[2]
    assert re.findall(r"^\| \[?`([\w/-]+)`", listed, re.MULTILINE) == result_list.result_names()
    assert [page for page in result_list.PAGES.values() if not (ROOT / page).exists()] == []
    tops = {each for name in result_list.result_names() for each in (name, name.partition("/")[0])}
    assert set(result_list.PAGES) - tops == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_the_table_of_a_result_is_that_of_the_committed_result(page: Path) -> None:
    text = page.read_text()
    shown = [name for name in result_list.result_names() if markdown.BEGIN_OF.format(name) in text]
    shown += [name for name, each in result_list.PAGES.items() if name in MAIN_TABLES and ROOT / each == page]
    for name in shown:
        source = RESULTS / f"{name}.json"
        table = between(text, *markdown.markers(page, name)).strip()
        expected = markdown.render(markdown.read(source), markdown.shown_elsewhere(source))
        assert table == expected, f"run python -m benchmarks.micro.markdown {source} {page}"


def test_the_history_on_its_page_is_that_of_the_file() -> None:
    shown = between(commit_history.PAGE.read_text(), commit_history.BEGIN, commit_history.END)
    assert shown.strip() == commit_history.render(commit_history.read()), "run python -m benchmarks.commit_history"


def test_the_cpu_time_on_its_page_is_that_of_the_file() -> None:
    shown = between(cpu_time_page.PAGE.read_text(), cpu_time_page.BEGIN, cpu_time_page.END)
    assert shown.strip() == cpu_time_page.render(), "run python -m benchmarks.micro.cpu_time_page"


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
