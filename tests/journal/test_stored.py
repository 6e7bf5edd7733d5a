"""Tests that journals and persisted sessions of earlier versions of Atoll, and of this one, can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll._version import __version__
from atoll.controller_process.process_state import decode_shell, decode_snapshot, encode_snapshot
from atoll.errors import IncompatibleJournalError
from atoll.journal import files
from atoll.journal.event_log import replayed
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import recover
from atoll.journal.persisted_state import persisted_in
from atoll.migration.persisted_sessions import decode
from atoll.protocol.actions import PersistSessions
from atoll.state.buffer_states import BufferState
from atoll.state.object_dumps import declared
from atoll.telemetry.consistency import contradictions
from tests.controller.test_session_persistence import Next
from tests.journal.stored import KINDS, LINK, STORED, copied, current, facts, write


@pytest.fixture(params=sorted(path.name for path in STORED.iterdir()))
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = copied(STORED / request.param, tmp_path / "stored")
    monkeypatch.setenv("ATOLL_KEY_FILE", str(found / "key"))
    return found


def facts_of(stored: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stored / "facts.json").read_text())
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_journal_is_read_and_its_events_are_replayed(stored: Path, name: str) -> None:
    found = recover(JournalDirectory(stored / name))
    assert found is not None
    assert (found.term, found.cut) == (3, [])
    controller, shell = decode_snapshot(found.payload)
    assert facts(controller) == facts_of(stored)[name]
    assert contradictions(controller) == []
    assert (shell.seconds, shell.next, shell.key, shell.others, shell.timers) == (
        12.5,
        10,
        b"k" * 32,
        {4: "operator"},
        {2: 13.5},
    )
    assert shell.links == [LINK]
    turns = list(found.decoded_turns())
    assert turns
    for turn in turns:
        for _ in replayed(controller.handle, turn):
            pass
    assert contradictions(controller) == []


def test_persisted_sessions_are_read_and_continue(stored: Path) -> None:
    found = persisted_in(stored / "persisted")
    assert found is not None
    state, term = found
    expected = facts_of(stored)["persisted"]
    assert (term, list(state.cluster.sessions)) == (3, expected["sessions"])
    assert decode_shell(state.shell).links == [LINK]
    (session,) = decode(state.sessions).sessions
    number = session.number
    play = Next(PersistSessions(0, state.sessions, {number: session.connection}, state.secrets))
    play.hosts_join()
    play.proxy_is_back()
    restored = play.controller.sessions[number]
    assert restored.suspension_text == "suspended on disk"
    assert [restored.directory.entries[each].state for each in expected["arrays"]] == [BufferState.SPILLED]


def test_the_version_of_atoll_does_not_decide_but_that_of_the_protocol(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "__version__", "9.9")
    directory = JournalDirectory(stored / "world")
    assert recover(directory) is not None
    monkeypatch.setattr(files, "PROTOCOL", 999)
    before = {path: path.read_bytes() for path in directory.path.iterdir()}
    with pytest.raises(IncompatibleJournalError, match=r"protocol \d+\), and this is atoll 9\.9 \(protocol 999\)"):
        recover(directory)
    with pytest.raises(IncompatibleJournalError, match="remove it only to discard them"):
        persisted_in(stored / "persisted")
    assert {path: path.read_bytes() for path in directory.path.iterdir()} == before


def versions(payload: bytes) -> dict[str, tuple[int, int]]:
    found = msgspec.msgpack.decode(payload)["content"]["controller"]["objects"]["versions"]
    return {tag: (version, oldest) for tag, (version, oldest) in found.items()}


def test_there_are_files_with_the_structs_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current().exists(), "a struct has a new version: run `python -m tests.journal.stored`, and commit its files"
    newest = copied(current(), tmp_path / "stored")
    monkeypatch.setenv("ATOLL_KEY_FILE", str(newest / "key"))
    of_this_version = {each.tag: (each.version, each.oldest) for each in declared()}
    met: set[str] = set()
    for name in KINDS:
        found = recover(JournalDirectory(newest / name))
        assert found is not None
        stored = versions(found.payload)
        assert stored == {tag: of_this_version[tag] for tag in stored}
        content = msgspec.msgpack.decode(found.payload)
        again = msgspec.msgpack.decode(encode_snapshot(*decode_snapshot(found.payload)))
        for tag, structs in content["content"]["controller"]["objects"]["tables"].items():
            fields = {field for each in structs for field in each}
            same = {field for each in again["content"]["controller"]["objects"]["tables"][tag] for field in each}
            assert fields == same, f"{tag} has other fields now: increase its version, and run tests.journal.stored"
        met |= stored.keys()
    assert len(met) > 60


def test_they_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_KEY_FILE", "")
    write(tmp_path / "1")
    assert facts_of(tmp_path / "1").keys() == {*KINDS, "persisted"}
    assert __version__
