"""Tests of the explanation by `atoll why`, given the report of a controller."""

from __future__ import annotations

import pytest

from atoll.errors import OK, ClusterError
from atoll.ir.program import Call
from atoll.operate.why import explain, explanation
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import Snapshot
from tests.controller.play import Play, on, single
from tests.controller.test_joint_gangs import playing
from tests.controller.test_tenants import shared


def snapshot(play: Play, now: float) -> Snapshot:
    for second in range(1, int(now) + 1):
        play.tick(float(second))
    return report(play.controller, now=now)


def test_a_launch_without_its_bytes_has_its_state_its_age_and_who_must_send_them():
    play = Play("1x1x2")
    play.with_put()
    play.send(m.Launch(2, (), (8,), (500,)))
    lines = explanation(snapshot(play, 20), play.session)
    assert lines[0].endswith("runs, 1 launch in flight, 1 gang waits")
    assert lines[1].endswith(" ago, waits for bytes from its client")
    assert lines[2].startswith("  waiting for bytes for ")
    assert lines[3] == "its unfinished work:"
    assert lines[4].startswith("  a launch has waited for bytes on island 0 for ")
    assert lines[4].endswith(": its client has not sent the bytes")


def test_a_gang_that_runs_is_owed_by_its_worker():
    play = Play("1x1x2")
    play.with_call(name="f")
    play.array(7)
    play.send(m.Launch(1, (7,), (8,), ()))
    lines = explanation(snapshot(play, 10), play.session)
    assert lines[1] == "its unfinished work:"
    assert lines[2].endswith(": the worker of host 0 has not reported its end")


def puts_of_two_sessions() -> tuple[Play, int, int]:
    """Return a play in which the put of one session is ahead of that of another, and the sessions."""
    play = Play("1x1x2")
    first = play.session
    play.with_put()
    play.send(m.Launch(2, (), (8,), (500,)))
    play.session = play.open(label="second.py").number
    play.with_put()
    play.send(m.Launch(2, (), (9,), (501,)))
    return play, first, play.session


def test_what_runs_before_a_session_is_named_with_its_session():
    play, first, second = puts_of_two_sessions()
    lines = explanation(snapshot(play, 10), second)
    assert "ahead of it on these islands:" in lines
    assert any(line.startswith(f"  session {first}: a launch has waited for bytes") for line in lines)


def calls_of_two_tenants() -> tuple[Play, int, int]:
    """Return a report with a gang of alice on its host, and one of bob behind it."""
    play = shared("1x1x1")
    sessions = []
    for tenant in ("alice", "bob"):
        play.session = play.open(token=tenant, label=f"{tenant}.py").number
        play.with_call(name=f"step_of_{tenant}", arguments=0)
        play.send(m.Launch(1, (), (8,), ()))
        sessions.append(play.session)
    return play, sessions[0], sessions[1]


def test_a_gang_on_a_host_behind_one_of_another_session_names_that_one():
    play, alice, bob = calls_of_two_tenants()
    lines = explanation(snapshot(play, 70), bob)
    (place,) = [place for place, line in enumerate(lines) if "waits there for a gang ahead of it" in line]
    assert lines[place].startswith("on island 0, step_of_bob: sent to its hosts")
    assert lines[place + 1].startswith(f"  session {alice}: step_of_alice has run on host 0 of island 0 for ")
    assert lines[place + 1].endswith("the worker of host 0 has not reported its end")
    assert not any("nothing of it waits" in line for line in lines)
    assert not any("waits there" in line for line in explanation(snapshot(play, 70), alice))


def test_of_another_tenants_gang_a_user_learns_where_it_is_and_which_worker_runs_it_and_no_name():
    play, _, bob = calls_of_two_tenants()
    snapshot(play, 70)
    seen = report(play.controller, play.controller.tenants.by_name["bob"], now=play.now)
    lines = explanation(seen, bob)
    (line,) = [line for line in lines if line.startswith("  another tenant: ")]
    assert line.startswith("  another tenant: a gang has run on host 0 of island 0 for ")
    assert line.endswith("the worker of host 0 has not reported its end")
    assert not any("alice" in line for line in lines)


