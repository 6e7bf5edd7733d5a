"""Tables of results on pages of the documentation, each between two markers."""

from __future__ import annotations

from pathlib import Path


def between(text: str, begin: str, end: str) -> str:
    """Return the part of a page's text between two markers. Raise ValueError if one is missing."""
    _, found_begin, rest = text.partition(begin)
    found, found_end, _ = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks the markers {begin} and {end}")
    return found


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Replace the part of a page between two markers. Raise ValueError if one is missing."""
    text = page.read_text()
    page.write_text(text.replace(f"{begin}{between(text, begin, end)}{end}", f"{begin}\n\n{table}\n\n{end}"))
