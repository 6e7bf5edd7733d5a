"""Tests that several processes run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = """
import os
import pytest
from tests.processes import Processes

def pytest_addoption(parser):
    parser.addoption("--processes", type=int)

def pytest_configure(config):
    config.pluginmanager.register(Processes(config, lambda: None, lambda: None))

@pytest.fixture(scope="session")
def process():
    yield os.getpid()
    with open("ended", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
# Each file records the process in which it runs. The files end at the same time.
FILE = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(process, number):
    with open(__file__ + ".ran", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
# Fails once the other one sleeps.
FAILS = """
import os, time

def test_fails(process):
    print("printed by the test")
    while not os.path.exists("sleeps"):
        time.sleep(0.01)
    assert 6 * 9 == 42
"""
SLEEPS = """
import time

def test_sleeps(process):
    open("sleeps", "w").close()
    time.sleep(600)
"""


def run(directory: Path, *arguments: str, **files: str) -> str:
    """Return what pytest prints."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n together(name)\n cluster\n")
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--processes", "2", *arguments]
    return subprocess.run(
        command, cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_tests_of_a_file_share_a_process_whose_fixtures_end_with_it(tmp_path: Path) -> None:
    printed = run(tmp_path, a=FILE, b=FILE, c=FILE)
    assert "9 passed" in printed, printed
    ran = [(tmp_path / f"test_{name}.py.ran").read_text().split() for name in "abc"]
    assert [len(each) for each in ran] == [3, 3, 3]
    assert [len(set(each)) for each in ran] == [1, 1, 1]
    assert sorted((tmp_path / "ended").read_text().split()) == sorted({each[0] for each in ran})


def test_one_process_begins_with_files_that_compute_and_the_others_with_those_that_wait(tmp_path: Path) -> None:
    waits = FILE.replace("range(3)", "[0, pytest.param(1, marks=pytest.mark.cluster)]")

    def until_there_is(other: str, text: str) -> str:
        """Have tests create a file with the name of their module, and wait for that of another one."""
        return f"""{text}
    import time
    open(__name__, 'w').close()
    end = time.monotonic() + 30
    while not os.path.exists('test_{other}'):
        assert time.monotonic() < end
"""

    # Two processes that both begin with tests of one kind wait for ever.
    files = {
        **{name: until_there_is("computes", waits) for name in ("waits", "waits_later")},
        **{name: until_there_is("waits", FILE) for name in ("computes", "computes_later")},
    }
    printed = run(tmp_path, **files)
    assert "10 passed" in printed, printed


@pytest.mark.thorough
def test_files_with_the_same_name_share_a_process(tmp_path: Path) -> None:
    together = FILE.replace("range(3)", "[0, pytest.param(1, marks=pytest.mark.together('these')), 2]")
    printed = run(tmp_path, a=together, b=FILE, c=FILE, d=together)
    assert "12 passed" in printed, printed
    ran = {name: (tmp_path / f"test_{name}.py.ran").read_text().split() for name in "abcd"}
    assert [len(set(each)) for each in ran.values()] == [1, 1, 1, 1]
    assert ran["a"] == ran["d"]


def test_a_test_that_ends_its_process_fails_and_the_others_run(tmp_path: Path) -> None:
    ends = "import os\ndef test_before(): pass\ndef test_ends(): os._exit(7)\ndef test_after(): pass\n"
    printed = run(tmp_path, a=ends, b=FILE)
    assert re.search(r"1 failed, 5 passed", printed), printed
    assert "test_ends" in printed
    assert "the process that ran this test ended with status 7" in printed


@pytest.mark.thorough
def test_a_failure_is_shown_and_ends_the_run_if_it_should(tmp_path: Path) -> None:
    printed = run(tmp_path, "-x", a=FAILS, b=SLEEPS)
    assert "assert (6 * 9) == 42" in printed, printed
    assert "printed by the test" in printed
    assert "1 failed" in printed
    assert len((tmp_path / "ended").read_text().split()) == 2


@pytest.mark.thorough
def test_what_fails_at_the_end_of_a_process_is_an_error(tmp_path: Path) -> None:
    ends = (
        "import pytest\n@pytest.fixture(scope='session')\ndef end():\n    yield\n    raise ValueError('at the end')\n"
    )
    printed = run(tmp_path, a=ends + "def test_it(end): pass\n", b=FILE)
    assert "4 passed, 1 error" in printed, printed
    assert "ValueError: at the end" in printed
