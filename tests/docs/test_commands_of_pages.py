"""Run the shell commands of pages for new users unmodified."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reader import environment_of_reader
from tests.forked_process import with_forked_children

ROOT = Path(__file__).resolve().parent.parent.parent
# The command `python` of the shell. It forks the process of a script from the server of the tests.
PYTHON = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
'''
import os, subprocess, sys

arguments = [os.path.abspath(each) if each.endswith(".py") else each for each in sys.argv[1:]]
sys.exit(subprocess.Popen([sys.executable, *arguments]).wait())
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(commands: str, directory: Path, runtime: Path) -> str:
    """Return the standard output of these commands."""
    python = runtime / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o700)
    environment = {
        **environment_of_reader(),
        "PATH": f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if path),
        "HOME": str(directory),
        "XDG_RUNTIME_DIR": str(runtime),
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=directory,
        env=with_forked_children(environment),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def shows(printed: str, expected: list[str]) -> bool:
    """Return whether the blocks of output appear in this order.

    "..." stands for any text, and for any number of lines if it is a line.
    """
    lines, text = re.escape("\n...\n"), re.escape("...")
    patterns = (re.escape(block).replace(lines, "\n(?:.*\n)?").replace(text, ".*") for block in expected)
    return re.fullmatch(f".*{'.*'.join(patterns)}.*", printed, re.DOTALL) is not None


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen consecutive processes that import JAX
def test_the_quickstart_runs_from_its_first_command_to_its_last(tmp_path: Path, short_directory: Path) -> None:
    page = "start/quickstart.md"
    printed = run("\n".join(blocks(page, "sh")), tmp_path, short_directory)
    assert shows(printed, blocks(page, "text")), printed
    assert (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.thorough  # `test_command` has a proxy run a command, and serve scripts of Google's client
def test_pathways_mode_in_ci_needs_only_the_commands_of_the_guide(tmp_path: Path, short_directory: Path) -> None:
    page = "guides/pathwaysutils.md"
    printed = run(blocks(page, "sh")[-1], tmp_path, short_directory)
    assert shows(printed, blocks(page, "text")), printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_continues_after_a_lost_worker_as_the_guide_shows(tmp_path: Path, short_directory: Path) -> None:
    page = "guides/failures.md"
    printed = run("\n".join(blocks(page, "sh")), tmp_path, short_directory)
    assert shows(printed, blocks(page, "text")), printed
