"""Tests of sessions whose scripts have ended: submitted work finishes, and the next script can then use the name."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.named_runs import NamedRun
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.controller.sessions.detached_sessions import ARRIVAL_SECONDS, MAX_DETACHED
from atoll.controller.sessions.name_waits import MAX_WAITING, TELL_SECONDS
from atoll.errors import Code, Status
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.session_states import SessionState
from tests.controller.play import Cluster, Play, joined, runs
from tests.controller.publishing_play import EVE, Trainer

RUN = NamedRun("run-7", detach=600.0, wait=60.0)


def refusals(play: Cluster) -> list[Status]:
    """Return the refusals since the last call."""
    messages = [each.message for each in play.flush() if isinstance(each, a.Send)]
    return [each.status for each in messages if isinstance(each, m.Refused)]


class Detaching(Play):
    """Session of the run `run-7` with a function and array 10."""

    def __init__(self, topology: str = "2x1x2", run: NamedRun = RUN, **settings: Any) -> None:
        super().__init__(topology, **settings)
        self.session = self.open(run=run).number
        self.with_call()
        self.array(10)

    def launch(self, argument: int, result: int) -> int:
        """Launch the function. Return the sequence number of its run."""
        (run,) = runs(self.send(m.Launch(1, (argument,), (result,), ())))
        return run.sequence

    def leave(self) -> None:
        """End the session's script."""
        self.close(self.session)
        self.flush()

    @property
    def state(self) -> SessionState | None:
        session = self.controller.sessions.get(self.session)
        return None if session is None else session.state

    def refusals(self) -> list[Status]:
        return refusals(self)


def test_the_launches_of_a_script_that_has_ended_continue_and_its_session_closes_after_them() -> None:
    play = Detaching()
    first, second = play.launch(10, 11), play.launch(11, 12)
    play.leave()
    assert play.state is SessionState.DETACHED
    play.done(first)
    assert play.state is SessionState.DETACHED
    play.done(second)
    assert play.state is None
    assert not any(play.controller.ledger.used.values())


def test_a_session_without_work_left_closes_at_once() -> None:
    play = Detaching()
    play.leave()
    assert play.state is None


@pytest.mark.parametrize("run", [NamedRun(), NamedRun("run-7")])
def test_a_session_that_is_not_detached_ends_with_its_script(run: NamedRun) -> None:
    play = Detaching(run=run)
    play.launch(10, 11)
    play.leave()
    assert play.state is None


def test_a_version_that_was_published_before_the_end_of_the_script_becomes_complete() -> None:
    play = Trainer()
    play.session = play.open(token="trainer", run=RUN).number
    play.array(10)
    play.send(m.RegisterProgram(5, play.view_program))
    number, sequence = play.publish()
    play.close(play.session)
    play.done(sequence)
    reader = play.open(token="reader").number
    assert play.opened(reader).version == number
    assert play.session not in play.controller.sessions


def test_another_script_gets_the_name_when_the_work_of_the_former_one_has_ended() -> None:
    play = Detaching()
    sequence = play.launch(10, 11)
    play.leave()
    before = set(play.controller.sessions)
    play.connect("proxy", run=RUN)
    play.flush()
    assert set(play.controller.sessions) == before
    play.done(sequence)
    play.flush()
    (number,) = set(play.controller.sessions) - before
    assert play.controller.sessions[number].run == RUN


def test_a_script_that_waits_too_long_for_a_name_learns_who_has_it() -> None:
    play = Detaching()
    play.connect("proxy", run=NamedRun("run-7", wait=5.0))
    play.tick(4.0)
    assert play.refusals() == []
    play.tick(6.0)
    (status,) = play.refusals()
    assert status.code == Code.ALREADY_EXISTS
    assert "run-7 is attached to session 2 (script.py), process 42" in status.message
    assert "`atoll end-session 2`" in status.message


def test_a_script_that_waits_for_a_name_is_told_once_who_has_it() -> None:
    play = Detaching()
    waiting = play.connect("proxy", run=RUN)

    def told() -> list[a.Send]:
        return [each for each in play.flush() if isinstance(each, a.Send) and isinstance(each.message, m.Late)]

    play.tick(TELL_SECONDS - 1)
    assert not told()
    play.tick(TELL_SECONDS)
    (late,) = told()
    assert late.connection == waiting
    assert late.message == m.Late(
        "this script waits for up to 57 s more: run-7 is attached to session 2 (script.py), process 42. End that "
        "script, or end its session with `atoll end-session 2`"
    )
    play.tick(RUN.wait - 1)
    assert not told()


def test_a_script_that_no_longer_waits_for_a_name_does_not_get_it() -> None:
    play = Detaching()
    sessions = len(play.controller.sessions)
    waiting = play.connect("proxy", run=RUN)
    play.event(e.ConnectionLost(play.now, waiting, "closed"))
    play.leave()
    play.flush()
    assert len(play.controller.sessions) == sessions - 1


def test_a_script_waits_for_a_name_although_the_session_that_has_it_reaches_the_quotas() -> None:
    trainer = TenantSettings("trainer", token_hash("trainer"), sessions=1)
    play = joined("1x1x2", max_sessions=1, tenants=(trainer,))
    holder = play.open(token="trainer", run=RUN)
    play.connect("proxy", token="trainer", run=RUN)
    assert refusals(play) == []
    play.close(holder.number)
    play.flush()
    (session,) = [each for each in play.controller.sessions.values() if each.run == RUN]
    assert session.number != holder.number
    assert session.tenant.sessions == 1


