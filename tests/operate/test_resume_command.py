"""Tests that `atoll resume` says what it waits for."""

from __future__ import annotations

from atoll.operate.command.operator_commands import wait_lines


def test_a_suspended_session_is_printed_with_its_reason_and_others_are_not() -> None:
    rows = [{"id": 1, "state": ""}, {"id": 2, "state": "suspended on disk, and waits for island 0, which is lost"}]
    assert wait_lines({"sessions": rows}, 2) == [
        "atoll: session 2 is suspended on disk, and waits for island 0, which is lost"
    ]
    assert wait_lines({"sessions": rows}, 1) == wait_lines({"sessions": rows}, 3) == []