def calls_of_a_callback_and_another(devices: int, platform: str = "") -> tuple[Play, int, int]:
    """Return a play with a gang that calls Python of its client, and a gang of another session on the same devices."""
    play = Play(f"1x1x{devices}", **({"platform": platform} if platform else {}))
    sessions = []
    for calls_client in (True, False):
        play.session = play.open(label="callback.py" if calls_client else "loop.py").number
        play.send(m.RegisterFunction(1, f"content {calls_client}", 900, (tuple(range(devices)),)))
        (compile_,) = play.report(0, m.FeedsArrived(play.session, (900,)))
        play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False, calls_client=calls_client))
        places = tuple(range(devices))
        play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(*places),), places))))
        play.send(m.Launch(1, (), (8,), ()))
        sessions.append(play.session)
    return play, sessions[0], sessions[1]


def test_the_explanation_of_a_session_has_only_what_concerns_it():
    play, alice, bob = calls_of_two_tenants()
    seen = snapshot(play, 70)
    found = explain(seen, bob)
    assert (found.session.id, found.seconds) == (bob, seen.seconds)
    assert [(each.session, each.other, each.program) for each in found.behind] == [(bob, alice, "step_of_bob")]
    assert found.ahead == found.owed_ahead == found.islands == (), "no launch of it waits in line"
    assert [each.session for each in explain(seen, alice).owed] == [alice]
    assert not explain(seen, alice).behind


def test_the_explanation_of_a_launch_in_line_has_its_island_and_the_work_ahead():
    play, first, second = puts_of_two_sessions()
    found = explain(snapshot(play, 10), second)
    assert [each.session for each in found.waits] == [second]
    assert [each.id for each in found.islands] == [0]
    assert [each.session for each in found.owed_ahead] == [first]


def test_a_gang_runs_beside_the_callback_of_another_session_on_its_device():
    play, callback, loop = calls_of_a_callback_and_another(1)
    lines = explanation(snapshot(play, 70), loop)
    assert not any("waits there" in line for line in lines)
    assert not any(f"session {callback}" in line for line in lines)
    assert any(line.endswith("the worker of host 0 has not reported its end") for line in lines), "it runs"
    assert any("calls Python" in line for line in explanation(snapshot(play, 70), callback))


def test_a_gang_on_an_accelerator_waits_for_the_callback_of_another_session():
    play, callback, loop = calls_of_a_callback_and_another(1, "cuda")
    lines = explanation(snapshot(play, 70), loop)
    (place,) = [place for place, line in enumerate(lines) if "waits there for a gang ahead of it" in line]
    assert lines[place + 1].startswith(f"  session {callback}: ")


def test_a_gang_on_several_devices_of_a_host_waits_for_a_callback_on_several():
    play, callback, loop = calls_of_a_callback_and_another(2)
    lines = explanation(snapshot(play, 70), loop)
    (place,) = [place for place, line in enumerate(lines) if "waits there for a gang ahead of it" in line]
    assert lines[place + 1].startswith(f"  session {callback}: ")


def test_a_gang_in_line_behind_a_joint_gang_names_it_on_each_of_its_islands():
    play = playing()  # three islands
    first = play.session
    play.send(m.Launch(1, (), (11,), ()))
    play.session = second = play.open(label="second.py").number
    play.with_put()
    play.send(m.Launch(2, (), (9,), (501,)))  # its bytes are missing, and the joint gang is ahead
    (wait,) = {each.island for each in snapshot(play, 10).waits if each.session == second}
    found = [each for each in snapshot(play, 10).ahead if each.session == second]
    assert [(each.island, each.other, each.gangs) for each in found] == [(wait, first, 0)]
    lines = explanation(snapshot(play, 10), second)
    assert any(line.startswith(f"  session {first}: make has run on hosts 0, 1, 2 of 3 islands") for line in lines)
    assert len(lines) == len(set(lines)), "nothing is named twice"


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
