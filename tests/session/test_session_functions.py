"""Tests of the sources of a session's compiled functions."""

from __future__ import annotations

from atoll.session.session_functions import SessionFunctions


def test_functions_with_equal_sources_share_one_until_the_last_one_is_removed() -> None:
    functions = SessionFunctions()
    first, second = bytes(bytearray(b"constants")), bytes(bytearray(b"constants"))
    assert first is not second
    assert functions.add(1, first, "hash", (0, 1)) is first
    assert functions.add(2, second, "hash", (2, 3)) is first
    functions.remove(1)
    assert functions.source(1) is None
    assert functions.source(2) is first
    assert list(functions.devices()) == [(2, (2, 3))]
    functions.remove(2)
    assert functions.add(3, second, "hash", (4,)) is second


def test_a_function_is_removed_once() -> None:
    functions = SessionFunctions()
    for number in (1, 2):
        functions.add(number, b"x", "hash", (number,))
    functions.remove(1)
    functions.remove(1)
    assert functions.source(2) == b"x"


def test_the_newest_functions_come_first() -> None:
    functions = SessionFunctions()
    for number in (1, 2, 3):
        functions.add(number, b"x", "hash", (number,))
    functions.remove(2)
    assert [function for function, _ in functions.devices()] == [3, 1]
