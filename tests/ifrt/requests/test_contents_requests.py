"""Arrays of contents that the client's process sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import StatusError
from atoll.executables.program_executables import WritingExecutable
from atoll.ifrt.requests.contents_requests import write_contents
from atoll.protocol.submission import PutArray, Writing, first_feed
from tests.ifrt.rig import Rig


def test_a_write_is_refused_while_the_client_cannot_be_asked_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    relay = SimpleNamespace(has_client=False, writes=SimpleNamespace(start=lambda *write: asked.append(write)))
    monkeypatch.setattr(rig.session, "client_relay", lambda: relay)
    executable = WritingExecutable(Writing(0, 0, PutArray("float32", (4,))), rig.session.cluster)
    with pytest.raises(StatusError, match="UNAVAILABLE: the connection on which the client sends contents"):
        write_contents(rig.session, executable, [7], 0)
    assert (rig.take(), asked) == ([], [])
    relay.has_client = True
    write_contents(rig.session, executable, [8], 0)
    _, launch = rig.take_launch()
    assert asked == [(first_feed(0) + 1, launch.feeds[0], 0, 16)], "the client has counted the refused run"
