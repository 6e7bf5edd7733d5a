"""The place that a validation error of msgspec names, for errors about files that users write."""

from __future__ import annotations

import re

_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>.*)`$", re.DOTALL)


def split_place(text: str) -> tuple[str, str]:
    """Return the problem and the key that the text of an error names, such as "island[0].hosts"; "" for the whole."""
    found = _PLACE.match(text)
    return (found["what"], found["where"]) if found else (text, "")
