"""HTTP/2 and gRPC are packages of their own: they import nothing else of Atoll, and their arrows run one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import atoll.wire

ROOT = Path(atoll.wire.__file__).parent
MODULES = sorted(path for room in ("http2", "grpc") for path in (ROOT / room).glob("*.py"))


def imports_of(path: Path) -> set[str]:
    """The modules of Atoll that a file imports, for types included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} has a relative import"
            module = node.module or ""
            names.update(
                f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module for alias in node.names
            )
    return {name for name in names if name.split(".")[0] == "atoll"}


def is_module(name: str) -> bool:
    path = ROOT.parent.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def name_of(path: Path) -> str:
    return f"atoll.wire.{path.parent.name}" + ("" if path.stem == "__init__" else f".{path.stem}")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_nothing_else_of_atoll(path: Path) -> None:
    allowed = ("atoll.grpc.http2",) if path.parent.name == "http2" else ("atoll.grpc.http2", "atoll.grpc")
    assert {name for name in imports_of(path) if not name.startswith(allowed)} == set()


def test_imports_run_in_no_circle() -> None:
    graph = {name_of(path): imports_of(path) for path in MODULES}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}, "these modules import one another"
