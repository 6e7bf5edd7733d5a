"""Make the guides' extensions in a copy of the source tree, as instructed: one new file, its test, and one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDES = ROOT / "docs" / "contribute"
EXTENSIONS = ("policy", "engine", "transfer-kind", "device-kind", "pass")


@dataclass(frozen=True)
class Block:
    """Fenced block of a guide whose first line is a comment that names a file."""

    language: str
    path: str
    text: str


def blocks(guide: str) -> list[Block]:
    page = (GUIDES / f"{guide}.md").read_text()
    found = re.findall(r"^```(python|diff)\n# (\S+\.py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [Block(language, path, text.lstrip("\n")) for language, path, text in found]


def patched(source: str, diff: str) -> str:
    """Return the file with the diff's added lines after the lines that precede them there."""
    before = "".join(line[1:] for line in diff.splitlines(keepends=True) if line.startswith(" "))
    after = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in " +")
    assert source.count(before) == 1, f"the lines of the guide's diff are not in the file once:\n{before}"
    return source.replace(before, after)


@pytest.mark.parametrize("guide", EXTENSIONS)
def test_an_extension_is_one_file_its_test_and_one_line(guide: str) -> None:
    new = [block.path for block in blocks(guide) if block.language == "python"]
    changed = [block for block in blocks(guide) if block.language == "diff"]
    assert len([path for path in new if path.startswith("src/")]) == 1
    assert len([path for path in new if path.startswith("tests/")]) == 1
    assert [line for block in changed for line in block.text.splitlines() if line.startswith("-")] == []
    assert len([line for block in changed for line in block.text.splitlines() if line.startswith("+")]) == 1
    assert [path for path in new if (ROOT / path).exists()] == []
    assert [path for path in new if not (ROOT / path).parent.is_dir()] == []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bool], str]:
    """Make all extensions in one copy. Return whether the tests in each extension's file pass, and pytest's output."""
    copy = tmp_path_factory.mktemp("extended")
    for directory in ("src", "tests"):
        shutil.copytree(ROOT / directory, copy / directory)
    shutil.copy(ROOT / "pyproject.toml", copy)
    tests = []
    for block in (each for guide in EXTENSIONS for each in blocks(guide)):
        target = copy / block.path
        target.write_text(block.text if block.language == "python" else patched(target.read_text(), block.text))
        tests += [block.path] if block.path.startswith("tests/") else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(copy / "src"), str(copy)))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = re.findall(r"^(PASSED|FAILED|ERROR) (\S+?\.py)", ran.stdout, re.MULTILINE)
    passed, not_passed = ({path for word, path in output if (word == "PASSED") == is_one} for is_one in (True, False))
    return {path: path in passed and path not in not_passed for path in tests}, ran.stdout[-8000:]


@pytest.mark.thorough
@pytest.mark.parametrize("guide", EXTENSIONS)
def test_the_extension_of_a_guide_works(guide: str, outcomes: tuple[dict[str, bool], str]) -> None:
    passes, output = outcomes
    (test,) = [block.path for block in blocks(guide) if block.path.startswith("tests/")]
    assert passes[test], output


@pytest.mark.parametrize("guide", EXTENSIONS)
def test_the_extension_of_a_guide_is_clean(guide: str) -> None:
    for block in blocks(guide):
        if block.language == "python":
            checked = subprocess.run(
                [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "I", "-"],
                input=block.text,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert checked.returncode == 0, checked.stdout
