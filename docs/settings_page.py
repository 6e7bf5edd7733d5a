"""Writes reference/settings.md from the tables of settings: `python -m docs.settings_page`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from atoll.cluster.environment_variables import TABLES
from atoll.cluster.setting_forms import Setting
from atoll.cluster.settings import SETTINGS, default_text

PAGE = Path(__file__).resolve().parent / "reference" / "settings.md"
_NAME = re.compile(r"(?<![\w/-])(--[a-z-]+[a-z]|[A-Z]+_[A-Z_]+[A-Z])(?![\w-])")
_HEAD = """\
# Settings

<!-- Written by `python -m docs.settings_page` from `cluster/settings.py` and `cluster/environment_variables.py`. -->

An environment variable that is set to "" counts as not set. Errors name the variable, the option, or the file and key
of an invalid value. Scripts and commands print a line for a variable that is almost named as one of these.

## Clusters

The settings of a cluster apply when it starts. `atoll run`, `atoll up`, `atoll proxy`, `atoll kubernetes` and `atoll
slurm` have the options, which take precedence over the keys of a
[cluster file](../operate/clusters.md#islands-that-differ). The keys take precedence over the variables.
"""
_TAIL = """
All processes listen on unix sockets. With `atoll up --listen HOST:PORT` they use TCP with TLS
([security](../design/security.md#security-of-connections)).
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _marked(text: str) -> str:
    """Set options and variables as code, except where the text does that already."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = (
        re.sub(r"(?<![\w/-])(--[a-z-]+[a-z]|[A-Z]+_[A-Z_]+[A-Z])(?![\w-])", r"`\1`", part) for part in parts[::2]
    )
    return "".join(parts)


def _meaning(setting: Setting[Any]) -> str:
    several = "Several are separated by colons." if setting.form.check_item else ""
    text = _marked(" ".join(filter(None, (setting.help, several, setting.more))))
    return text.replace("](", "](../")  # links are relative to docs/


def _default(name: str) -> str:
    default = default_text(name)
    return _marked(default) if SETTINGS[name].default else _code(default)


def page() -> str:
    """Return the page."""
    text = _HEAD + "\n" + _row("variable", "option", "key", "meaning", "default") + "|---|---|---|---|---|\n"
    for name, setting in SETTINGS.items():
        option = f"--{setting.name}" if setting.is_option and setting.name else ""
        if name == "islands":
            option = "--islands"
        text += _row(*map(_code, (setting.variable, option, setting.key)), _meaning(setting), _default(name))
    for table in TABLES:
        text += f"\n## {table.title}\n\n" + _row("variable", "meaning", "default") + "|---|---|---|\n"
        for setting in table.settings:
            text += _row(_code(setting.variable), _meaning(setting), _marked(setting.default))
    return text + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
