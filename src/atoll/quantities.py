"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def human_bytes(count: int) -> str:
    """`count` in the largest binary unit of which there is one or more: "1.5 GiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Reads "16GiB", "500 MB" or "4096". Raises ValueError for what is no amount of memory."""
    match = _AMOUNT.fullmatch(text)
    if match is not None:
        number, unit = match.groups()
        for names, base in ((_UNITS, 1024), (_DECIMAL, 1000)):
            for power, name in enumerate(names):
                if unit.lower() in (name.lower(), "" if power == 0 else name.lower()):
                    return int(float(number) * base**power)
    raise ValueError(f"{text!r} is no amount of memory: expected a number and a unit, such as 16GiB or 500MB")
