"""The conformance runner survives whatever a test does to its process, and compares test by test."""

from __future__ import annotations

import importlib.metadata
import os
import textwrap
from pathlib import Path

import msgspec
import pytest

from scripts.conformance import attempt, comparison, environments, markdown, projects, reasons, suites
from scripts.conformance.__main__ import REASONS, empty_report, tell
from scripts.conformance.baseline import BaselineCache
from scripts.conformance.comparison import Difference, Report
from scripts.conformance.environments import Environment
from scripts.conformance.projects import Project, Sources, SuiteError, TestFile
from scripts.conformance.results import FileResults, Outcome, Sample, TestResult
from scripts.conformance.runner import run_file
from scripts.conformance.suites import Suite

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/conformance"
PAGE = ROOT / "docs/project/conformance.md"

BARE = Environment("bare", {})


def make_file(directory: Path, source: str) -> TestFile:
    path = directory / "sample_test.py"
    path.write_text(textwrap.dedent(source))
    return TestFile("sample", path, directory, Path(os.devnull), "sample 1")


def outcomes(results: FileResults) -> dict[str, str]:
    return {test.rpartition("::")[2]: str(result.outcome) for test, result in results.tests.items()}


def test_every_outcome_has_its_name(tmp_path: Path) -> None:
    file = make_file(
        tmp_path,
        """
        import unittest

        class T(unittest.TestCase):
            def test_passes(self): pass
            def test_fails(self): self.assertEqual(1, 2)
            def test_skips(self): self.skipTest("not here")
            @unittest.expectedFailure
            def test_xfails(self): self.fail()
            def test_subtest_fails(self):
                with self.subTest("a"): pass
                with self.subTest("b"): raise ValueError("boom")
            def test_subtest_skips(self):
                with self.subTest("a"): self.skipTest("no")

        class Broken(unittest.TestCase):
            def setUp(self): raise RuntimeError("no set-up")
            def test_errs(self): pass

        class BrokenDown(unittest.TestCase):
            def tearDown(self): raise RuntimeError("no tear-down")
            def test_errs_after(self): pass
        """,
    )
    results = run_file(file, BARE, timeout=30)
    assert outcomes(results) == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_xfails": "xfailed",
        "test_subtest_fails": "failed",
        "test_subtest_skips": "passed",
        "test_errs": "failed",  # unittest runs setUp and tearDown inside the call phase
        "test_errs_after": "failed",
    }
    assert results.tests["sample::T::test_fails"].message == "AssertionError: 1 != 2"
    assert results.tests["sample::T::test_skips"].message == "not here"
    assert results.tests["sample::T::test_subtest_fails"].message == "ValueError: boom"
    assert results.processes == 1
    assert results.troubles == []


def test_a_crash_a_hang_and_an_exit_cost_one_test_each(tmp_path: Path) -> None:
    file = make_file(
        tmp_path,
        """
        import ctypes, os, time

        def test_a(): pass
        def test_crashes(): ctypes.string_at(0)
        def test_b(): pass
        def test_hangs(): time.sleep(1000)
        def test_c(): assert 0
        def test_exits(): os._exit(7)
        def test_checks():
            os.write(2, b"F0101 x.cc:1] Check failed: a == b\\n")
            os.abort()
        def test_d(): pass
        """,
    )
    results = run_file(file, BARE, timeout=1)
    assert outcomes(results) == {
        "test_a": "passed",
        "test_crashes": "crashed",
        "test_b": "passed",
        "test_hangs": "timeout",
        "test_c": "failed",
        "test_exits": "crashed",
        "test_checks": "crashed",
        "test_d": "passed",
    }
    assert results.processes == 5
    assert "SIGSEGV" in results.tests["sample::test_crashes"].message
    assert "test_hangs" in results.tests["sample::test_hangs"].message
    assert "exit code 7" in results.tests["sample::test_exits"].message
    assert "SIGABRT: F0101 x.cc:1] Check failed: a == b" in results.tests["sample::test_checks"].message


