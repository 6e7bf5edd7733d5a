"""A controller decides for the events of a journal what the version that wrote it has decided.

The hosts have received those decisions. So a change of decisions depends on the setting `decisions`: see "Change a
stored struct" in CONTRIBUTING.md.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.errors import IncompatibleJournalError
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import dumped
from tests.journal.recordings import DECISIONS, RECORDED, decided, read, stored
from tests.journal.stored import facts

CURRENT = ClusterSettings().decisions
GATE = (
    "if this version decides differently on purpose, increase `decisions` in cluster/settings.py, keep the former "
    "decisions for lower values, and run `python -m tests.journal.recordings`"
)


def first_difference(found: list[Any], expected: list[Any]) -> str:
    for number, (one, other) in enumerate(zip_longest(found, expected)):
        if one != other:
            return f"action {number} is {one}, and was {other}"
    return ""


@pytest.mark.parametrize("path", list(stored()), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_version_decides_for_recorded_events_as_the_version_that_recorded_them(path: Path) -> None:
    recording = read(path)
    controller = load_controller(recording.snapshot)
    assert str(controller.settings.decisions) == path.parent.name
    for number, (turn, expected) in enumerate(zip(recording.turns, recording.actions, strict=True)):
        found = decided(controller, turn)
        assert found == expected, f"turn {number}: {first_difference(found, expected)}. {GATE}"
    assert facts(controller) == recording.facts, GATE
    assert contradictions(controller) == []


def test_the_journal_of_a_later_version_with_other_decisions_is_refused() -> None:
    controller = Controller(ClusterSettings("1x1x1", decisions=CURRENT + 1))
    with pytest.raises(
        IncompatibleJournalError, match=f"repeat those up to {CURRENT}: continue with the later version"
    ):
        load_controller(dumped(controller))


def test_each_value_of_the_setting_has_recordings() -> None:
    there = {(path.parent.name, path.stem) for path in stored()}
    lacking = {(str(number), name) for number in range(CURRENT + 1) for name in RECORDED} - there
    assert not lacking, f"run `python -m tests.journal.recordings`, and commit {DECISIONS}"
