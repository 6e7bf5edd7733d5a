"""Tests that results record their commit, and that the page marks results that are older than the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.provenance import age, current_commit, describe_commit

UNKNOWN = "Whether it is older than the code is unknown"


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._git("init", "--quiet")
        self.commit("src/atoll/core.py", "1")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self, path: str, text: str) -> str:
        self.write(path, text)
        self._git("add", "--all")
        self._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", path)
        found = current_commit(self.root)
        assert found is not None
        return found

    def _git(self, *arguments: str) -> None:
        subprocess.run(("git", "-C", str(self.root), *arguments), check=True, timeout=30)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_result_of_the_code_that_is_there_is_not_old(repository: Repository):
    commit = repository.commit("benchmarks/fig.py", "1")
    assert age(commit, repository.root) == ""
    assert describe_commit(commit) == f"commit {commit[:9]}"


def test_a_result_is_old_once_a_commit_has_changed_the_code(repository: Repository):
    commit = repository.commit("benchmarks/fig.py", "1")
    repository.commit("src/atoll/core.py", "2")
    assert "one commit has changed that since" in age(commit, repository.root)
    repository.commit("benchmarks/fig.py", "2")
    assert "2 commits have changed that since" in age(commit, repository.root)


@pytest.mark.parametrize("path", ["benchmarks/results/fig5.json", "docs/page.md", "benchmarks/README.md", "tests/a.py"])
def test_what_is_no_code_makes_no_result_old(repository: Repository, path: str):
    commit = repository.commit("benchmarks/fig.py", "1")
    repository.commit(path, "2")
    assert age(commit, repository.root) == ""


def test_a_result_says_that_the_code_was_not_committed(repository: Repository):
    repository.write("benchmarks/results/fig5.json", "{}")
    clean = current_commit(repository.root)
    repository.write("src/atoll/core.py", "changed")
    assert current_commit(repository.root) == f"{clean}+"
    assert "not committed" in describe_commit(f"{clean}+")
    assert age(f"{clean}+", repository.root) == ""


def test_a_result_without_a_commit_or_of_a_strange_one_is_of_unknown_age(repository: Repository):
    assert describe_commit(None) == "of an unknown commit"
    assert age(None, repository.root).startswith(UNKNOWN)
    assert age("0" * 40, repository.root).startswith(UNKNOWN)


def test_without_git_nothing_is_claimed(tmp_path: Path):
    assert current_commit(tmp_path) is None
    assert age("0" * 40, tmp_path).startswith(UNKNOWN)
