"""Atoll works with the oldest Python and JAX that it supports, in an environment with its core dependencies only.

The suite probes JAX for each patch, and runs a program with a callback. `make thorough` runs all tests of the patches,
and a script's first use of each part of JAX. `make matrix` runs far more tests with each supported version, and with
the optional packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATCHES = "tests/client/jax_patches"
FIRST_USES = "tests/end_to_end/test_first_uses.py"
SHORT = (f"{PATCHES}/test_probes.py", f"{FIRST_USES}::test_a_first_use_is_as_later_ones[a_callback-2.0]")


@pytest.mark.slow
@pytest.mark.parametrize("tests", [SHORT, pytest.param((PATCHES, FIRST_USES), marks=pytest.mark.thorough)])
def test_the_oldest_python_and_jax_run_the_tests_of_the_patches_and_first_uses(
    tmp_path: Path, tests: tuple[str, ...]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [python] = re.findall(r">=([\d.]+)", project["requires-python"])
    [jax] = [match[1] for each in project["dependencies"] if (match := re.match(r"jax>=([\d.]+)", each))]
    [pytest_, timeout, hypothesis, psutil] = [
        each
        for each in project["optional-dependencies"]["test"]
        if re.split(r"\W", each)[0] in {"pytest", "hypothesis", "psutil"}
    ]
    if sys.version_info[:2] == tuple(map(int, python.split("."))) and importlib.metadata.version("jax") == jax:
        pytest.skip("the suite itself runs with the oldest versions")
    found = subprocess.run([ROOT / "scripts" / "find-python", f"python{python}"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"Python {python} is not installed")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "PYTEST_", "PYTHON"))
    }
    own = str(tmp_path / "bin" / "python")

    def run(*command: str) -> str:
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
        return ended.stdout

    run(found.stdout.strip(), "-m", "venv", "--without-pip", str(tmp_path))
    pip = (sys.executable, "-m", "pip", "--python", own, "install", "--quiet", "--disable-pip-version-check")
    requirements = (f"jax=={jax}", f"jaxlib=={jax}", pytest_, timeout, hypothesis, psutil)
    run(*pip, "--no-compile", "--editable", ".", *requirements)
    assert run(own, "-c", "import jax; print(jax.__version__)").strip() == jax
    assert " passed" in run(own, "-m", "pytest", "-x", *tests)
