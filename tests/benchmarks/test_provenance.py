"""Tests that results record the commit of their code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.provenance import current_commit, describe_commit


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


def test_a_result_names_the_commit_of_the_code(repository: Repository):
    commit = repository.commit("benchmarks/fig.py", "1")
    assert describe_commit(commit) == f"commit {commit[:9]}"


@pytest.mark.parametrize("path", ["benchmarks/results/fig5.json", "docs/page.md", "benchmarks/README.md", "tests/a.py"])
def test_changes_of_files_other_than_code_do_not_count(repository: Repository, path: str):
    commit = repository.commit("benchmarks/fig.py", "1")
    repository.write(path, "2")
    assert current_commit(repository.root) == commit


def test_a_result_says_that_the_code_was_not_committed(repository: Repository):
    repository.write("benchmarks/results/fig5.json", "{}")
    clean = current_commit(repository.root)
    repository.write("src/atoll/core.py", "changed")
    assert current_commit(repository.root) == f"{clean}+"
    assert "not committed" in describe_commit(f"{clean}+")


def test_without_git_nothing_is_claimed(tmp_path: Path):
    assert current_commit(tmp_path) is None
    assert describe_commit(None) == "of an unknown commit"
