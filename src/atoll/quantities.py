"""Numbers, amounts of memory and times as text, such as "1 launch", "1.5 GiB" and "10 min"."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def noun_for(count: float, singular: str, plural: str = "") -> str:
    """Return the noun for a number of things. Without `plural`, the plural ends with "s", or "es" as in "launches"."""
    if count == 1:
        return singular
    return plural or singular + ("es" if singular.endswith(("s", "x", "ch", "sh")) else "s")


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 launch" or "2 launches", as `noun_for` does."""
    return f"{count} {noun_for(count, singular, plural)}"


def human_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that does not exceed it, such as "1.5 GiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def exact_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit of which it is a multiple, such as "8GiB", for `parse_bytes`."""
    power = next(each for each in reversed(range(len(_UNITS))) if count % 1024**each == 0) if count else 0
    return f"{count // 1024**power}{_UNITS[power]}"


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


_SECONDS = {"s": 1, "min": 60, "h": 3600, "day": 86_400}
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_SPAN_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def human_seconds(seconds: float) -> str:
    """Return a time in the largest unit that does not exceed it, such as "40 s", "5 min", "1.5 h" or "2 days"."""
    unit = max((each for each in _SECONDS if seconds >= _SECONDS[each]), key=_SECONDS.__getitem__, default="s")
    count = seconds / _SECONDS[unit]
    if unit in ("s", "min"):
        return f"{count:.0f} {unit}"
    count = round(count, 0 if count >= 10 else 1)
    return f"{count:g} {unit if unit == 'h' else noun_for(count, unit)}"


def parse_seconds(text: str) -> float:
    """Parse a time span such as "90s", "10m", "1h", "7d" or "4w". Raise ValueError for any other text, and for 0."""
    found = _SPAN.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not a time span: expected a number and a unit, such as 90s, 10m, 1h, 7d or 4w")
    return float(found[1]) * _SPAN_SECONDS[found[2]]
