"""Tests that generated pages are up to date."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from docs.commands_page import commands

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = sorted(path.stem for path in (ROOT / "docs").glob("*_page.py") if path.stem != "licenses_page")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_page_is_the_one_that_the_code_gives(name: str) -> None:
    module = importlib.import_module(f"docs.{name}")
    assert module.PAGE.read_text() == module.page(), f"run `python -m docs.{name}`"


def test_no_command_has_two_options_of_one_name() -> None:
    names = {name: [each for param in command.params for each in param.opts] for name, command in commands().items()}
    assert {name: each for name, found in names.items() for each in found if found.count(each) > 1} == {}
