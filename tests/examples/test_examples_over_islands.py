"""Tests that the examples that use all devices run on several islands. `test_gpt` tests the demo there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forked_process import run
from tests.scripts import script_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 600.0
SHAPES = ["2x1x4", "4x1x2"]

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(2 * DEADLINE + 60)]


def output(directory: Path, program_cache: Path, islands: str, name: str, *arguments: str) -> str:
    environment = script_environment(directory, program_cache, islands)
    ended = run([sys.executable, str(EXAMPLES / name), *arguments], env=environment, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    printed: str = ended.stdout
    return printed


@pytest.mark.parametrize("islands", SHAPES)
def test_collectives_complete(short_directory: Path, program_cache: Path, islands: str) -> None:
    printed = output(short_directory, program_cache, islands, "collectives.py", "--calls", "1000")
    assert "1000 AllReduces over 8 devices" in printed
    assert printed.strip().endswith("all right")


@pytest.mark.parametrize("islands", SHAPES)
def test_a_run_with_checkpoints_is_restored(short_directory: Path, program_cache: Path, islands: str) -> None:
    arguments = ["--directory", str(short_directory / "run"), "--every", "3"]
    assert output(short_directory, program_cache, islands, "checkpoints.py", *arguments, "--steps", "7").endswith(
        "done\n"
    )
    printed = output(short_directory, program_cache, islands, "checkpoints.py", *arguments, "--steps", "10")
    assert printed.startswith("restored step 6\n")
    assert printed.endswith("done\n")


@pytest.mark.parametrize("islands", SHAPES)
def test_a_run_with_input_on_the_hosts_ends(short_directory: Path, program_cache: Path, islands: str) -> None:
    output(
        short_directory,
        program_cache,
        islands,
        "restart.py",
        str(short_directory / "run"),
        "--steps",
        "7",
        "--every",
        "3",
    )
    assert len((short_directory / "run" / "losses").read_text().splitlines()) == 7