def test_a_limited_number_of_scripts_of_a_tenant_waits_for_names() -> None:
    play = Detaching()
    for _ in range(MAX_WAITING):
        play.connect("proxy", run=RUN)
    assert play.refusals() == []
    play.connect("proxy", run=RUN)
    (status,) = play.refusals()
    assert "wait for the names of their runs" in status.message


def test_a_waiting_script_whose_connection_a_bug_has_closed_is_forgotten() -> None:
    play = Detaching()
    tenant = play.controller.sessions[play.session].tenant
    before = tenant.sessions
    waiting = play.connect("proxy", run=RUN)
    play.event(e.Skipped(play.now, "Hello: TypeError", (waiting,)))
    play.flush()
    assert tenant.sessions == before
    play.leave()
    play.tick(RUN.wait + 1)
    play.flush()
    assert play.state is None


def test_the_names_of_two_tenants_are_apart() -> None:
    play = Trainer()
    play.open(token="trainer", run=RUN)
    assert play.open(token=EVE.name, run=RUN).run == RUN


def test_work_that_does_not_end_is_ended_with_the_time_of_the_session() -> None:
    play = Detaching()
    play.launch(10, 11)
    play.leave()
    play.tick(599.0)
    assert play.state is SessionState.DETACHED
    play.tick(601.0)
    assert play.state is None
    event = play.controller.history.events()[-1]
    assert "was detached for 600 s, and 1 launch and 0 versions of arrays had not ended" in event.text


def test_a_launch_that_needs_bytes_of_the_script_fails_soon_after_its_end() -> None:
    play = Detaching()
    play.send(m.Launch(2, (), (20,), (20_000,)))
    play.leave()
    assert play.state is SessionState.DETACHED
    play.tick(1.0)
    play.tick(ARRIVAL_SECONDS + 1)
    play.flush()
    assert play.state is None


def test_bytes_that_a_host_may_have_are_not_lost_while_it_has_to_connect_again() -> None:
    """As after a restart of the controller that took longer than that."""
    play = Detaching()
    play.send(m.Launch(2, (), (20,), (20_000,)))
    play.leave()
    connection = play.controller.connections.hosts[0]
    play.event(e.ConnectionAway(0.0, connection))
    for second in range(1, 9):
        play.tick(float(second))
    play.event(e.ConnectionBack(8.0, connection))
    play.tick(9.0)
    play.flush()
    assert play.state is SessionState.DETACHED


def test_a_detached_session_ends_with_an_island_that_it_uses() -> None:
    play = Detaching()
    play.launch(10, 11)
    play.leave()
    play.lose(1, "killed")
    play.end_timers(1.0)
    play.flush()
    assert play.state is SessionState.DETACHED
    play.lose(0, "killed")
    play.end_timers(1.0)
    play.flush()
    assert play.state is None


def test_a_detached_session_is_not_moved() -> None:
    play = Detaching()
    play.launch(10, 11)
    play.leave()
    play.operator(m.SuspendRequest(play.session, False))
    (reply,) = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert "is detached" in reply.status.message


@pytest.mark.parametrize("is_quiesced", [False, True])
def test_a_session_that_is_being_suspended_is_detached_with_its_work(is_quiesced: bool) -> None:
    play = Detaching()
    sequence = play.launch(10, 11)
    play.operator(m.SuspendRequest(play.session, False))
    if is_quiesced:
        play.send(m.Quiesced(1))
    play.outbox()
    play.close(play.session)
    (reply,) = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert "the script of session 2 (script.py) ended" in reply.status.message
    assert play.state is SessionState.DETACHED
    play.done(sequence)
    assert play.state is None


def test_a_session_without_work_whose_arrays_are_being_copied_closes_with_its_script() -> None:
    play = Detaching()
    play.operator(m.SuspendRequest(play.session, False))
    (spill,) = [each for each in play.send(m.Quiesced(1)) if isinstance(each, m.SpillRequest)]
    assert play.state is SessionState.SPILLING
    play.leave()
    assert play.state is None, "the session has no work left"
    pieces = tuple(m.SpilledPiece(shard[0], 8) for shard in spill.shards)
    play.report(0, m.SpillReply(play.session, spill.request, Status(), pieces))
    assert not any(play.controller.ledger.used.values())


def test_a_tenant_has_a_limited_number_of_detached_sessions() -> None:
    play = Detaching()
    for number in range(MAX_DETACHED + 1):
        play.session = play.open(run=NamedRun(f"run-{number}-of-many", detach=600.0)).number
        play.with_put()
        play.send(m.Launch(2, (), (20,), (20_000,)))
        play.leave()
    detached = [each for each in play.controller.sessions.values() if each.state is SessionState.DETACHED]
    assert len(detached) == MAX_DETACHED


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (NamedRun("a/b"), "invalid name"),
        (NamedRun("", detach=1.0), "without a name cannot be detached"),
        (NamedRun("a", detach=-1.0), "is detached for 0 to"),
        (NamedRun("a", detach=float("nan")), "is detached for 0 to"),
        (NamedRun("a", wait=1e9), "waits for 0 to"),
    ],
)
def test_invalid_runs_are_refused(run: NamedRun, text: str) -> None:
    play = Play()
    play.connect("proxy", run=run)
    messages = [each.message for each in play.flush() if isinstance(each, a.Send)]
    (refused,) = [each for each in messages if isinstance(each, m.Refused)]
    assert text in refused.status.message
