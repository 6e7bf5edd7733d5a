"""Tests that numbers, names and versions in the documentation agree with code, settings and committed results."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tomllib
from pathlib import Path

import pytest

from atoll._version import __version__
from atoll.client.jax_patches import direct_reads, element_reads, large_writes, tree_reads, tree_writes
from atoll.client.jax_patches.numbered_runs import MIN_WRITTEN
from atoll.cluster.settings import HOSTS_SECONDS, LOCAL_SECONDS
from atoll.cluster.tenant_settings import TenantSettings
from atoll.controller.sessions.proxy_requests import MAX_EARLY_FEEDS
from atoll.engines.restart_rules import MAX_RESTARTS, RESTART_SPAN_SECONDS
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.operate.command import command_line
from atoll.operate.command import scripts as run_command
from atoll.operate.command.standard_output import OUTPUT_CLOSED
from atoll.protocol.messages.proxy_messages import MAX_CARRIED_BYTES
from atoll.protocol.questions import MAX_CONTENTS
from atoll.quantities import human_bytes
from atoll.transfers.shared_memory_engine import SHARED_THRESHOLD
from atoll.transfers.shared_slots import SLOT_BYTES, SLOTS
from atoll.transfers.streams import STREAM_THRESHOLD
from docs import licenses_page
from docs.headings import anchor_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
# Numbers with three digits, which are hardly equal by chance.
PRECISE = re.compile(r"\b(?:0\.\d{3}|[1-9]\.\d\d)\b")
# Pages that show measurements, or describe how they were made.
HISTORIES = ("project/", "design/", "guides/gpus.md")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
USER_PAGES = [
    page for page in sorted(DOCS.rglob("*.md")) if not str(page.relative_to(DOCS)).startswith((*HISTORIES, "_build"))
]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return set(map(anchor_of, headings))


def test_the_readme_is_short() -> None:
    """Count code, tables and links, as `wc -w` does."""
    assert len(README.split()) <= 600


def test_the_changes_of_a_version_are_few() -> None:
    _, *versions = re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for version in versions:
        lines = version.splitlines()
        assert len(lines) <= 60, lines[0]
        assert max(map(len, lines)) <= 120, lines[0]


def test_the_conformance_of_the_readme_is_that_of_the_default_versions() -> None:
    page = (DOCS / "project" / "conformance.md").read_text()
    _, _, one_island = page.partition("<!-- conformance 1x1x8: begin")
    found = re.search(r"^\| \*\*all\*\* \| (\d+) \| (\d+) \|", one_island, re.MULTILINE)
    (jax,) = set(re.findall(r"^Python [\d.]+, JAX (\d+\.\d+)", one_island, re.MULTILINE))
    assert found is not None
    assert f"**{int(found[2]):,} of {int(found[1]):,}** tests of JAX {jax} and" in README


def test_the_speed_on_a_gpu_is_that_of_the_results() -> None:
    results = json.loads((RESULTS / "gpu.json").read_text())["results"]
    stock, atoll = (statistics.median(results[who]["training, steps per second"]) for who in ("stock", "atoll"))
    assert f"**{atoll / stock:.2f}** of the speed of stock JAX" in README


def test_the_rate_with_simulated_hosts_is_that_of_the_results() -> None:
    page = (DOCS / "project" / "benchmarks.md").read_text()
    rows = r"^\| 512 hosts of 4 null devices, 10 ms \| {} \| ([\d.]+)"
    atoll, ideal = (float(re.findall(rows.format(who), page, re.MULTILINE)[0]) for who in ("Atoll", "ideal"))
    assert (
        f"**{100 - 100 * atoll / ideal:.0f} %** slower than ideal dispatch: steps of 10 ms, one call each, on 512 "
        "simulated hosts" in README
    )


def test_the_table_of_paths_has_the_sizes_of_the_code() -> None:
    page = (DOCS / "design" / "waits.md").read_text()
    _, _, section = page.partition("\n## Paths by size\n")
    section = section[: section.index("\n## ")]
    written, read = section.split("| array that is read | path |")
    for text, table, sizes in (
        ("arrays of a tree", written, (tree_writes.MIN_ARRAYS, tree_writes.MAX_BYTES, MAX_CONTENTS)),
        ("and the launch", written, (MAX_CARRIED_BYTES,)),
        ("and then the proxy's channel to each host", written, (SLOT_BYTES,)),
        ("otherwise a channel that the script opens", written, (large_writes.MIN_BYTES,)),
        ("which cuts the shards", written, (large_writes.MAX_JOINED,)),
        ("slots of the shared memory", written, (SLOTS,)),
        ("arrays of a tree", read, (tree_reads.MAX_BYTES, MAX_CONTENTS)),
        ("elements of an array in a loop", read, (element_reads.MIN_TOGETHER, tree_reads.MAX_BYTES)),
        ("from 256 KiB on through shared memory", read, (SHARED_THRESHOLD,)),
        ("on another machine", read, (STREAM_THRESHOLD, direct_reads.MIN_BYTES)),
    ):
        (line,) = [line for line in table.splitlines() if text in line]
        for size in sizes:
            assert re.search(rf"\b{_text_of(size)}\b", line), line
    assert MIN_WRITTEN == 2
    assert "from the third array of a type on" in section


def _text_of(size: int) -> str:
    """Return a number of bytes as the page writes it. Numbers below 1,024 are counts."""
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else str(size)


def test_a_ratio_in_the_list_of_missed_targets_is_in_a_table_of_results() -> None:
    tables = [(DOCS / "project" / "benchmarks.md").read_text()]
    for page in DOCS.rglob("*.md"):
        tables += re.findall(r"<!-- [^>]*begin[^>]*-->(.*?)<!-- [^>]*end -->", page.read_text(), re.DOTALL)
    shown = set(re.findall(r"\d[\d,]*(?:\.\d+)?", "".join(tables)))
    page = (DOCS / "design" / "performance.md").read_text()
    reached = re.findall(r"- \*\*Reached:\*\*(.*?)(?=\n- |\n\n)", page, re.DOTALL)
    assert len(reached) > 10
    assert [(each, text) for text in reached for each in PRECISE.findall(text) if each not in shown] == []


def test_each_extra_is_described_by_its_use() -> None:
    page = (DOCS / "start" / "installation.md").read_text()
    table = page[page.index("| extra |") :]
    described = {
        name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert described == set(PROJECT["optional-dependencies"])


def test_pages_name_only_extras_that_exist() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        named = set(re.findall(r"(?:'\.|atoll)\[(\w+)\]'", page.read_text()))
        assert named <= set(PROJECT["optional-dependencies"]), page


def test_each_dependency_has_a_license() -> None:
    page = licenses_page.PAGE.read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)[1:])
    assert set(rows) == set(licenses_page.needed())
    assert all(license.strip() for license in rows.values())


@pytest.mark.parametrize(
    "page", ["README.md", "CHANGELOG.md", "docs/start/installation.md", "docs/project/compatibility.md"]
)
def test_a_page_names_the_supported_versions(page: str) -> None:
    text = (ROOT / page).read_text()
    (python,) = re.findall(r">=([\d.]+)", PROJECT["requires-python"])
    ((oldest, first_unsupported),) = [
        found for each in PROJECT["dependencies"] for found in re.findall(r"^jax>=([\d.]+),<0\.(\d+)", each)
    ]
    assert re.search(rf"\b{re.escape(python)} (?:or|and) newer", text)
    assert not re.search(r"\bPython 3\.\d+ to 3\.\d+", text)
    assert f"{oldest} to 0.{int(first_unsupported) - 1}" in text


def test_the_workflow_and_the_pages_have_the_versions_of_the_matrix() -> None:
    (matrix,) = re.findall(r"^MATRIX \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    versions = [tuple(each.removeprefix("python").split(":")) for each in matrix.split()]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert re.findall(r'\{python: "([\d.]+)", jax: "([\d.]+)"\}', workflow) == versions
    page = (DOCS / "project" / "compatibility.md").read_text()
    for version in (each for pair in versions for each in pair):
        assert version in page


def test_make_lists_all_targets() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^  make (\S+) ", listed, re.MULTILINE)) == set(phony.split())


def test_make_docs_runs_what_the_pages_show() -> None:
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"tests/docs", "tests/test_tidy.py", "--full", "sphinx", "-W"} <= set(recipe.split())


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    targets = {*re.findall(r"\{target: (\w+)", workflow), *re.findall(r"- run: make (\S+)", workflow)}
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"image", "check", "docs", "release-check", "matrix"} <= targets <= set(phony.split())


def test_make_check_runs_each_test_of_the_sources() -> None:
    """Tests of the sources are marked. They start no processes."""
    marked = {
        f"tests/{path.name}"
        for path in (ROOT / "tests").glob("test_*.py")
        if '\npytestmark = pytest.mark.together("sources")' in path.read_text()
    }
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert marked
    assert marked - set(recipe.split()) == set()


def test_each_section_of_the_runbook_has_a_test() -> None:
    sections = re.findall(r"^## (.+)$", (DOCS / "operate" / "runbook.md").read_text(), re.MULTILINE)
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Faults of the runbook\n")
    rows = re.findall(r"^\| ([^|]+) \| `(.+)::(.+)` \|$", table, re.MULTILINE)
    assert sections
    assert list(dict.fromkeys(section for section, _, _ in rows)) == sections
    assert [name for _, file, name in rows if f"\ndef {name}(" not in (ROOT / file).read_text()] == []
    of_runbook = re.findall(
        r"^def (test_\w+)", (ROOT / "tests" / "operate" / "test_runbook.py").read_text(), re.MULTILINE
    )
    assert set(of_runbook) <= {name for _, _, name in rows}


def test_the_version_is_the_same_everywhere() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == __version__


def test_the_design_has_the_number_of_credits_of_the_code() -> None:
    assert f"{LAUNCH_WINDOW // 32} credits together" in (DOCS / "design" / "scheduling.md").read_text()


def test_the_design_has_the_times_for_hosts_to_join_and_the_number_of_restarts() -> None:
    page = " ".join((DOCS / "design" / "failures.md").read_text().split())
    assert f"{LOCAL_SECONDS:.0f} s, and {HOSTS_SECONDS:.0f} s with the engines" in page
    assert (MAX_RESTARTS, RESTART_SPAN_SECONDS) == (8, 60.0)
    ends = re.findall(r"(\w+) (?:such failures |times )within (\d+ s|a minute)", page)
    assert set(ends) == {("nine", "a minute")}


@pytest.mark.parametrize("page", ["clusters.md", "launchers.md"])
def test_a_page_has_the_time_for_hosts_to_join(page: str) -> None:
    text = " ".join((DOCS / "operate" / page).read_text().split())
    found = re.findall(r"(?:`--wait` seconds \(|waits for hosts, )(\d+)", text)
    assert [int(seconds) for seconds in found] == [HOSTS_SECONDS]


def test_the_page_of_tenants_has_the_defaults_of_their_limits() -> None:
    page = (DOCS / "operate" / "sharing.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", page, re.MULTILINE))
    default = TenantSettings("")
    assert shown["upload_rate"] == human_bytes(default.upload_rate).replace(".0", "")
    for key in ("launch_rate", "compile_seconds", "run_seconds", "share", "priority", "reserve"):
        assert shown[key] == f"{getattr(default, key):,.0f}", key
    assert f"except {LAUNCH_WINDOW} per session" in shown["launches"]
    assert f"except {MAX_EARLY_FEEDS:,} per session" in shown["uploads"]


def test_the_page_of_commands_has_the_exit_statuses_of_the_code() -> None:
    page = (DOCS / "reference" / "commands.md").read_text()
    table = page[page.index("| exit status |") : page.index("\n\nCommands for a running cluster")]
    named = {int(status) for status in re.findall(r"\b\d+\b", table)}
    codes = {run_command.NOT_EXECUTABLE, run_command.NOT_FOUND, run_command.INTERRUPTED, command_line.REFUSED}
    assert named == {0, 1, 2, OUTPUT_CLOSED} | codes


def test_the_readme_and_the_page_agree_about_what_kubernetes_and_slurm_have_run() -> None:
    page = " ".join((DOCS / "operate" / "launchers.md").read_text().split())
    assert "Kubernetes has not started a pod" in page
    assert re.search(r"^- \*\*Kubernetes\*\*: .*, not run\.$", README, re.MULTILINE)
    assert "run by Slurm 22.05 with one slurmctld and three nodes, which are namespaces of one machine" in page
    assert re.search(r"^- \*\*Slurm\*\*: .* on three namespaces of one machine\.$", README, re.MULTILINE)


def test_sections_that_are_named_in_texts_exist() -> None:
    """Such a text is: docs/design/failures.md, "Bugs"."""
    files = [path for top in ("docs", "src", "tests", "benchmarks", "scripts") for path in (ROOT / top).rglob("*")]
    texts = {path: path.read_text() for path in files if path.suffix in (".md", ".py") and "_build" not in path.parts}
    named = [
        (path, page, section)
        for path, text in texts.items()
        for page, section in re.findall(r"\b(docs/[\w/-]+\.md)`?, \"([^\"]+)\"", text)
    ]
    assert named
    for path, page, section in named:
        assert re.search(rf"^#+ {re.escape(section)}$", (ROOT / page).read_text(), re.MULTILINE), (path, page, section)


def test_each_function_and_module_of_the_api_is_in_the_list_for_readers_of_the_repository() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    listed = set(re.findall(r"`(atoll(?:\.\w+)+)", page[: page.index("\n## ")]))
    described = set(re.findall(r"^\.\. auto(?:function|module):: (\S+)", page, re.MULTILINE))
    assert described
    assert {name for name in described if not any(f"{each}.".startswith(f"{name}.") for each in listed)} == set()


def test_each_example_is_described() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"^## (\w+\.py)$", page, re.MULTILINE)) == scripts
    assert set(re.findall(r"^\| \[(\w+\.py)\]", page, re.MULTILINE)) == scripts


@pytest.mark.parametrize("page", ["README.md", "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_pages_outside_of_the_site_lead_to_headings(page: str) -> None:
    """Sphinx checks only links between pages of the site."""
    source = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", source.read_text()):
        found = (source.parent / target) if target else source
        assert anchor in anchors_of(found), f"{page}: {target}#{anchor}"


def test_links_named_above_and_below_lead_there() -> None:
    wrong = []
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        places = {anchor_of(found[1]): found.start() for found in re.finditer(r"^#+ (.+)$", text, re.MULTILINE)}
        for link in re.finditer(r"\[(above|below)\]\(#([^)]+)\)", text):
            is_above = places.get(link[2], link.start()) < link.start()
            if is_above != (link[1] == "above"):
                wrong.append((page.name, link[0]))
    assert wrong == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_to_files_that_the_site_includes_lead_to_headings_without_the_site(page: Path) -> None:
    """In the repository, a page that includes a file has no headings. `conf.py` changes the links for the site."""
    text = page.read_text()
    assert re.findall(r"\]\([^)]*(?:contributing|changelog)\.md#[^)]*\)", text) == []
    for file, anchor in re.findall(r"\]\((\.\./\.\./(?:CONTRIBUTING|CHANGELOG)\.md)#([^)]+)\)", text):
        assert anchor in anchors_of(page.parent / file), f"{file}#{anchor}"


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_for_users_has_no_dates_and_commits(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\b20\d\d-\d\d-\d\d\b|\bcommit [0-9a-f]{7,}\b|\bload of \d", text) == []


def test_times_of_recoveries_and_numbers_of_packages_are_in_no_text() -> None:
    """They change. The times are on the page of recovery times only, and the packages in their picture."""
    pages = [page for page in PAGES if page.name not in ("recovery-times.md", "decisions.md")]
    texts = {page.name: " ".join(page.read_text().split()) for page in pages}
    times = r"[\d.]+ s (?:at most|longest|median|at the median)\b|\b(?:median|longest) (?:of |pause )?[\d.]+ s\b"
    counts = r"\b(?:\d+|(?:twenty|thirty|forty|fifty)(?:-\w+)?) packages\b"
    assert {name: found for name, text in texts.items() if (found := re.findall(f"{times}|{counts}", text))} == {}


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_for_users_has_no_table_of_measurements(page: Path) -> None:
    assert re.findall(r"<!-- .*begin \(written by benchmarks.*-->", page.read_text()) == []