@pytest.mark.thorough
def test_a_hang_that_holds_the_interpreter_lock_ends_too(tmp_path: Path) -> None:
    file = make_file(
        tmp_path,
        """
        import ctypes
        def test_holds(): ctypes.PyDLL(None).sleep(1000)
        def test_after(): pass
        """,
    )
    assert outcomes(run_file(file, BARE, timeout=1)) == {"test_holds": "timeout", "test_after": "passed"}


def test_a_hang_with_blocked_plugin_is_ended_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "GRACE_SECONDS", 1.0)
    file = make_file(
        tmp_path,
        """
        import faulthandler, time
        def test_hangs():
            faulthandler.cancel_dump_traceback_later()
            time.sleep(1000)
        def test_after(): pass
        """,
    )
    assert outcomes(run_file(file, BARE, timeout=1)) == {"test_hangs": "timeout", "test_after": "passed"}


@pytest.mark.thorough
def test_a_process_that_hangs_or_dies_at_exit_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_file(tmp_path, "import atexit, time\natexit.register(time.sleep, 1000)\ndef test_a(): pass\n")
    with monkeypatch.context() as patched:
        patched.setattr(attempt, "EXIT_SECONDS", 1.0)
        results = run_file(file, BARE, timeout=5)
    assert outcomes(results) == {"test_a": "passed"}
    assert results.troubles == ["the process hung at its exit"]
    file = make_file(tmp_path, "import atexit, os\natexit.register(os.abort)\ndef test_a(): pass\n")
    results = run_file(file, BARE, timeout=5)
    assert outcomes(results) == {"test_a": "passed"}
    assert results.troubles == ["the process ended at its exit with SIGABRT: Fatal Python error: Aborted"]


def test_what_the_tests_started_ends_with_them(tmp_path: Path) -> None:
    file = make_file(
        tmp_path,
        f"""
        import subprocess
        def test_starts():
            child = subprocess.Popen(["sleep", "1000"])
            open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        """,
    )
    run_file(file, BARE, timeout=5)
    pid = (tmp_path / "pid").read_text()
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@pytest.mark.thorough
def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    results = run_file(make_file(tmp_path, "raise RuntimeError('no backend')\n"), BARE, timeout=5)
    assert results.tests == {}
    assert results.troubles == ["the file could not be collected: RuntimeError: no backend"]
    results = run_file(make_file(tmp_path, "import os\nos.abort()\n"), BARE, timeout=5)
    assert results.troubles == ["the process ended with SIGABRT: Fatal Python error: Aborted"]


def test_a_file_that_always_crashes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.conformance.runner.MAX_PROCESSES", 2)
    file = make_file(
        tmp_path,
        "import os\ndef setup_function(): os._exit(3)\n" + "".join(f"def test_{i}(): pass\n" for i in range(4)),
    )
    results = run_file(file, BARE, timeout=5)
    assert outcomes(results) == {
        "test_0": "crashed",
        "test_1": "crashed",
        "test_2": "not run",
        "test_3": "not run",
    }


def test_a_sample_is_every_nth_test_also_after_a_crash_and_the_table_says_so(tmp_path: Path) -> None:
    names = "".join(f"def test_{i}(): pass\n" for i in range(3, 9))
    file = make_file(
        tmp_path, "import os\ndef test_0(): pass\ndef test_1(): 1 / 0\ndef test_2(): os._exit(7)\n" + names
    )
    sample = run_file(file, BARE, timeout=5, sample=Sample(2))
    assert outcomes(sample) == {
        "test_0": "passed",
        "test_2": "crashed",
        "test_4": "passed",
        "test_6": "passed",
        "test_8": "passed",
    }
    report = comparison.compare(sample, sample, every=2)
    assert report.stock_passed == report.both_passed == 4
    table = markdown.render(
        Report("1", "1", "1", "1x1x1", "atoll", {"sample": report, "whole": comparison.compare(sample, sample)})
    )
    assert "| `sample`, one test in 2 | 4 | 4 |" in table
    assert "| `whole` | 4 | 4 |" in table


