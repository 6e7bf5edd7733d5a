"""Determine the commit of a result."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.harness.backends import ROOT

# The files that affect a result, as pathspecs of git, without pages generated from results.
CODE = ("src/atoll", "benchmarks", "examples", ":!benchmarks/results", ":!*.md")
DIRTY = "+"  # at the end of a commit: with changes that were not committed


def current_commit(root: Path = ROOT) -> str | None:
    """The commit of the code here, with DIRTY where the code differs from it; None where git does not know."""
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *CODE)
    return None if commit is None or changed is None else commit + (DIRTY if changed else "")


def describe_commit(commit: str | None) -> str:
    """Describe the commit of a result, for a page."""
    if commit is None:
        return "of an unknown commit"
    changes = " with changes that were not committed" if commit.endswith(DIRTY) else ""
    return f"commit {commit.removesuffix(DIRTY)[:9]}{changes}"


def _git(root: Path, *arguments: str) -> str | None:
    command = ("git", "-C", str(root), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
