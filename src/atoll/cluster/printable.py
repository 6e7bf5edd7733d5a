"""Escape control and format characters in text of unknown origin, for terminals, pages and logs.

Otherwise a name or an error text from a client could move an operator's cursor, set the title of a terminal, or show
characters in another order (bidirectional controls).
"""

from __future__ import annotations

from atoll.errors import MAX_TEXT

MAX_NAME = 200
_KEPT = "\n\t"


def printable_name(name: str) -> str:
    """Return a name as one line of at most `MAX_NAME` printable characters."""
    if not name.isprintable():
        name = _escaped(name[:MAX_NAME], "")
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."


def printable_text(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of at most `limit` characters, all printable except line breaks and tabs."""
    if not text.isprintable():
        text = _escaped(text[:limit], _KEPT)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _escaped(text: str, kept: str) -> str:
    return "".join([each if each.isprintable() or each in kept else _escape(each) for each in text])


def _escape(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