def test_stock_results_of_a_sample_are_not_those_of_the_whole(tmp_path: Path) -> None:
    file = make_file(tmp_path, "")
    cache = BaselineCache(tmp_path / "cache")
    part, whole = (FileResults({f"sample::{name}": TestResult(Outcome.PASSED)}, 1.0, 1) for name in ("part", "whole"))
    assert cache.get_or_run(file, BARE, lambda: part, sample=Sample(2)) == part
    assert cache.get(file, BARE, Sample(3)) is None
    assert cache.get(file, BARE, Sample(2, first=1)) is None
    assert cache.get_or_run(file, BARE, lambda: whole) == whole
    assert cache.get(file, BARE, Sample(2)) == part


def test_stock_results_of_a_sample_are_taken_from_those_of_the_whole(tmp_path: Path) -> None:
    file = make_file(tmp_path, "")
    cache = BaselineCache(tmp_path / "cache")
    whole = FileResults({f"sample::{i}": TestResult(Outcome.PASSED, seconds=i) for i in range(5)}, 1.0, 1)
    cache.get_or_run(file, BARE, lambda: whole)
    part = cache.get_or_run(file, BARE, lambda: pytest.fail("runs"), sample=Sample(2, first=1))
    assert list(part.tests) == ["sample::1", "sample::3"]
    assert part.seconds == 4.0


def test_a_sample_begins_with_its_first_test(tmp_path: Path) -> None:
    file = make_file(tmp_path, "".join(f"def test_{i}(): pass\n" for i in range(5)))
    assert outcomes(run_file(file, BARE, timeout=5, sample=Sample(2, first=1))) == {
        "test_1": "passed",
        "test_3": "passed",
    }


@pytest.mark.thorough
def test_only_and_keyword_restrict_a_run(tmp_path: Path) -> None:
    file = make_file(tmp_path, "def test_a(): pass\ndef test_b(): pass\ndef test_ab(): pass\n")
    assert outcomes(run_file(file, BARE, timeout=5, only=["sample::test_b", "sample::test_gone"])) == {
        "test_b": "passed"
    }
    assert outcomes(run_file(file, BARE, timeout=5, keyword="b")) == {"test_b": "passed", "test_ab": "passed"}
    assert run_file(file, BARE, timeout=5, keyword="zzz").troubles == []


def test_a_checkout_on_the_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    file = make_file(tmp_path, "def test_a(): pass\n")
    file = TestFile(file.name, file.path, file.root, file.config, file.origin, foreign=tmp_path)
    assert outcomes(run_file(file, BARE, timeout=5)) == {"test_a": "passed"}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = run_file(file, BARE, timeout=5)
    assert results.tests == {}
    assert "jax would be imported from the checkout" in results.troubles[0]


def results_of(**tests: Outcome) -> FileResults:
    return FileResults({f"f::{name}": TestResult(outcome, f"{name}!") for name, outcome in tests.items()}, 1.0, 1)


STOCK = results_of(a=Outcome.PASSED, b=Outcome.PASSED, c=Outcome.PASSED, d=Outcome.FAILED, e=Outcome.SKIPPED)
ATOLL = results_of(a=Outcome.PASSED, b=Outcome.FAILED, d=Outcome.PASSED, e=Outcome.FAILED)


def test_the_score_counts_what_stock_passes() -> None:
    report = comparison.compare(STOCK, ATOLL)
    assert (report.stock_passed, report.both_passed) == (3, 1)
    assert report.differences == [
        Difference("f::b", Outcome.FAILED, "b!"),
        Difference("f::c", Outcome.ABSENT, "not among the collected tests"),
    ]
    assert report.only_on_atoll == ["f::d"]
    assert comparison.compare(STOCK, ATOLL, within=["f::a", "f::e"]).score == 1.0


