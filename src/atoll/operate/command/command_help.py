"""The texts of `atoll --help` and `atoll COMMAND --help`.

`sections_of` has the names, values and texts of a command's options. The help and docs/reference/commands.md both show
these.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from typer.core import TyperCommand, TyperGroup

from atoll.cluster.environment_variables import ADDRESS, JAX_PLATFORMS, JOIN

# Titles of sections of options, which typer.Option(rich_help_panel=) selects.
CHOICE_OF_CLUSTER = "Options that choose the cluster"
CLUSTER_SETTINGS = "Settings of the cluster"
TLS = "TLS options"
_OPTIONS = "Options"
_MAX_COLUMN = 24  # width of the names of options, beyond which the text begins on the next line
_VARIABLES = (JAX_PLATFORMS, ADDRESS, JOIN)


def sections_of(parameters: Iterable[Any]) -> dict[str, list[tuple[str, str]]]:
    """Return the names and texts of arguments and options, by the title of their section."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], _OPTIONS: []}
    for each in parameters:
        if each.param_type_name == "argument":
            sections["Arguments"].append((each.metavar, each.help or ""))
        elif not each.hidden:
            title = getattr(each, "rich_help_panel", None) or _OPTIONS
            sections.setdefault(title, []).append((_names(each), _text(each)))
    return {title: rows for title, rows in sections.items() if rows}


def _names(option: Any) -> str:
    """Return the names of an option, each followed by the form of its value."""
    value = "" if option.is_flag else f" {_value(option)}"
    return ", ".join(f"{name}{value}" for name in (*sorted(option.opts, key=len), *option.secondary_opts))


def _value(option: Any) -> str:
    """Return the form of an option's value: its metavar, or its choices."""
    choices = type(option.default) if isinstance(option.default, Enum) else ()
    return option.metavar or "|".join(str(each.value) for each in choices)


def _text(option: Any) -> str:
    """Return the text of an option with its default, unless it has none or the text describes it."""
    text, default = option.help or "", getattr(option.default, "value", option.default)
    if option.required:
        return f"{text} Required."
    if not default or default is True or "Defaults to" in text:
        return text
    return f"{text} Default: `{default:g}`." if isinstance(default, float) else f"{text} Default: `{default}`."


class HelpCommand(TyperCommand):
    """A command whose help has one section per kind of options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _usage(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, sections_of(self.get_params(ctx)))


class HelpGroup(TyperGroup):
    """A command with subcommands, which the help lists with one line each, by `rich_help_panel`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*_usage(self), "[COMMAND [ARGS]...]" if self.invoke_without_command else "COMMAND [ARGS]..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        width = max(len(name) for name in self.commands)
        for name, command in self.commands.items():
            row = (f"{name:{width}}", summary(command))  # the same width in all sections
            sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(row)
        _write(formatter, sections)
        _write(formatter, sections_of(self.get_params(ctx)))


class MainGroup(HelpGroup):
    """The command `atoll`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        rows = [(each.variable, each.help) for each in _VARIABLES]
        _write(formatter, {"Environment": rows})
        formatter.write_paragraph()
        formatter.write_text('`atoll COMMAND --help` describes a command. The page "Settings" has all variables.')


def summary(command: Any) -> str:
    """Return the first paragraph of the text of a command, in one line."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def _usage(command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    pieces = [f"{each.metavar}{'...' if each.nargs != 1 else ''}" for each in arguments]
    return [
        "[OPTIONS]",
        *(piece if each.required else f"[{piece}]" for piece, each in zip(pieces, arguments, strict=True)),
    ]


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_MAX_COLUMN)
