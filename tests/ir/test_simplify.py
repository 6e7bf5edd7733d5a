"""Tests of simplification, as text: which nodes it drops and joins, and which it must not change."""

from __future__ import annotations

import pytest

from atoll.ir.passes.simplify_pass import simplify
from atoll.ir.steps import finish
from atoll.ir.text import render
from tests.ir.program_text import parse

# Short names for types, which make the programs readable.
TYPES = {
    "A": "!atoll.array<int8[4], devices = [0:2], tiled = [2]>",
    "B": "!atoll.array<int8[4], devices = [2:4], tiled = [2]>",
    "C": "!atoll.array<int8[4], devices = [4:6], tiled = [2]>",
    "H": '!atoll.array<int8[4], devices = [0:2], tiled = [2], memory = "pinned_host">',
    "L": "!atoll.array<int8[4], devices = [0:2], tiled = [2], layout = [0]>",
    "T": "!atoll.array<int8[4], devices = [0:2], tiled = [2] order [1, 0]>",
    "E": "!atoll.array<int8[4], devices = [0:2], even = [2]>",
    "done": "!atoll.completion",
}

FUNCTIONS = ("g", "h")


def simplified(text: str) -> str:
    """Return the body of `@f(%0: A, %1: A)` after the pass, with short names."""
    body = text
    for name, spelled in TYPES.items():
        body = body.replace(f"<{name}>", spelled)
    arguments = f"%0: {TYPES['A']}, %1: {TYPES['A']}"
    program = parse(f"builtin.module {{ atoll.program @f({arguments}) feeds 1 {{ {body} }} }}", FUNCTIONS)
    after = render(finish(simplify(program)), FUNCTIONS)
    for name, spelled in TYPES.items():
        after = after.replace(spelled, f"<{name}>")
    return "\n".join(line.strip() for line in after.splitlines()[2:-2])


def lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


