"""Tests of the messages about a cluster's end."""

from __future__ import annotations

from atoll.operate.standing import Ended
from atoll.protocol.messages import StopReply


def test_the_sessions_that_stay_are_named_with_how_they_go_on() -> None:
    said = StopReply(((3, "session 3 (train.py)"), (7, "session 7 (41)")), 86_400.0)
    assert Ended(5, said=said).persisted == [
        "suspended on disk, 24 h at most: session 3 (train.py), session 7 (41)",
        "  to resume: `atoll up` with the same --journal, then `atoll resume 3` and `atoll resume 7`",
        "  to end them: `atoll up` with the same --journal, then `atoll down --all`",
    ]
    assert Ended(5).persisted == []
