"""The devices to which a slice migrates, as people write them: an island, and optionally its devices."""

from __future__ import annotations

_MAX_DEVICES = 1 << 16  # per slice


def read_migration_target(text: str) -> tuple[int, tuple[int, ...]]:
    """Return the island and the devices of a text such as 1, 1:4,5 or 1:4-7. Raises ValueError."""
    island, _, rest = text.strip().partition(":")
    devices: list[int] = []
    try:
        for part in rest.split(",") if rest else []:
            first, dash, last = part.partition("-")
            start, end = _number(first), _number(last if dash else first)
            if not 0 <= end - start < _MAX_DEVICES - len(devices):
                raise ValueError
            devices.extend(range(start, end + 1))
        if ":" in text and not devices:
            raise ValueError
        return _number(island), tuple(devices)
    except ValueError:
        raise ValueError(
            f"invalid target {text!r}: expected an island and optionally its devices, such as 1, 1:4,5 or 1:4-7"
        ) from None


def _number(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal()):
        raise ValueError
    return int(text)
