"""Tests of the help texts of the command `atoll`."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from atoll.operate.command.command_help import sections_of, summary
from atoll.operate.command.command_line import app
from docs.commands_page import commands

COMMANDS = commands()
WIDTH = 80


def help_of(*command: str) -> str:
    ran = CliRunner().invoke(app, [*command, "--help"], prog_name="atoll", env={"COLUMNS": str(WIDTH)})
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_each_command_has_one_line_in_a_section() -> None:
    text = help_of()
    _, *sections = text.split("\n\n")
    rows = [line for section in sections for line in section.splitlines()[1:] if section[:1] != " "]
    names = {name for name in COMMANDS if " " not in name}
    listed = [line.split()[0] for line in rows if line.split()[0] in names]
    assert sorted(listed) == sorted(names)
    for name in names:
        assert re.search(rf"^  {name} +{re.escape(summary(COMMANDS[name]))}$", text, re.MULTILINE), name


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_help_text_fits_on_a_terminal(name: str) -> None:
    assert [line for line in help_of(*name.split()).splitlines() if len(line) > WIDTH] == []


def test_the_form_of_each_value_is_a_word_in_capitals_or_the_choices() -> None:
    forms = {
        (command, names.split(", ")[-1].partition(" ")[2])
        for command, found in COMMANDS.items()
        for rows in sections_of(each for each in found.params if not getattr(each, "is_flag", False)).values()
        for names, _ in rows
        if names.startswith("-")
    }
    assert len(forms) > 100
    assert {each for each in forms if not re.match(r"N$|[A-Z]{2}|[a-z-]+\|", each[1])} == set()


def test_a_flag_has_no_value_and_an_option_names_its_own() -> None:
    text = help_of("down")
    assert re.search(r"^  --all  +Also end", text, re.MULTILINE)
    assert re.search(r"^  --address ADDRESS  ", text, re.MULTILINE)
    assert re.search(r"^  -h, --help  ", text, re.MULTILINE)


def test_a_required_option_and_a_default_are_named() -> None:
    assert "Required." in help_of("kubernetes")
    assert "Default: `25`." in help_of("host")


def test_no_command_has_the_help_of_typer() -> None:
    text = "\n".join(help_of(*name.split()) for name in COMMANDS)
    assert re.findall(r"<\w+>|\[default", text) == []
