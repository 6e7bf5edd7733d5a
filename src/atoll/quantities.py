"""Amounts of memory as text, such as "1.5 GiB"."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def human_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that does not exceed it, such as "1.5 GiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Parse text such as "16GiB", "500 MB" or "4096". Raise ValueError for any other text."""
    match = _AMOUNT.fullmatch(text)
    if match is not None:
        number, unit = match.groups()
        for names, base in ((_UNITS, 1024), (_DECIMAL, 1000)):
            for power, name in enumerate(names):
                if unit.lower() in (name.lower(), "" if power == 0 else name.lower()):
                    return int(float(number) * base**power)
    raise ValueError(f"{text!r} is not an amount of memory: expected a number and a unit, such as 16GiB or 500MB")
