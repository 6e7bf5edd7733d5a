"""Tests that each number on the page about bounds is a constant of a file that its row names."""

from __future__ import annotations

import ast
import math
import re
from functools import cache
from pathlib import Path

import pytest

import atoll
from atoll.controller_process.collector import LAST_LOOKS
from atoll.ifrt.deferred_runs import WINDOW_SHARE
from atoll.launch.compile_watch import MAX_REQUESTS
from atoll.launch.failing_launches import DROPPED_PER_STEP
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.named_arrays.transfer_trees import MAX_ROUNDS
from atoll.protocol.events import STEPS_PER_FLUSH
from atoll.wire.framing import PIECE_BYTES
from atoll.worker.compile_queue import MAX_PLACES, PLACES

PACKAGE = Path(atoll.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design" / "bounds.md"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "ms": 1e-3, "minutes": 60.0}
_NUMBER = re.compile(r"(?P<number>\d[\d,]*(?:\.\d+)?)(?:\^(?P<power>\d+))?(?: (?P<unit>[A-Za-z]+))?")
# Numbers that are computed from constants, by the beginning of their row.
_COMPUTED = {
    "dropped nodes of a failed launch": {DROPPED_PER_STEP * STEPS_PER_FLUSH},
    "received packs": {LAUNCH_WINDOW // WINDOW_SHARE},
    "further reads that start": {2**MAX_ROUNDS},
    "objects that a garbage collection": {4 * LAST_LOOKS},
    "requests for a compilation": {1 + MAX_REQUESTS},
    "of these, compilations": {MAX_PLACES - PLACES},
    "bytes of pieces ahead": {2 * PIECE_BYTES},
}
# Rows that depend on the order of steps, on settings of other processes or on the machine.
_NOT_CONSTANTS = (
    "versions in files that a search",
    "handles that one flush",
    "arrays of one closed session",
    "arrays of a session that is moved",
    "functions, and programs, of such sessions",
    "arrays of a suspended session",
    "requests of users' commands that one flush",
    "compilations of a tenant while",
    "silence of a proxy",
    "pairs of machines",
    "a resumption: wait",
    "feeds of a client beyond",
)


def _rows() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return the subject, the bound and the files of each row."""
    text, _, _ = PAGE.read_text().partition("\n## Invariants\n")
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return [(each[0], each[1], tuple(re.findall(r"`([^`]+)`", each[2]))) for each in cells if "`" in each[-1]]


@cache
def _constants(name: str) -> frozenset[float]:
    """Return the numbers in a file or directory of the package, and the values of expressions of numbers."""
    path = PACKAGE / name
    found: set[float] = set()
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) or (isinstance(node, ast.BinOp) and not _names(node)):
                value = eval(compile(ast.Expression(node), name, "eval"))
                if isinstance(value, int | float):
                    found.add(float(value))
    return frozenset(found)


def _names(node: ast.BinOp) -> bool:
    """Return whether an expression contains anything except numbers and operators."""
    allowed = (ast.BinOp, ast.operator)
    number = (int, float)
    return not all(
        isinstance(each, allowed) or (isinstance(each, ast.Constant) and isinstance(each.value, number))
        for each in ast.walk(node)
    )


def _numbers(bound: str) -> list[tuple[str, set[float]]]:
    """Return the numbers in a bound, each with its possible values: in its unit, or as the code may write it."""
    found = []
    for match in _NUMBER.finditer(re.sub(r"`[^`]*`", "", bound)):
        number = float(match["number"].replace(",", "")) ** int(match["power"] or 1)
        found.append((match[0], {number, number * _UNITS.get(match["unit"] or "", 1), number * 1e6}))
    return found


def test_the_page_has_its_rows() -> None:
    assert len(_rows()) > 200


@pytest.mark.parametrize(("subject", "bound", "files"), _rows(), ids=[subject[:40] for subject, _, _ in _rows()])
def test_a_row_names_the_file_that_has_its_number(subject: str, bound: str, files: tuple[str, ...]) -> None:
    assert [name for name in files if not (PACKAGE / name).exists()] == []
    if subject.startswith(_NOT_CONSTANTS):
        return
    known = {value for name in files for value in _constants(name)}
    known |= {value for start, values in _COMPUTED.items() if subject.startswith(start) for value in values}
    missing = [
        text
        for text, values in _numbers(bound)
        if not any(math.isclose(value, each) for value in values for each in known)
    ]
    assert missing == []