def test_a_rerun_replaces_the_differences_and_their_counts() -> None:
    before = comparison.compare(STOCK, ATOLL)
    after = comparison.amend(before, results_of(b=Outcome.PASSED, c=Outcome.TIMEOUT))
    assert after.differences == [Difference("f::c", Outcome.TIMEOUT, "c!")]
    assert after.atoll.counts == {"passed": 3, "failed": 1, "timeout": 1}


def test_reasons_match_tests_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "reasons.toml"
    path.write_text('[[reason]]\nwhy = "w1"\nerror = "b!"\n[[reason]]\nwhy = "w2"\ntests = ["f::c*"]\n')
    report = reasons.read(path).explain(comparison.compare(STOCK, ATOLL))
    assert [difference.reason for difference in report.differences] == ["w1", "w2"]
    assert Report("", "", "", "", "", {"f": report}).unexplained() == []
    path.write_text('[[reason]]\nwhy = "w1"\n')
    with pytest.raises(reasons.ReasonError, match="would explain everything"):
        reasons.read(path)
    path.write_text('[[reason]]\nwhy = "w1"\nmessage = "x"\n')
    with pytest.raises(reasons.ReasonError, match="message"):
        reasons.read(path)
    assert reasons.read(tmp_path / "none").reason == []


def test_the_page_keeps_what_stands_around_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    report = Report("1", "1", "0", "1x1x8", "atoll,cpu", {"f": comparison.compare(STOCK, ATOLL)})
    markdown.embed(report, page)
    once = page.read_text()
    markdown.embed(report, page)
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert "| `f` | 3 | 1 | 33.3 % | 0 | 2 | 1 | 1 |" in once
    assert "<code>failed; b!</code> (1 test)</summary>\n\n- `f::b`\n" in once
    page.write_text(f"{once}{''.join(markdown.markers('2x1x4'))}")
    markdown.embed(msgspec.structs.replace(report, islands="2x1x4", tests="0.9"), page, "2x1x4")
    assert page.read_text().startswith(once)
    assert "islands `2x1x4`, `JAX_PLATFORMS=atoll,cpu`. JAX's tests are those of version 0.9.\n" in page.read_text()
    page.write_text("no markers")
    with pytest.raises(markdown.MarkerError):
        markdown.embed(report, page)


def test_the_tables_of_the_page_are_those_of_the_committed_reports(tmp_path: Path) -> None:
    explain = reasons.read(ROOT / REASONS).explain
    reports = sorted(RESULTS.glob("*.json"))
    assert reports
    for path in reports:
        report = comparison.load(path)
        assert report is not None
        assert report.islands == path.stem
        report = report.holding({name: explain(file) for name, file in report.files.items()})
        copy = tmp_path / "page.md"
        copy.write_text(PAGE.read_text())
        markdown.embed(report, copy, path.stem)
        assert copy.read_text() == PAGE.read_text(), f"write the table of {path}"
        assert report.unexplained() == []


def test_files_of_which_nothing_passes_on_stock_have_no_score_but_are_told_of() -> None:
    skipped = comparison.compare(results_of(a=Outcome.SKIPPED), results_of(a=Outcome.SKIPPED))
    broken = comparison.compare(FileResults({}, 1.0, 1, ["no module x"]), FileResults({}, 1.0, 1))
    text = markdown.render(Report("1", "1", "0", "1x1x8", "atoll,cpu", {"f": skipped, "g": broken}))
    assert "| `f`" not in text
    assert "- `f`: 1 skipped\n- `g`: no module x\n" in text


