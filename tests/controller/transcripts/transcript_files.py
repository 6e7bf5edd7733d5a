"""The format of a transcript, which is that of cockroachdb/datadriven.

    # A comment.

    command arguments
    further lines of input
    ----
    the output
    of the command

The output ends at the first empty line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent
SEPARATOR = "----"


class TranscriptError(Exception):
    """Raised if a transcript is malformed, or contains a command that does not exist."""


@dataclass
class Step:
    """Command with the text before it: comments and empty lines."""

    before: list[str]
    lines: list[str]
    output: list[str]
    number: int  # of the first line of the command

    @property
    def text(self) -> list[str]:
        return [*self.before, *self.lines, SEPARATOR, *self.output]


def files() -> list[Path]:
    """Return all transcripts."""
    return sorted(DIRECTORY.glob("*.txt"))


def steps_of(text: str) -> list[Step]:
    """Parse a transcript."""
    steps: list[Step] = []
    before: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at] or lines[at].startswith("#"):
            before.append(lines[at])
            at += 1
            continue
        start = at
        while at < len(lines) and lines[at] != SEPARATOR:
            if not lines[at]:
                raise TranscriptError(f"line {start + 1}: no {SEPARATOR} follows the command {lines[start]!r}")
            at += 1
        if at == len(lines):
            raise TranscriptError(f"line {start + 1}: no {SEPARATOR} follows the command {lines[start]!r}")
        end = next((i for i in range(at, len(lines)) if not lines[i]), len(lines))
        steps.append(Step(before, lines[start:at], lines[at + 1 : end], start + 1))
        before, at = [], end
    if any(before):
        raise TranscriptError("a comment at the end belongs to no command")
    return steps


def rewritten(text: str, run: Callable[[list[str]], list[str]]) -> str:
    """Return the transcript with the output that `run` returns for each command."""
    lines: list[str] = []
    for step in steps_of(text):
        try:
            step.output = run(step.lines)
        except TranscriptError as error:
            raise TranscriptError(f"line {step.number}: {error}") from None
        lines += step.text
    return "\n".join(lines) + "\n"
