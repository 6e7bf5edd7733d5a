"""The pages that are written from code are those that the code gives."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = sorted(path.stem for path in (ROOT / "docs").glob("*_page.py") if path.stem != "licenses_page")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_page_is_the_one_that_the_code_gives(name: str) -> None:
    module = importlib.import_module(f"docs.{name}")
    assert module.PAGE.read_text() == module.page(), f"run `python -m docs.{name}`"