def test_a_file_of_which_stock_runs_no_test_is_a_failure() -> None:
    files = {
        "f": comparison.compare(results_of(a=Outcome.SKIPPED), results_of(a=Outcome.SKIPPED)),
        "g": comparison.compare(FileResults({}, 1.0, 1, ["no module x"]), FileResults({}, 1.0, 1)),
    }
    assert tell(Report("1", "1", "0", "1x1x8", "atoll,cpu", {"f": files["f"]})) == 0
    assert tell(Report("1", "1", "0", "1x1x8", "atoll,cpu", files)) == 1


def test_a_score_is_never_rounded_up_to_all() -> None:
    assert markdown.percent(0.99999) == "99.9 %"
    assert markdown.percent(1.0) == "100.0 %"


def test_stock_results_are_kept_until_file_or_settings_change(tmp_path: Path) -> None:
    cache = BaselineCache(tmp_path / "cache")
    file = make_file(tmp_path, "1\n")
    runs = []

    def run() -> FileResults:
        runs.append(1)
        return STOCK

    assert cache.get_or_run(file, BARE, run) == STOCK
    assert cache.get_or_run(file, BARE, run) == STOCK
    assert len(runs) == 1
    cache.get_or_run(file, BARE, run, refresh=True)
    assert len(runs) == 2
    cache.get_or_run(file, Environment("bare", {"A": "1"}), run)
    assert len(runs) == 3
    cache.get_or_run(make_file(tmp_path, "2\n"), BARE, run)
    assert len(runs) == 4


def test_reports_of_other_settings_do_not_mix(tmp_path: Path) -> None:
    report = Report("1", "1", "0", "1x1x8", "atoll,cpu", {"f": comparison.compare(STOCK, ATOLL)})
    comparison.save(report, tmp_path / "r.json")
    assert comparison.load(tmp_path / "r.json") == report
    assert report.comparable(report.holding({}))
    assert not report.comparable(Report("1", "1", "0", "2x1x4", "atoll,cpu", {}))
    assert comparison.load(tmp_path / "none.json") is None


# ---- suites


def jax_checkout(directory: Path, *tests: str) -> Path:
    for name in ("tests/pallas", "jax"):
        (directory / name).mkdir(parents=True)
    (directory / "jax" / "version.py").write_text(f'_version = "{importlib.metadata.version("jax")}"\n')
    for name in tests:
        (directory / "tests" / f"{name}.py").touch()
    return directory


def test_more_is_what_no_other_suite_holds(tmp_path: Path) -> None:
    others = (*suites.CORE, *suites.FULL, *suites.left_out())
    checkout = jax_checkout(tmp_path, "new_test", "pallas/kernels_test", "helpers", *others)
    names = [file.name for file in suites.files_of(Suite.MORE, Sources(checkout))]
    assert names == ["new_test", "pallas/kernels_test"]
    assert suites.named_file("pallas/kernels_test.py", Sources(checkout)).path.is_file()


def test_shards_hold_each_file_once_and_take_about_as_long(tmp_path: Path) -> None:
    files = [TestFile(str(i), tmp_path, tmp_path, tmp_path, "sample 1") for i in range(40)]
    seconds = {str(i): float(i % 7 + 1) for i in range(30)}
    shards = [suites.shard(files, f"{i}/3", seconds) for i in (1, 2, 3)]
    assert sorted(file.name for shard in shards for file in shard) == sorted(file.name for file in files)
    loads = [sum(seconds.get(file.name, 4.0) for file in shard) for shard in shards]
    assert max(loads) - min(loads) <= 7
    assert shards[0] == [file for file in files if file in shards[0]]  # in the suite's order
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0"):
        with pytest.raises(SuiteError, match="1/4"):
            suites.shard(files, wrong, seconds)


def test_seconds_are_added_to_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "seconds.json"
    path.write_text("{}")
    suites.record({"b": 2.0}, path)
    suites.record({"a": 1.0}, path)
    assert suites.measured(path) == {"a": 1.0, "b": 2.0}
    assert all(isinstance(each, float) for each in suites.measured().values())


