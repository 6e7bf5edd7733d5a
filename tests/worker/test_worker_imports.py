"""Tests of a worker's imports: null devices do not import JAX, and the common parts import no kind of device."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import atoll.worker

DIRECTORY = Path(atoll.worker.__file__).parent
COMMON = sorted(path for path in DIRECTORY.glob("*.py"))
WITHOUT_JAX = sorted(
    "atoll.worker." + ".".join(path.relative_to(DIRECTORY).with_suffix("").parts)
    for path in (*DIRECTORY.glob("*.py"), *(DIRECTORY / "null").glob("*.py"))
    if path.stem != "__init__"
)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", COMMON, ids=lambda path: path.name)
def test_what_is_common_to_all_kinds_of_devices_imports_none_of_them(path: Path) -> None:
    kinds = tuple(
        f"atoll.worker.{directory.name}" for directory in DIRECTORY.iterdir() if (directory / "backend.py").exists()
    )
    assert not [name for name in imports(path) if name.startswith((*kinds, "jax"))]


def test_a_process_of_null_hosts_and_a_worker_before_it_opens_its_devices_import_no_jax() -> None:
    code = (
        f"import importlib, sys\nfor name in {WITHOUT_JAX!r}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.stdout.strip(), ended.returncode) == ("[]", 0), ended.stderr
