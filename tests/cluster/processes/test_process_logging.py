"""Tests of log lines: as text, as JSON, and parsed again."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from atoll.cluster.processes.process_logging import (
    FIELDS,
    MAX_LINES,
    REPEAT_SECONDS,
    JsonFormatter,
    Repetitions,
    TextFormatter,
    parse_line,
    warnings_in,
)


def record(text: str = "session opened", created: float = 1_700_000_000.25, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("atoll.controller", logging.INFO, "file", 1, "%s", (text,), None)
    made.created, made.msecs = created, created % 1 * 1000
    made.__dict__[FIELDS] = fields
    return made


def test_a_json_line_has_the_fields_of_its_event():
    line = json.loads(JsonFormatter("controller").format(record(event="session opened", session=3, tenant="ana")))
    assert line.pop("pid") > 0
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "process": "controller",
        "logger": "atoll.controller",
        "message": "session opened",
        "event": "session opened",
        "session": 3,
        "tenant": "ana",
    }


def test_a_json_line_has_the_traceback_of_an_exception():
    try:
        raise ValueError("a bug")
    except ValueError:
        made = record()
        made.exc_info = sys.exc_info()
    line = JsonFormatter("worker").format(made)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: a bug")


def test_lines_of_both_forms_are_read_back():
    for formatter in (JsonFormatter("null island"), TextFormatter("null island")):
        found = parse_line(formatter.format(record()))
        assert found is not None
        assert (found.seconds, found.process) == (1_700_000_000.25, "null island")
    for other in ("Traceback (most recent call last):", "", "{broken", '{"a": 1}'):
        assert parse_line(other) is None


def test_the_warnings_of_a_log_are_the_last_ones_of_atoll():
    def line(level: int, text: str) -> str:
        made = record(text)
        made.levelno, made.levelname = level, logging.getLevelName(level)
        return TextFormatter("controller").format(made)

    lines = [line(logging.ERROR, "one"), line(logging.WARNING, "two"), line(logging.INFO, "three"), "E0000 of XLA"]
    assert [each.rpartition(" ")[2] for each in warnings_in("\n".join(lines), 9)] == ["one", "two"]
    assert [each.rpartition(" ")[2] for each in warnings_in("\n".join(lines), 1)] == ["two"]


JSON = '{"time": "%s", "process": "worker", "level": "info"%s}'


@pytest.mark.parametrize(
    "line",
    [
        JSON % ("2026-01-01T00:00:00.xZ", ""),
        JSON % ("2026-01-01T00:00:00." + "9" * 300 + "Z", ""),
        JSON % ("2026-01-01T00:00:00.-" + "9" * 30 + "Z", ""),
        JSON % ("2026-01-01T00:00:00Z", ', "x": 1e999'),
        JSON % ("2026-01-01T00:00:00Z", ', "x": ' + "[" * 9999 + "]" * 9999),
        '{"x":' + "[" * 9999,
        "2026-99-99 00:00:00,000 atoll worker[1] INFO printed by a user",
        "0000-01-01 00:00:00,000 atoll worker[1] INFO printed by a user",
    ],
)
def test_a_line_that_a_user_has_forged_badly_is_not_a_record(line: str):
    assert parse_line(line) is None


def test_no_line_of_a_message_looks_like_a_record():
    forged = TextFormatter("controller").format(record("session 3 ended"))
    lines = TextFormatter("worker").format(record(f"a message of a user\n{forged}")).splitlines()
    assert [parse_line(line) is not None for line in lines] == [True, False]


def test_a_line_that_repeats_is_logged_once_and_then_with_its_count():
    repetitions = Repetitions()
    lines = [record("no disk", second) for second in (0.0, 1.0, 2.0, REPEAT_SECONDS + 1, REPEAT_SECONDS + 2)]
    shown = [each.getMessage() for each in lines if repetitions.filter(each)]
    assert shown == ["no disk", f"no disk (and 2 times more in the last {REPEAT_SECONDS + 1:.0f} s)"]
    assert all(repetitions.filter(record(f"other {number}", 3.0)) for number in range(3 * MAX_LINES))
    assert len(repetitions._lines) == MAX_LINES


def test_a_line_that_returns_after_the_clock_was_set_back_is_logged():
    repetitions = Repetitions()
    assert repetitions.filter(record(created=100_000.0))
    assert not repetitions.filter(record(created=100_001.0))
    earlier = record(created=60_000.0)
    assert repetitions.filter(earlier)
    assert earlier.getMessage() == "session opened (and 1 times more in the last 0 s)"
    assert not repetitions.filter(record(created=60_001.0))