@pytest.fixture
def sample_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a project called sample, whose tests have a conftest.py and import what the wheel lacks."""
    project = Project(
        "pytest", "pytest", "tests", ("**/test_*.py",), "version.py", conftest=True, left_out=("xml.dom", "extra")
    )
    monkeypatch.setitem(projects.PROJECTS, "sample", project)
    root = tmp_path / "sample"
    (root / "tests" / "sub").mkdir(parents=True)
    (root / "extra").mkdir()
    (root / "extra" / "left_out_test.py").write_text("answer = 42\n")
    (root / "version.py").write_text(f"__version__ = '{pytest.__version__}'\n")
    (root / "tests" / "__init__.py").touch()
    (root / "tests" / "helpers.py").write_text("one = 1\n")
    (root / "tests" / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef two(): return 2\n")
    (root / "tests" / "test_a.py").write_text("from .helpers import one\ndef test_sum(two): assert one + two == 3\n")
    (root / "tests" / "sub" / "test_b.py").write_text(
        "from xml.dom.left_out_test import answer\ndef test_answer(): assert answer == 42\n"
    )
    return tmp_path


def test_a_projects_tests_come_from_its_checkout(sample_project: Path) -> None:
    sources = Sources(directory=sample_project)
    files = projects.project_files("sample", sources)
    assert [file.name for file in files] == ["sample/sub/test_b", "sample/test_a"]
    assert suites.named_file("sample/test_a", sources) == files[1]
    with pytest.raises(SuiteError, match="no test file sample/test_c; it has sample/sub/test_b"):
        suites.named_file("sample/test_c", sources)
    results = [run_file(file, BARE, timeout=30) for file in files]
    assert [outcomes(each) for each in results] == [{"test_answer": "passed"}, {"test_sum": "passed"}], results


def test_a_checkout_of_another_version_is_refused(sample_project: Path) -> None:
    (sample_project / "sample" / "version.py").write_text("__version__ = '0.0.1'\n")
    with pytest.raises(SuiteError, match=f"holds pytest 0.0.1, installed is {pytest.__version__}"):
        projects.project_files("sample", Sources(directory=sample_project))
    with pytest.raises(SuiteError, match="give --sources a directory with a checkout in sample/"):
        projects.project_files("sample", Sources())
    with pytest.raises(SuiteError, match="at the tag jax-v"):
        suites.files_of(Suite.CORE, Sources())


def test_a_jax_checkout_of_another_version_is_used_if_asked_for(tmp_path: Path) -> None:
    checkout = jax_checkout(tmp_path, "new_test")
    (checkout / "jax" / "version.py").write_text('_version = "0.0.1"\n')
    with pytest.raises(SuiteError, match=r"holds jax 0.0.1, .*--other-version"):
        suites.named_file("new_test", Sources(checkout))
    sources = Sources(checkout, other_version=True)
    assert suites.named_file("new_test", sources).origin == "jax 0.0.1"
    assert empty_report("1x1x8", "atoll,cpu", sources).tests == "0.0.1"


def test_an_embedded_cluster_is_used_unless_a_standing_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_ADDRESS", "10.0.0.1:7000")
    embedded = environments.atoll("1x2x4", "atoll,cpu").variables()
    assert (embedded["ATOLL_ISLANDS"], embedded["ATOLL_ADDRESS"]) == ("1x2x4", "")
    assert environments.atoll("", "atoll,cpu").variables()["ATOLL_ADDRESS"] == "10.0.0.1:7000"


def test_a_file_finds_as_many_devices_on_stock_as_on_an_embedded_cluster() -> None:
    stock, atoll = environments.stock(), environments.atoll("1x1x8", "atoll,cpu")
    four = "flax/nnx/transforms_test"
    assert environments.for_file(four, atoll).settings == {**atoll.settings, "ATOLL_ISLANDS": "1x1x4"}
    assert environments.for_file(four, stock).settings["XLA_FLAGS"].endswith("device_count=4")
    assert environments.for_file("array_test", atoll) is atoll
