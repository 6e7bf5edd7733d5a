"""The rows of the tables of usage."""

from __future__ import annotations

from typing import Any

from atoll.telemetry.usage_tables import usage_notes, usage_rows

AMOUNTS = {"memory_byte_seconds": 2048.4, "bytes_moved": 1024, "compile_seconds": 1.5}


def usage(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    total = {"device_seconds": sum(row["device_seconds"] for row in rows)}
    return {"by": "program", "rows": [AMOUNTS | row for row in rows], "total": total, "kept": True, **more}


def test_rows_have_their_part_of_the_device_time() -> None:
    found = usage_rows(
        usage(
            {"tenant": "ana", "program": "step", "device_seconds": 3.0, "expected_ms": 2.5},
            {"tenant": "ben", "program": "", "device_seconds": 1.0, "expected_ms": None},
        )
    )
    assert [(row.tenant, row.program, row.device_seconds, row.share, row.expected) for row in found] == [
        ("ana", "step", 3.0, "75.0 %", "2.500 ms"),
        ("ben", "", 1.0, "25.0 %", ""),
    ]
    assert (found[0].memory, found[0].moved, found[0].compiling) == ("2.0 KiB s", "1.0 KiB", "1.50 s")


def test_rows_of_different_sessions_have_different_keys() -> None:
    same = {"tenant": "ana", "label": "train.py", "device_seconds": 0.0}
    rows = usage_rows(usage({**same, "run": 1, "session": 1}, {**same, "run": 1, "session": 2}))
    assert len({row.key for row in rows}) == 2
    assert {row.share for row in rows} == {""}


def test_operators_see_the_idle_time() -> None:
    row = {"tenant": "ana", "device_seconds": 1.0}
    assert usage_notes(usage(row)) == []
    seen = usage(row, kept=False, present_device_seconds=4.0, idle_device_seconds=3.0)
    assert usage_notes(seen) == [
        "of 4.0 device seconds, 1.0 were used (25.0 %) and 3.0 were idle",
        "this usage is lost when the cluster ends",
    ]
