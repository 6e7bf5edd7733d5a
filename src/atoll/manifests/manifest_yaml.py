"""Manifests as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.errors import SettingsError


def as_yaml(documents: Iterable[dict[str, Any]]) -> str:
    """As people write YAML: without references from one place to another, and with keys in blocks of lines.

    Raises SettingsError where PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise SettingsError("manifests are written with PyYAML: pip install 'atoll[kubernetes]'") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    written: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)
    return written
