"""Tests of sanitizing text of unknown origin: one line or several, without control sequences for terminals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.printable import MAX_NAME, printable_name, printable_text
from atoll.errors import MAX_TEXT


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train.py", "train.py"),
        ("Größe 東京 🙂", "Größe 東京 🙂"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x1b[2J", r"\x1b[2J"),
        ("two\nlines\r", r"two\x0alines\x0d"),
        ("\x9b31m", r"\x9b31m"),
        ("gpj.\u202eyp.niart", r"gpj.\u202eyp.niart"),
        ("\u2066a\u2069", r"\u2066a\u2069"),
        ("\U000e0041", r"\U000e0041"),
        ("x" * 1000, "x" * (MAX_NAME - 3) + "..."),
        ("\x00" * 1000, r"\x00" * 49 + r"\..."),
    ],
)
def test_a_name_is_one_printable_line(name, shown):
    assert printable_name(name) == shown


def test_a_text_keeps_its_lines():
    assert printable_text("first\n\tsecond\x1b[2J\r\n") == "first\n\tsecond\\x1b[2J\\x0d\n"


@pytest.mark.hypothesis
@given(st.text())
def test_what_comes_out_is_printable_short_and_stays_as_it_is(text):
    name, shown = printable_name(text), printable_text(text)
    assert name.isprintable()
    assert len(name) <= MAX_NAME
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert len(shown) <= MAX_TEXT
    assert (printable_name(name), printable_text(shown)) == (name, shown)
