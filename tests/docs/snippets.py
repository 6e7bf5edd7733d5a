"""Extract the Python blocks of a page, with the outputs that the page shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:(?:\n```sh\n[^`]*```\n)?\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Snippet:
    """One block of a page.

    Attributes:
      output: The block of text after it, or after the command that runs it.
      reason: Why the block cannot be run.
    """

    page: str
    line: int
    code: str
    output: str | None
    reason: str | None

    @property
    def is_run(self) -> bool:
        return self.reason is None


def snippets_of(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(page.name, text.count("\n", 0, found.start("code")), found["code"], found["output"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]
