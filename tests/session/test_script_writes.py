"""Tests that each write of a client's process reaches its host once, even if the host fails in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.session.script_writes import ScriptWrites

WRITE, FEED, HOST = 70, 3, 1


class Rig:
    """The effects of writes, in order. One write was asked for."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.writes = ScriptWrites(
            lambda *asked: self.done.append(("ask", *asked)),
            lambda write: self.done.append(("forget", write)),
            lambda feed: self.done.append(("sent", feed)),
            self._upload,
        )
        self.writes.start(WRITE, FEED, (HOST,), 10)

    def _upload(self, hosts: tuple[int, ...], feed: int, contents: Sequence[Any]) -> None:
        self.done.append(("upload", hosts, feed, b"".join(contents)))

    def take(self) -> list[tuple[Any, ...]]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    assert made.take() == [("ask", WRITE, FEED, HOST)]
    assert made.writes.nbytes(WRITE) == 10
    return made


def test_contents_that_landed_are_forgotten(rig: Rig) -> None:
    rig.writes.landed(WRITE)
    rig.writes.landed(WRITE)
    assert rig.take() == [("sent", FEED), ("forget", WRITE)]
    assert len(rig.writes) == 0
    assert rig.writes.nbytes(WRITE) == -1


def test_contents_that_landed_at_a_host_that_failed_since_are_asked_for_again(rig: Rig) -> None:
    rig.writes.hosts_failed({0, HOST})
    rig.writes.landed(WRITE)
    assert rig.take() == [("ask", WRITE, FEED, HOST)]
    rig.writes.landed(WRITE)
    assert rig.take() == [("sent", FEED), ("forget", WRITE)]


def test_the_failure_of_another_host_changes_nothing(rig: Rig) -> None:
    rig.writes.hosts_failed({0})
    rig.writes.landed(WRITE)
    assert rig.take() == [("sent", FEED), ("forget", WRITE)]


def test_contents_that_arrive_here_are_uploaded(rig: Rig) -> None:
    rig.writes.hosts_failed({HOST})
    rig.writes.arrived(WRITE, [b"ab", b"c"])
    rig.writes.arrived(WRITE, [b"again"])
    assert rig.take() == [("upload", (HOST,), FEED, b"abc"), ("forget", WRITE)]


def test_a_new_connection_of_the_client_is_asked_for_everything(rig: Rig) -> None:
    rig.writes.start(WRITE + 1, FEED + 1, (0,), 1)
    rig.writes.landed(WRITE)
    rig.take()
    rig.writes.ask_again()
    assert rig.take() == [("ask", WRITE + 1, FEED + 1, 0)]


def test_several_hosts_get_contents_from_the_proxy(rig: Rig) -> None:
    rig.writes.start(WRITE + 1, FEED + 1, (0, HOST), 4)
    assert rig.take() == [("ask", WRITE + 1, FEED + 1, -1)]
    rig.writes.hosts_failed({0})
    rig.writes.arrived(WRITE + 1, [b"ab", b"cd"])
    assert rig.take() == [("upload", (0, HOST), FEED + 1, b"abcd"), ("forget", WRITE + 1)]
