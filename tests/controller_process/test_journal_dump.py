"""Tests of dumps of journals, which contain no secrets: their replay makes the same decisions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.controller_process.journal_dump import Pseudonyms, dump_of_journal
from atoll.controller_process.process_state import ShellDump, encode_snapshot
from atoll.errors import JournalError
from atoll.journal.event_log import replayed
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.operate.log_replay import replay
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Play, runs

TOKEN = "the token of clients"


class Secrets(Play):
    """A play whose connections have secrets like those of a controller's process."""

    given: list[str]

    def event(self, event: e.AnyEvent) -> list[a.AnyAction]:
        if isinstance(event, e.ConnectionOpened):
            secret = hashlib.md5(event.secret.encode()).hexdigest()
            self.given = [*getattr(self, "given", ()), secret]
            event = msgspec.structs.replace(event, secret=secret)
        return super().event(event)


def journaled(play: Play, directory: Path) -> tuple[Journal, list[list[a.AnyAction]]]:
    """Journal the events of the play from now on. Return the journal and the actions of each event."""
    opened = JournalDirectory(directory)
    payload = encode_snapshot(play.controller, ShellDump())
    opened.write_snapshot(1, 3, payload)
    journal = Journal(opened, 3, 1, lambda: payload)
    journal.open_segment()
    found: list[list[a.AnyAction]] = []
    handle: Callable[[e.AnyEvent], list[a.AnyAction]] = play.controller.handle

    def recorded(event: e.AnyEvent) -> list[a.AnyAction]:
        found.append(handle(event))
        if type(event) is e.Flush:
            journal.append(list(play.controller.log.turn))
        return found[-1]

    play.controller.handle = recorded  # type: ignore[method-assign]
    return journal, found


def kinds(actions: list[list[a.AnyAction]]) -> list[list[str]]:
    return [[type(getattr(each, "message", each)).__name__ for each in some] for some in actions]


@pytest.fixture
def play() -> Secrets:
    play = Secrets("1x1x2", token=TOKEN, dumps=False)
    play.with_call(name="f")
    play.array(7)
    play.flush()
    return play


def work(play: Play) -> None:
    (run,) = runs(play.send(m.Launch(1, (7,), (8,), ())))
    play.done(run.sequence)
    play.tick(1.0)
    play.connect("operator", token="a wrong one")
    play.open(43, "other.py")
    play.operator(m.SetTenant("ana", is_new=True, token_hash="f" * 64))
    play.flush()


def test_the_replay_of_a_journal_makes_the_same_decisions(play: Secrets, tmp_path: Path) -> None:
    journal, actions = journaled(play, tmp_path / "journal")
    work(play)
    before = {path: path.read_bytes() for path in (tmp_path / "journal").iterdir()}
    lines = list(dump_of_journal(tmp_path / "journal"))
    again = [done for _, done in replay(lines)]
    assert kinds(again) == kinds(actions)
    every = {kind for some in kinds(again) for kind in some}
    assert "Run" in every
    assert "Refused" in every, "the wrong token is still wrong"
    assert {path: path.read_bytes() for path in (tmp_path / "journal").iterdir()} == before
    journal.close()


def test_a_dump_has_no_secret(play: Secrets, tmp_path: Path) -> None:
    journal, _ = journaled(play, tmp_path / "journal")
    work(play)
    journal.close()
    lines = [json.loads(line) for line in dump_of_journal(tmp_path / "journal")]
    text = repr([_bytes(lines[0]["base"]), *(_bytes(each["encoded"]) for each in lines[1:])])
    hello = next(peer.hello for peer in play.controller.connections.peers.values())
    assert hello is not None
    for secret in (*play.given, hello.token, play.controller.tokens.client, "f" * 64):
        assert secret
        assert secret not in text, secret


def test_a_dump_has_no_contents_of_arrays(play: Secrets, tmp_path: Path) -> None:
    play.with_put(3)
    play.send(m.Launch(3, (), (20,), (600,), contents=b"SECRETS!"))
    for number in range(40):  # more than are handled at once, so that some wait in the inbox
        play.proxy(play.session, m.Launch(3, (), (30 + number,), (700 + number,), contents=b"SECRETS!"))
    journal, _ = journaled(play, tmp_path / "journal")
    play.flush()
    journal.close()
    assert b"SECRETS!" in encode_snapshot(play.controller, ShellDump())
    assert all(
        b"SECRETS!" not in _bytes(json.loads(line).get("base", "")) for line in dump_of_journal(tmp_path / "journal")
    )


def _bytes(text: str) -> bytes:
    return msgspec.convert(text, bytes)


def test_equal_secrets_have_equal_pseudonyms_and_other_text_stays() -> None:
    one, other, digest = "0123456789abcdef" * 2, "f" * 32, "a" * 64
    pseudonyms = Pseudonyms()
    pseudonyms.add(one, digest, "")
    content = msgspec.msgpack.encode([one, other, one, digest, {"name": one}])
    hidden: Any = msgspec.msgpack.decode(pseudonyms.hide(content))
    assert hidden[0] == hidden[2] == hidden[4]["name"] != one
    assert (hidden[1], len(hidden[0]), len(hidden[3])) == (other, 32, 64)
    assert hidden[3] != digest
    with pytest.raises(JournalError, match="unknown form"):
        pseudonyms.add("a password")


def test_a_directory_without_a_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="contains no journal"):
        next(dump_of_journal(tmp_path))


def test_a_journal_that_is_damaged_is_read_to_the_damage_and_stays_as_it_is(play: Secrets, tmp_path: Path) -> None:
    journal, _ = journaled(play, tmp_path / "journal")
    work(play)
    journal.close()
    whole = len(list(dump_of_journal(tmp_path / "journal")))
    segment = tmp_path / "journal" / "00000001.events"
    content = segment.read_bytes().rstrip(b"\0")
    segment.write_bytes(content[:-3])
    assert 1 < len(list(dump_of_journal(tmp_path / "journal"))) < whole
    assert segment.read_bytes() == content[:-3]


@pytest.mark.parametrize("skips", [True, False])
def test_an_event_at_which_the_controller_failed_is_skipped_unless_it_is_asked_for(skips: bool) -> None:
    failed = e.Tick(1.0)

    def handle(event: e.AnyEvent) -> list[a.AnyAction]:
        if event is failed:
            raise ZeroDivisionError
        return []

    events = replayed(handle, [e.Started(0.0), failed, e.Skipped(1.0, "a bug")], skips)
    assert next(events)
    if skips:
        assert [event for event, _ in events] == [failed, e.Skipped(1.0, "a bug")]
    else:
        with pytest.raises(ZeroDivisionError):
            next(events)
