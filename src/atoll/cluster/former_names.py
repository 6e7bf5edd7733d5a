"""Names of the previous version that still work in this one: environment variables, options, keys of cluster files.

The documentation and `--help` do not list them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMER_VARIABLES = {"ATOLL_SUSPEND_DIR": "ATOLL_SUSPEND_FOLDER"}
FORMER_OPTIONS = {"suspend-folder": "suspend-directory", "meeting": "coordinator-address"}
FORMER_KEYS = {"suspend_folder": "suspend_directory"}


def present_option(name: str) -> str:
    """Return the present name of an option or a command of `atoll`, without leading dashes."""
    return FORMER_OPTIONS.get(name, name)


def present_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cluster file's content with the present names of its keys, which win over former ones."""
    renamed = {FORMER_KEYS[key]: value for key, value in content.items() if key in FORMER_KEYS}
    return renamed | {key: value for key, value in content.items() if key not in FORMER_KEYS}
