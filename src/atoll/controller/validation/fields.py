"""Checks of single fields of messages. They raise a `violation`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sized
from typing import Any

from atoll.errors import MAX_TEXT, Code, Status, StatusError
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import first_of_others

# Bound of the numbers that clients choose for programs, functions, waits and the like. Negative ones are internal.
MAX_NUMBER = 1 << 62

_MAX_PAYLOADS = 16
_MAX_PAYLOAD_BYTES = 1 << 20
_MAX_SHOWN = 80  # characters of a value in an error
_CODES = frozenset(map(int, Code))


def violation(message: Any, field: str, value: Any, expected: str) -> StatusError:
    """Return the error for a value that no correct sender puts into a field."""
    shown = repr(value)
    if len(shown) > _MAX_SHOWN:
        shown = shown[:_MAX_SHOWN] + "..."
    return StatusError(Code.INVALID_ARGUMENT, f"{type(message).__name__}.{field} is {shown}: expected {expected}")


def check_number(message: Any, field: str, limit: int = MAX_NUMBER) -> None:
    value = getattr(message, field)
    if not 0 <= value < limit:
        raise violation(message, field, value, f"0 to {limit - 1}")


def check_new(message: Any, field: str, *taken: Collection[int]) -> None:
    """Check a number that the sender assigns to something new."""
    check_number(message, field)
    value = getattr(message, field)
    if any(value in some for some in taken):
        raise violation(message, field, value, "a number that is not in use")


def check_count(message: Any, field: str, max_length: int) -> None:
    value: Sized = getattr(message, field)
    if len(value) > max_length:
        raise violation(message, field, f"{len(value)} entries", f"at most {max_length}")


def check_text(message: Any, field: str, max_length: int) -> None:
    value: str = getattr(message, field)
    if len(value) > max_length:
        raise violation(message, field, value, f"at most {max_length} characters")


def check_numbers(message: Any, field: str, limit: int = MAX_NUMBER, max_length: int = m.MAX_HANDLES) -> None:
    check_count(message, field, max_length)
    values: tuple[int, ...] = getattr(message, field)
    if values and not (min(values) >= 0 and max(values) < limit):
        wrong = next(value for value in values if not 0 <= value < limit)
        raise violation(message, field, wrong, f"numbers from 0 to {limit - 1}")


def check_seconds(message: Any, field: str) -> None:
    value: float = getattr(message, field)
    if not (math.isfinite(value) and value >= 0):
        raise violation(message, field, value, "a finite number, 0 or more")


def check_clock(message: Any) -> None:
    """Check a time of the sender's clock. The controller stores and sends differences from its own clock."""
    if not -1 <= message.clock < MAX_NUMBER:
        raise violation(message, "clock", message.clock, f"-1 to {MAX_NUMBER - 1}")


def check_handles(message: Any, field: str) -> None:
    """Check handles of arrays that need not exist."""
    handles: tuple[int, ...] = getattr(message, field)
    if not handles:
        return
    check_count(message, field, m.MAX_HANDLES)
    other = first_of_others(handles)
    if other is not None:
        raise violation(message, field, other, "a handle that a client may use")


def check_new_handles(message: Any, field: str, taken: Collection[int]) -> None:
    """Check handles that the sender assigns to new arrays."""
    check_handles(message, field)
    handles: tuple[int, ...] = getattr(message, field)
    for handle in handles:
        if handle in taken:
            raise violation(message, field, handle, "a handle that is not in use")
    if len(handles) > 1 and len(set(handles)) != len(handles):
        raise violation(message, field, handles, "each handle once")


def check_status(message: Any, field: str, is_error: bool = False) -> None:
    status: Status = getattr(message, field)
    if status.code not in _CODES or (is_error and status.ok):
        raise violation(message, f"{field}.code", status.code, "an error code" if is_error else "a status code")
    if len(status.message) > MAX_TEXT:
        raise violation(message, f"{field}.message", status.message, f"at most {MAX_TEXT} characters")
    payloads = status.payloads
    if payloads and (len(payloads) > _MAX_PAYLOADS or sum(map(len, payloads.values())) > _MAX_PAYLOAD_BYTES):
        raise violation(message, f"{field}.payloads", list(payloads), f"at most {_MAX_PAYLOADS}, of 1 MiB in all")
