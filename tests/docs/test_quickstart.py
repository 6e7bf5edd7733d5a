"""The commands of the quickstart, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes that import JAX, one after the other
def test_the_quickstart_runs_from_its_first_command_to_its_last(tmp_path: Path, short_directory: Path) -> None:
    commands = "\n".join(blocks("sh"))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "JAX_"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if path),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(short_directory),
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    shown = [re.escape(block).replace(re.escape("..."), ".*") for block in blocks("text")]
    assert re.fullmatch(".*".join(shown) + ".*", ran.stdout, re.DOTALL), ran.stdout
    assert (tmp_path / "trace.json").stat().st_size > 0
