"""The explanation of `atoll why`, from the report of a controller."""

from __future__ import annotations

import pytest

from atoll.errors import ClusterError
from atoll.operate.why import explanation
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import Snapshot
from tests.controller.play import Play


def snapshot(play: Play, now: float) -> Snapshot:
    for second in range(1, int(now) + 1):
        play.tick(float(second))
    return report(play.controller, now=now)


def test_a_launch_without_its_bytes_has_its_state_its_age_and_who_owes_them():
    play = Play("1x1x2")
    play.with_put()
    play.say(m.Launch(2, (), (8,), (500,)))
    lines = explanation(snapshot(play, 20), play.session)
    assert lines[0].endswith("runs, 1 launches in flight, 1 gangs wait")
    assert lines[1].endswith(" ago, waits for bytes from its client")
    assert lines[2].startswith("  waiting for bytes for ")
    assert lines[3] == "owed to it:"
    assert lines[4].startswith("  a launch has waited for bytes on island 0 for ")
    assert lines[4].endswith(": its client owes the bytes")


def test_a_gang_that_runs_is_owed_by_its_worker():
    play = Play("1x1x2")
    play.with_call(name="f")
    play.array(7)
    play.say(m.Launch(1, (7,), (8,), ()))
    lines = explanation(snapshot(play, 10), play.session)
    assert lines[1] == "owed to it:"
    assert lines[2].endswith(": the worker of host 0 owes its end")


def test_what_runs_before_a_session_is_named_with_its_session():
    play = Play("1x1x2")
    first = play.session
    play.with_put()
    play.say(m.Launch(2, (), (8,), (500,)))
    play.session = second = play.open(label="second.py").number
    play.with_put()
    play.say(m.Launch(2, (), (9,), (501,)))
    lines = explanation(snapshot(play, 10), second)
    assert "ahead of it on these islands:" in lines
    assert any(line.startswith(f"  session {first}: a launch has waited for bytes") for line in lines)


def test_a_session_that_waits_for_nothing_is_up_to_its_script():
    play = Play("1x1x2")
    lines = explanation(snapshot(play, 2), play.session)
    assert "nothing of it waits in the cluster: its next step is up to its script" in lines
    with pytest.raises(ClusterError, match=f"session 99 does not exist; the open sessions are: {play.session}"):
        explanation(snapshot(play, 3), 99)


def test_the_only_session_need_not_be_named():
    play = Play("1x1x2")
    assert explanation(snapshot(play, 2)) == explanation(snapshot(play, 2), play.session)
    second = play.open(label="other.py").number
    with pytest.raises(ClusterError, match=rf"choose a session; .*: {play.session} \(.*\), {second} \(other.py\)"):
        explanation(snapshot(play, 2))
    play.close(play.session)
    play.close(second)
    play.flush()
    with pytest.raises(ClusterError, match=r"^no session is open$"):
        explanation(snapshot(play, 3))
    with pytest.raises(ClusterError, match=r"^session 7 does not exist, and no session is open$"):
        explanation(snapshot(play, 3), 7)