REMOVED = {
    "a dead call": (
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        atoll.return (%0)
        """,
        """
        atoll.return (%0)
        """,
    ),
    "what only dead nodes use": (
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <B>
        %4 = atoll.rearrange %3 [0 at 0:2 -> 0 at 0:2] : <B>
        atoll.return ()
        """,
        """
        atoll.return ()
        """,
    ),
    "the dead part of a transfer": (
        """
        %2, %3 = atoll.transfer %0, %1 : <B>, <C>
        atoll.return (%3)
        """,
        """
        %2 = atoll.transfer %1 : <C>
        atoll.return (%2)
        """,
    ),
    "a transfer of a call's result to where it is": (
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <A>
        atoll.return (%3)
        """,
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        atoll.return (%2)
        """,
    ),
    "a transfer of an argument to where it is, for a call to read": (
        """
        %2 = atoll.transfer %0 reshard : <A>
        %3 = atoll.call @g(%0, %2) on [0:2] : <A>
        atoll.return (%3)
        """,
        """
        %2 = atoll.call @g(%0, %0) on [0:2] : <A>
        atoll.return (%2)
        """,
    ),
    "a transfer to where the value is, donated later, of a value that no other node has": (
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <A>
        %4 = atoll.call @h(%3) on [0:2] donate [0] : <A>
        atoll.return (%4)
        """,
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.call @h(%2) on [0:2] donate [0] : <A>
        atoll.return (%3)
        """,
    ),
    "the second of two equal transfers": (
        """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.call @g(%2) on [2:4] : <B>
        %4 = atoll.transfer %0 : <B>
        %5 = atoll.call @g(%4, %3) on [2:4] : <B>
        atoll.return (%5)
        """,
        """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.call @g(%2) on [2:4] : <B>
        %4 = atoll.call @g(%2, %3) on [2:4] : <B>
        atoll.return (%4)
        """,
    ),
    "a stop on the way": (
        """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.transfer %2 : <C>
        atoll.return (%3)
        """,
        """
        %2 = atoll.transfer %0 : <C>
        atoll.return (%2)
        """,
    ),
    "stops on the way of several arrays, and the donation stays": (
        """
        %2, %3 = atoll.transfer %0, %1 donate : <B>, <B>
        %4, %5 = atoll.transfer %3, %2 reshard : <T>, <C>
        atoll.return (%4, %5)
        """,
        """
        %2, %3 = atoll.transfer %1, %0 donate reshard : <T>, <C>
        atoll.return (%2, %3)
        """,
    ),
    "a stop in the memory of the end, whose layout is kept": (
        """
        %2 = atoll.transfer %0 : <H>
        %3 = atoll.transfer %2 : <H>
        %4 = atoll.transfer %1 : <B>
        %5 = atoll.transfer %4 : <L>
        atoll.return (%3, %5)
        """,
        """
        %2 = atoll.transfer %0 : <H>
        %3 = atoll.transfer %1 : <L>
        atoll.return (%2, %3)
        """,
    ),
    "there and back, of what a call made": (
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <B>
        %4 = atoll.transfer %3 : <A>
        %5 = atoll.call @h(%4) on [0:2] : <A>
        atoll.return (%5)
        """,
        """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.call @h(%2) on [0:2] : <A>
        atoll.return (%3)
        """,
    ),
}


@pytest.mark.parametrize("case", REMOVED)
def test_simplify_removes(case):
    before, after = REMOVED[case]
    assert simplified(before) == lines(after)
    assert simplified(after) == lines(after), "a second pass changes nothing"


KEPT = {
    "a call without results": """
        atoll.call @g(%0) on [0:2]
        atoll.return ()
        """,
    "a call whose completion somebody asked for": """
        %2, %3 = atoll.call @g(%0) on [0:2] : <A>, <done>
        atoll.return ()
        """,
    "a call that donates": """
        %2 = atoll.call @g(%0) on [0:2] donate [0] : <A>
        atoll.return ()
        """,
    "transfers and rearrangements that donate": """
        %2 = atoll.transfer %0 donate : <B>
        %3 = atoll.rearrange %1 [0 at 0:2 -> 0 at 0:2] donate : <A>
        atoll.return ()
        """,
    "a put, whose bytes must be taken, and a get": """
        %2 = atoll.put [feed 0 [4]] : <A>
        %3 = atoll.get %0 feed 0 : <done>
        atoll.return ()
        """,
    "a copy of an argument that is returned": """
        %2 = atoll.transfer %0 : <A>
        atoll.return (%2)
        """,
    "a copy of a value that is returned, too": """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <A>
        atoll.return (%2, %3)
        """,
    "equal transfers that are both returned": """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.transfer %0 : <B>
        atoll.return (%2, %3)
        """,
    "a copy that a call donates, of an argument": """
        %2 = atoll.transfer %0 : <A>
        %3 = atoll.call @g(%2) on [0:2] donate [0] : <A>
        atoll.return (%3)
        """,
    "a copy of what a call donates": """
        %2 = atoll.call @g(%0) on [0:2] : <A>
        %3 = atoll.transfer %2 : <A>
        %4 = atoll.call @g(%2) on [0:2] donate [0] : <A>
        %5 = atoll.call @g(%3, %4) on [0:2] : <A>
        atoll.return (%5)
        """,
    "a copy of an argument, of which a view is returned": """
        %2 = atoll.transfer %0 : <A>
        %3 = atoll.rearrange %2 [0 at 0:2 -> 0 at 0:2] : <A>
        atoll.return (%3)
        """,
    "a copy of a view that is returned": """
        %2 = atoll.rearrange %0 [0 at 0:2 -> 0 at 0:2] : <A>
        %3 = atoll.transfer %2 : <A>
        atoll.return (%3)
        """,
    "a transfer to other memory, or another layout": """
        %2 = atoll.transfer %0 : <H>
        %3 = atoll.transfer %0 : <L>
        %4 = atoll.call @g(%2, %3) on [0:2] : <A>
        atoll.return (%4)
        """,
    "transfers that differ in whether shard i becomes shard i": """
        %2 = atoll.transfer %0 : <T>
        %3 = atoll.transfer %0 reshard : <T>
        %4 = atoll.call @g(%2, %3) on [0:2] : <A>
        atoll.return (%4)
        """,
    "a stop that is returned, too": """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.transfer %2 : <C>
        atoll.return (%2, %3)
        """,
    "a stop that saves memory": """
        %2 = atoll.transfer %0 : <H>
        %3 = atoll.transfer %2 : <A>
        atoll.return (%3)
        """,
    "a stop that changes the contents": """
        %2 = atoll.transfer %0 : <T>
        %3 = atoll.transfer %2 reshard : <A>
        atoll.return (%3)
        """,
    "a stop at parts that lie nobody knows where": """
        %2 = atoll.transfer %0 reshard : <E>
        %3 = atoll.transfer %2 reshard : <A>
        atoll.return (%3)
        """,
    "a stop on the way from what is gone before the second part": """
        %2 = atoll.transfer %0 : <B>
        %3 = atoll.call @g(%0) on [0:2] donate [0] : <A>
        %4 = atoll.transfer %2 : <C>
        atoll.return (%3, %4)
        """,
}


@pytest.mark.parametrize("case", KEPT)
def test_kept_is(case):
    assert simplified(KEPT[case]) == lines(KEPT[case])
