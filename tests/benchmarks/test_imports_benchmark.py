"""Tests that Atoll does not import its benchmarks, which are not in the wheel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import atoll
from tests.prose import nodes_of

pytestmark = pytest.mark.together("sources")


def test_no_module_of_atoll_imports_benchmarks():
    modules = list(Path(atoll.__file__).parent.rglob("*.py"))
    assert len(modules) > 100
    for module in modules:
        for node in nodes_of(module):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] in ("benchmarks", "tests", "examples") for name in names), module
