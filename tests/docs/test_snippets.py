"""Run the Python blocks of README and of the guides, and compare their outputs with those on the pages."""

from __future__ import annotations

import doctest
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.reader import environment_of_reader
from tests.docs.snippets import snippets_of
from tests.forked_process import run

ROOT = Path(__file__).resolve().parents[2]
# Tests of these subjects run similar programs, because the blocks need more than an ordinary environment.
NOT_RUN = {
    "needs the compiled library": "tests/end_to_end/test_ffi_libraries.py",
    "needs a checkout of Shardy": "tests/end_to_end/test_mpmd.py",
    "needs TensorFlow": "tests/tensorflow",
    "needs matplotlib": "tests/pipelines/test_schedule.py",
    "a fragment of a model": "tests/end_to_end/pipelines",
    "needs several scripts": "tests/examples/test_grpo.py",
    "needs Tunix": "tests/examples/test_tunix_weight_sync.py",
    "needs the loop of a worker": "tests/end_to_end/test_arrays_between_scripts.py",
}


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *(page for part in ("start", "guides") for page in (ROOT / "docs" / part).glob("*.md"))]


def pages() -> list[Path]:
    """Return the pages with blocks to run here, starting with those that connect by themselves."""
    found = [page for page in all_pages() if any(each.is_run for each in snippets_of(page))]
    return sorted(found, key=lambda page: ("atoll.connect(" not in page.read_text(), page.name))


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[str] | str]:
    """Run all blocks in one process, on one embedded cluster. Return the outputs of each page."""
    environment = environment_of_reader()
    with tempfile.TemporaryDirectory() as directory:
        ran = run(
            [sys.executable, str(Path(__file__).with_name("run_snippets.py")), *map(str, pages())],
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
                "XDG_RUNTIME_DIR": directory,
            },
            timeout=500.0,
        )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str] | str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page: Path, outputs: dict[str, list[str] | str]) -> None:
    printed = outputs[str(page)]
    assert isinstance(printed, list), printed
    run = [each for each in snippets_of(page) if each.is_run]
    checker = doctest.OutputChecker()
    for snippet, output in zip(run, printed, strict=True):
        shown = snippet.output or ""
        assert checker.check_output(shown, output, doctest.ELLIPSIS), (
            f"{page.name}:{snippet.line} shows\n{shown}\nand printed\n{output}"
        )


def test_no_block_prints_only_whether_something_is_so() -> None:
    """A reader learns nothing from the word True: the block prints the value, such as the text of an error."""
    shown = {f"{page.name}:{each.line}": each.output for page in all_pages() for each in snippets_of(page)}
    assert [where for where, output in shown.items() if (output or "").strip() in ("True", "False")] == []


def test_each_block_that_is_not_run_has_a_known_reason() -> None:
    reasons = {each.reason for page in all_pages() for each in snippets_of(page) if each.reason}
    assert reasons == set(NOT_RUN)


@pytest.mark.parametrize("test", NOT_RUN.values())
def test_the_tests_that_stand_in_exist(test: str) -> None:
    assert (ROOT / test).exists()
