"""Writes project/licenses.md from the metadata of installed packages: `python -m docs.licenses_page`."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "project" / "licenses.md"
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# Extras for users. The others are for work on Atoll, and no file of them is distributed.
EXTRAS = ("checkpoints", "data", "demo", "kubernetes", "metrics", "plot", "ray", "tensorflow", "web")
# Packages that may be missing where the page is written, because they take gigabytes, or that name no license.
_KNOWN = {
    "ray": "Apache-2.0",
    "tensorflow-cpu": "Apache-2.0",
    "tensorflow": "Apache-2.0",
    "keras": "Apache-2.0",
    "grain": "Apache-2.0",
}
_HEAD = """\
# Licenses

<!-- Written by `python -m docs.licenses_page` from pyproject.toml and the packages' metadata. -->

Atoll has the license Apache-2.0. Its wheel contains no code of other projects. The table lists the packages that it
needs, with the licenses that their metadata names. [Installation](../start/installation.md#extras) describes the
extras.

| package | needed for | license |
|---|---|---|
"""


def name_of(requirement: str) -> str:
    """Return the name of a requirement's package, in lower case."""
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return name.lower().replace("_", "-")


def needed() -> dict[str, list[str]]:
    """Return what each direct dependency is needed for, by its name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    found: dict[str, list[str]] = {}
    for use, requirements in (
        ("always", project["dependencies"]),
        *((f"`{extra}`", project["optional-dependencies"][extra]) for extra in EXTRAS),
    ):
        for requirement in requirements:
            if not requirement.startswith("atoll["):
                found.setdefault(name_of(requirement), []).append(use)
    return found


def license_of(name: str) -> str:
    """Return the license that the metadata of a package names, in SPDX form if it does."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return _KNOWN[name]
    expression = about.get("License-Expression") or ""
    classifiers = [
        each.split(" :: ")[-1] for each in about.get_all("Classifier") or () if each.startswith("License ::")
    ]
    text = (about.get("License") or "").strip()
    return (
        expression
        or _KNOWN.get(name)
        or (text if text and "\n" not in text and len(text) < 60 else ", ".join(classifiers))
    )


def page() -> str:
    """Return the page."""
    rows = [f"| {name} | {', '.join(uses)} | {license_of(name)} |\n" for name, uses in sorted(needed().items())]
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
