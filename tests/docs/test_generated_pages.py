"""Tests that generated pages are up to date."""

from __future__ import annotations

import importlib
import re
import typing
from pathlib import Path

import pytest

from atoll.protocol.permissions import COMMANDS
from docs import commands_page, status_page
from docs.commands_page import commands

pytestmark = pytest.mark.together("messages")

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = sorted(path.stem for path in (ROOT / "docs").glob("*_page.py") if path.stem != "licenses_page")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_page_is_the_one_that_the_code_gives(name: str) -> None:
    module = importlib.import_module(f"docs.{name}")
    assert module.PAGE.read_text() == module.page(), f"run `make pages`, or `python -m docs.{name}` for this one"


def test_each_field_of_the_status_report_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", status_page.PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 150
    assert [field for field, meaning in rows if not meaning.strip()] == []


def test_the_status_report_has_a_section_for_each_object() -> None:
    titles = status_page.sections()
    for struct in titles:
        for kind in typing.get_type_hints(struct).values():
            assert set(status_page.structs_in(kind)) <= set(titles), struct


def test_the_permissions_list_each_command_that_asks_a_controller() -> None:
    others = {"run", "attach", "up", "host", "kubernetes", "slurm", "alerts", "dashboard", "logs", "replay", "proxy"}
    assert {f"atoll {name}" for name in set(commands()) - others} == set(COMMANDS)


def test_no_command_has_two_options_of_one_name() -> None:
    names = {name: [each for param in command.params for each in param.opts] for name, command in commands().items()}
    assert {name: each for name, found in names.items() for each in found if found.count(each) > 1} == {}


def test_the_page_of_commands_has_the_options_of_each_command() -> None:
    """Settings of clusters are on the page of settings, if the command takes all of them."""
    _, *sections = commands_page.PAGE.read_text().split("\n## atoll ")
    texts = {section.partition("\n")[0]: section for section in sections}
    for name, command in commands().items():
        options = {each for param in command.params if not param.hidden for each in param.opts if each[:2] == "--"}
        assert {each for each in options - {"--help"} if f"`{each}" not in texts[name]} == set(), name


def test_options_with_values_in_the_text_of_the_page_of_commands_are_one_span_of_code() -> None:
    page = commands_page.PAGE.read_text()
    assert re.findall(r"`--[a-z-]+` (?:local|hosts|ray)\b|`--[a-z-]+`=\S*", page) == []


def test_the_page_of_commands_has_choices_and_defaults() -> None:
    page = commands_page.PAGE.read_text()
    assert (
        "| `--to memory\\|disk` | Destination of the arrays: the hosts' memory or disks. Default: `memory`. |" in page
    )
    assert re.search(r"^\| `--grace SECONDS` \| .* Default: `25`. \|$", page, re.MULTILINE)


def test_commands_in_the_text_of_the_page_of_commands_can_be_copied() -> None:
    lines = commands_page.PAGE.read_text().splitlines()
    assert [line for line in lines if "\\|" in line and not line.startswith("|")] == []
