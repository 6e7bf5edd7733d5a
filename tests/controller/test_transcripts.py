"""Tests that the controller acts as its transcripts record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.controller.transcripts.commands import runner
from tests.controller.transcripts.transcript_files import DIRECTORY, TranscriptError, files, rewritten, steps_of

REWRITE = "if this is intended, run: python -m tests.controller.transcripts --rewrite"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_the_controller_does_what_its_transcript_shows(path: Path):
    before = path.read_text()
    assert rewritten(before, runner()).splitlines() == before.splitlines(), REWRITE


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_a_transcript_begins_with_what_it_shows_and_is_in_the_table(path: Path):
    first, second, *_ = path.read_text().splitlines()
    assert re.fullmatch(r"# [A-Z].*\.", first)
    assert second == ""
    assert f"| [{path.name}]({path.name}) |" in (DIRECTORY / "README.md").read_text()


def test_the_table_has_no_other_files():
    names = re.findall(r"\| \[(.*)\]\(.*\) \|", (DIRECTORY / "README.md").read_text())
    assert sorted(names) == [path.name for path in files()]


def test_numbers_of_a_run_do_not_show():
    """Handles that the controller chooses, names of functions in the cluster, and secrets differ between versions."""
    for path in files():
        text = path.read_text()
        assert not re.search(r"\d{10}|[0-9a-f]{32}|secret", text), path.name


SMALL = """\
# A comment.

cluster 1x1x1
----
an output that is wrong

connect alice
----
"""


def test_outputs_are_replaced_and_everything_else_stays():
    text = rewritten(SMALL, runner())
    assert text.splitlines()[:5] == [*SMALL.splitlines()[:4], "island 0 is READY: host 0 with device 0"]
    assert "-> alice: Welcome session=alice devices=0 hosts=0" in text
    assert rewritten(text, runner()) == text
    assert [step.lines for step in steps_of(text)] == [["cluster 1x1x1"], ["connect alice"]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("cluster 1x1x1\n", "line 1: no ---- follows"),
        ("cluster 1x1x1\n\n----\n", "line 1: no ---- follows"),
        ("dance\n----\n", "line 1: there is no command 'dance'"),
        ("bob: launch f\n----\n", "there is no command 'bob: launch f'"),
        ("tick times=3\n----\n", "tick has no option times"),
        ("tick\n----\n\n# the end\n", "belongs to no command"),
    ],
)
def test_a_malformed_transcript_is_an_error(text: str, error: str):
    with pytest.raises(TranscriptError, match=re.escape(error)):
        rewritten(text, runner())
