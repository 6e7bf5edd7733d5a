"""A controller decides for the events of a journal what the version that wrote it has decided, or refuses the journal.

The hosts have received those decisions. The setting `decisions` numbers them: see "Change a stored struct" in
CONTRIBUTING.md.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.cluster.settings import DECISIONS, ClusterSettings
from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.errors import IncompatibleJournalError
from atoll.journal.event_log import Header
from atoll.operate.log_replay import replay
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import dumped
from tests.journal.recordings import RECORDED, RECORDINGS, decided, read, stored
from tests.journal.stored import facts

GATE = (
    "if this version decides differently on purpose, increase `DECISIONS` in cluster/settings.py, and run "
    "`python -m tests.journal.recordings`"
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


@pytest.mark.parametrize("other", [DECISIONS - 1, DECISIONS + 1], ids=["earlier", "later"])
def test_the_journal_of_a_version_with_other_decisions_is_refused(other: int) -> None:
    controller = Controller(ClusterSettings("1x1x1", decisions=other))
    with pytest.raises(IncompatibleJournalError, match=f"made the decisions {other} of this journal"):
        load_controller(dumped(controller))


def test_an_event_log_without_the_setting_is_refused() -> None:
    header = msgspec.to_builtins(Header("0.1", ClusterSettings()))
    assert list(replay([msgspec.json.encode(header)])) == []
    del header["settings"]["decisions"]
    with pytest.raises(IncompatibleJournalError, match="made the decisions 0 of this journal"):
        list(replay([msgspec.json.encode(header)]))


def test_each_case_is_recorded() -> None:
    lacking = {(str(DECISIONS), name) for name in RECORDED} - {(path.parent.name, path.stem) for path in stored()}
    assert not lacking, f"run `python -m tests.journal.recordings`, and commit {RECORDINGS}"
