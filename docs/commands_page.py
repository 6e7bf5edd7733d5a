"""Writes reference/commands.md from the command line itself: `python -m docs.commands_page`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from atoll.cluster.settings import SETTINGS
from atoll.operate.command.command_help import sections_of, summary
from atoll.operate.command.command_line import app

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
_CLUSTER_OPTIONS = {f"--{setting.name}" for setting in SETTINGS.values() if setting.is_option} | {"--islands"}
_HEAD = """\
# Commands

<!-- Written by `python -m docs.commands_page` from the command line itself. -->

Every command has `--help`, which shows the same text. The result of a command goes to standard output, all other text
to standard error.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | an error, which one line on standard error describes |
| 2 | an invalid command line |
| 78 | the command would always fail: its address, a setting or persisted data, or another controller has taken over |
| 130 | interrupted, as with Ctrl-C |
| 141 | the reader of standard output has ended, as with `atoll logs \\| head -1` |
| another | `atoll run` has the status of its command, or 126 or 127 if that cannot be executed |

Commands for a running cluster take `--address`, `--join` or `--name`. Without them they use `ATOLL_ADDRESS` or
`ATOLL_JOIN`, the embedded cluster of the script that runs them, the cluster named `default`, or the only running
cluster. The embedded cluster of process 123 has the name `embedded-123`. `atoll down` ends an embedded cluster only by
name or address.
"""
_TABLE = """\
| command | what it does |
|---|---|
"""
_SETTINGS = """\
The [options of clusters](settings.md#clusters) also apply: {}.
"""


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """Return text with the names of options and variables as code."""
    text = re.sub(r"\s+", " ", text).strip()
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = (
        re.sub(r"(?<![\w/-])(--[a-z-]+[a-z]|[A-Z]+_[A-Z_]+[A-Z])(?![\w-])", r"`\1`", part) for part in parts[::2]
    )
    return "".join(parts)


def commands() -> dict[str, Any]:
    """Return each command by its name, such as "tenants set"."""
    found: dict[str, Any] = {}
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        found[name] = command
        for inner, each in getattr(command, "commands", {}).items():
            found[f"{name} {inner}"] = each
    return found


def _shared_options(command: Any) -> list[str]:
    """Return the options of a command that are settings of clusters, if it takes the settings."""
    found = [name for each in command.params for name in each.opts if name in _CLUSTER_OPTIONS]
    return found if "--islands" in found else []


def _options(command: Any) -> list[tuple[str, str]]:
    """Return the names and help of the options of a command, except `_shared_options`."""
    shared = _shared_options(command)
    rows = [row for section in sections_of(command.params).values() for row in section]
    return [
        (", ".join(f"`{each}`" for each in names.replace("|", "\\|").split(", ")), text)
        for names, text in rows
        if names.split()[0] not in shared
    ]


def _section(name: str, command: Any) -> str:
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    text = f"\n## atoll {name}\n\n" + "\n\n".join(_text(part) for part in paragraphs) + "\n"
    rows = _options(command)
    if rows:
        text += "\n| option | meaning |\n|---|---|\n" + "".join(
            f"| {names} | {_cell(help)} |\n" for names, help in rows
        )
    shared = _shared_options(command)
    if shared:
        text += "\n" + _SETTINGS.format(", ".join(f"`{name}`" for name in shared))
    return text


def page() -> str:
    """Return the page."""
    found = commands()
    tables: dict[str, str] = {}
    for name, command in found.items():
        title = found[name.split()[0]].rich_help_panel
        link = f"[`atoll {name}`](#atoll-{name.replace(' ', '-')})"
        tables[title] = tables.get(title, _TABLE) + f"| {link} | {_cell(summary(command))} |\n"
    text = "".join(f"\n{title}:\n\n{rows}" for title, rows in tables.items())
    return _HEAD + text + "".join(_section(name, command) for name, command in found.items())


if __name__ == "__main__":
    PAGE.write_text(page())
