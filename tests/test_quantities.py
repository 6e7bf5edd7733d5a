"""Numbers, amounts and times as text, and the nouns after numbers in what commands print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll.quantities import counted, human_seconds, noun_for

PACKAGE = Path(atoll.__file__).parent
# A plural with "s" that source text chooses by itself, such as `f"{n} host{'s' * (n > 1)}"`.
_CHOSEN = re.compile(r"""(?<![a-z\\])["']e?s["'] (?:\*|if) """)
# Nouns of things that commands count. In "1 of 4 sessions" the number before the noun is a limit.
_NOUNS = (
    r"\s(?:more )?(?:arrays|devices|events|gangs|hosts|islands|launches|names|nodes|processes|sessions|versions)\b(?!/)"
)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "gang", "0 gangs"),
        (1, "gang", "1 gang"),
        (2, "gang", "2 gangs"),
        (1, "launch", "1 launch"),
        (3, "launch", "3 launches"),
        (2, "process", "2 processes"),
        (1, "more array", "1 more array"),
    ],
)
def test_a_noun_agrees_with_its_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_a_noun_can_have_another_plural() -> None:
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]
    assert [noun_for(count, "query", "queries") for count in (1, 2)] == ["query", "queries"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (40, "40 s"),
        (300, "5 min"),
        (3600, "1 h"),
        (5400, "1.5 h"),
        (35_900, "10 h"),
        (86_400, "1 day"),
        (129_600, "1.5 days"),
        (30 * 86_400, "30 days"),
        (400 * 86_400, "400 days"),
    ],
)
def test_a_time_has_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_only_one_module_chooses_between_singular_and_plural() -> None:
    chosen = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "quantities.py"
        for line in path.read_text().splitlines()
        if _CHOSEN.search(line)
    ]
    assert chosen == [], "use atoll.quantities.counted or noun_for"


def _plurals(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of plural nouns in f-strings that follow a value directly, and not "of" and a value."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value, after in zip([None, *node.values], node.values, node.values[1:], strict=False):
            is_limit = isinstance(before, ast.Constant) and str(before.value).endswith(" of ")
            is_number = isinstance(value, ast.FormattedValue) and value.format_spec is None
            if is_number and not is_limit and isinstance(after, ast.Constant) and re.match(_NOUNS, str(after.value)):
                yield node.lineno


@pytest.mark.parametrize("package", ["operate", "telemetry", "web"])
def test_what_commands_print_has_no_plural_after_a_single_thing(package: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for line in _plurals(ast.parse(path.read_text()))
    ]
    assert found == [], "use atoll.quantities.counted"
