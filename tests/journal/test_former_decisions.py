"""Test that a journal is replayed with the decisions of the version that wrote it, because hosts have received these.

`before_joint_gangs` was written by a version without joint gangs (the commit before 4b98c646). The snapshot has a
session with a function that is compiled on 16 islands. The turns after it register a program that calls the function on
all of them, and launch it twice. `facts.json` has the gangs that the hosts were sent, as (host, sequence number).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings, StoredSettings
from atoll.controller_process.process_state import decode_snapshot
from atoll.journal.event_log import Header, replayed
from atoll.journal.files import Directory
from atoll.journal.journal import recover
from atoll.operate.log_replay import replay
from atoll.protocol import messages as m
from atoll.protocol.actions import Send
from atoll.telemetry.consistency import contradictions
from tests.journal.stored import copied

FORMER = Path(__file__).resolve().parent / "before_joint_gangs"


def test_gangs_that_were_sent_before_there_were_joint_gangs_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = copied(FORMER, tmp_path / "stored")
    monkeypatch.setenv("ATOLL_KEY_FILE", str(stored / "key"))
    found = recover(Directory(stored / "journal"))
    assert found is not None
    controller, _ = decode_snapshot(found.payload)
    hosts = {connection: host for host, connection in controller.connections.hosts.items()}
    events = [event for turn in found.decoded_turns() for event in turn]
    actions = [action for _, some in replayed(controller.handle, events) for action in some]
    sends = [each for each in actions if isinstance(each, Send) and type(each.message) is m.Run]
    sent = [[hosts[each.connection], each.message.sequence] for each in sends]
    assert sent == json.loads((FORMER / "facts.json").read_text())["runs"]
    assert contradictions(controller) == []


def test_settings_that_a_version_lacked_stand_for_its_decisions() -> None:
    whole = msgspec.to_builtins(ClusterSettings())
    assert msgspec.convert(whole, StoredSettings).current() == ClusterSettings()
    del whole["joint_islands"]
    assert msgspec.convert(whole, StoredSettings).current().joint_islands == 0


def test_an_event_log_of_such_a_version_is_read() -> None:
    header = msgspec.to_builtins(Header("0.1", ClusterSettings()))
    del header["settings"]["joint_islands"]
    assert list(replay([msgspec.json.encode(header)])) == []
