"""Tests of suspended sessions that outlive their cluster: the end of the cluster, and their restoration in the next."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.errors import OK, Code, Status
from atoll.migration.persisted_sessions import decode, encode
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from tests.controller.play import BROKEN, Cluster, runs
from tests.migration.test_suspensions import SuspendPlay, answer_in, dropped, suspended_in_one_file

PIECE = m.SpilledPiece(1, 8, "/spilled/1.piece", 7)


def persisted_of(play: SuspendPlay, persist: bool = True) -> tuple[list[a.PersistSessions], list[Any]]:
    """Stop the cluster. Return the persisted sessions, and the messages that the controller sends."""
    play.event(e.StopAsked(play.now, persist))
    actions = play.flush()
    received = [each.message for each in actions if isinstance(each, a.Send)]
    return [each for each in actions if isinstance(each, a.PersistSessions)], received


def suspended() -> SuspendPlay:
    """Return a session that was suspended to disk, with an array (handle 5) and a program that calls a function."""
    play = SuspendPlay()
    play.with_call()
    play.suspended(to_disk=True)
    return play


class Next(SuspendPlay):
    """The next cluster, with the persisted session and its connection."""

    def __init__(self, persisted: a.PersistSessions) -> None:
        Cluster.__init__(self, "2x1x2")
        self.event(e.SessionsPersisted(0.0, persisted.content, persisted.secrets))
        ((self.session, connection),) = persisted.sessions.items()
        self.session_opened(connection, self.session)
        self.event(e.ConnectionAway(0.0, connection))
        self.outbox()

    def hosts_join(self) -> list[Any]:
        for host in range(2):
            self.join(host)
        return self.outbox()

    def proxy_is_back(self, status: Status = OK) -> list[Any]:
        """Connect the proxy. It knows of the end of the previous cluster, and compiles its function again."""
        self.event(e.ConnectionBack(0.0, self.connection_of(self.session)))
        self.send(m.FailureAcknowledged((0, 1)))
        self.send(m.Recompile(1, 77))
        (compile_,) = self.report(0, m.FeedsArrived(self.session, (77,)))
        return self.report(0, m.Compiled(compile_.function, status, b"", 0.1, False))


def next_of(play: SuspendPlay) -> Next:
    (persisted,), _ = persisted_of(play)
    return Next(persisted)


def test_at_the_end_proxies_learn_that_all_hosts_are_gone():
    persisted, received = persisted_of(suspended())
    assert [list(each.sessions) for each in persisted] == [[1]]
    assert m.HostsFailed((0, 1)) in received
    assert not any(isinstance(each, m.DropSpilled) for each in received)


def test_the_next_cluster_knows_from_where_the_script_connects():
    play = suspended()
    controller = play.controller
    controller.connections.peers[controller.connections.sessions[1]].address = "10.0.0.3"
    controller = next_of(play).controller
    peer = controller.connections.peers[controller.connections.sessions[1]]
    assert peer.actor == "tenant default, process 42 at 10.0.0.3"
    (session,) = report(controller).sessions
    assert session.machine == "10.0.0.3"


def test_who_ends_the_cluster_learns_which_sessions_stay():
    play = suspended()
    play.operator(m.StopRequest())
    _, received = persisted_of(play)
    ((number, name),) = next(each for each in received if isinstance(each, m.StopReply)).persisted
    assert (number, name) == (1, play.controller.sessions[1].name)
    play = suspended()
    play.operator(m.StopRequest(all_sessions=True))
    assert m.StopReply((), play.controller.settings.suspended_seconds) in persisted_of(play)[1]


def test_the_files_of_a_session_whose_tenant_is_missing_are_removed_when_their_host_has_joined():
    (persisted,), _ = persisted_of(suspended())
    found = decode(persisted.content)
    (session,) = found.sessions
    changed = msgspec.structs.replace(found, sessions=(msgspec.structs.replace(session, tenant="gone"),))
    cluster = Cluster("2x1x2")
    cluster.event(e.SessionsPersisted(0.0, encode(changed), persisted.secrets))
    assert dropped(cluster.outbox()) == []
    cluster.join(0)
    cluster.join(1)
    received = [message for (kind, number), message in cluster.sent() if (kind, number) == ("host", 0)]
    assert dropped(received) == [PIECE.path]
    assert cluster.controller._spiller._left == {}


def test_what_is_not_kept_goes_with_its_files():
    for all_sessions, persist in ((True, True), (False, False)):
        play = suspended()
        play.operator(m.StopRequest(all_sessions))
        persisted, received = persisted_of(play, persist)
        assert persisted == []
        assert m.DropSpilled(1, (PIECE,)) in received


def test_sessions_that_run_or_are_in_memory_end_with_their_cluster():
    play = SuspendPlay()
    assert persisted_of(play)[0] == []
    play = SuspendPlay()
    play.suspended()
    assert persisted_of(play)[0] == []


def test_programs_whose_functions_the_next_cluster_cannot_compile_fail_with_the_error_of_the_compiler():
    play = next_of(suspended())
    play.hosts_join()
    play.proxy_is_back(BROKEN)
    sent = play.resume()
    (feed,) = [feed for each in sent if isinstance(each, m.SendSpilled) for _, feed, _ in each.pieces]
    (run,) = runs(play.report(0, m.FeedsArrived(1, (feed,))))
    play.done(run.sequence)
    assert runs(play.send(m.Launch(1, (5,), (6,), ()))) == []
    assert play.controller.sessions[1].directory.entries[6].error == BROKEN.within("f")


def test_it_goes_on_where_it_was_once_its_functions_are_compiled():
    play = next_of(suspended())
    assert play.controller.sessions[1].suspension_text == "suspended on disk"
    received = play.hosts_join()
    assert [each for each in received if isinstance(each, m.HostsRestarted)] == [
        m.HostsRestarted(((0, "unix:/data-0"),)),
        m.HostsRestarted(((1, "unix:/data-1"),)),
    ]
    assert [each for each in received if isinstance(each, m.OpenStore)].count(
        m.OpenStore(1, play.controller.sessions[1].secret)
    ) == 2
    assert "island 0, which has just restarted" in answer_in(play.resume()).status.message
    play.proxy_is_back()
    (send,) = [each for each in play.resume() if isinstance(each, m.SendSpilled)]
    ((back, feed, hosts),) = send.pieces
    assert (back, hosts) == (PIECE, (0,))
    (run,) = runs(play.report(0, m.FeedsArrived(1, (feed,))))
    received = play.done(run.sequence)
    assert answer_in(received) == m.OperationReply(OK, "session 1 continues on island 0")
    assert m.DropSpilled(1, (PIECE,)) in received
    # The session's program exists again, and runs on the restored array.
    (run,) = runs(play.send(m.Launch(1, (5,), (6,), ())))
    assert run.arguments == (5,)
    assert play.memory == 16


def test_who_resumes_it_before_the_first_tick_waits_for_as_long_as_he_says():
    play = next_of(suspended())
    play.hosts_join()
    assert play.resume(wait=5.0) == []
    play.tick(4000.0)  # by a clock that has continued since the previous cluster
    assert not any(isinstance(each, m.OperationReply) for each in play.outbox())
    play.tick(4006.0)
    (reply,) = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert "which has just restarted" in reply.status.message


def test_who_resumes_it_learns_that_its_script_has_not_connected_and_when_it_ends():
    play = next_of(suspended())
    play.hosts_join()
    play.resume(wait=900.0)
    session = play.controller.sessions[1]
    assert "for its script" in session.suspension_text
    assert "run `atoll end-session 1`" in session.suspension_text
    play.operator(m.EndSessionRequest(1))
    replies = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert f"{session.name} has ended" in [each.status.message for each in replies]


def test_a_session_whose_script_has_connected_waits_for_its_functions():
    play = next_of(suspended())
    play.hosts_join()
    play.event(e.ConnectionBack(0.0, play.connection_of(play.session)))
    play.send(m.FailureAcknowledged((0, 1)))
    assert "for its functions to be compiled" in answer_in(play.resume()).status.message


def test_it_goes_on_on_another_island_too():
    play = next_of(suspended())
    play.hosts_join()
    play.proxy_is_back()
    assert play.resume(1)[0] == m.SendSources(((1, (1,)),))


def test_the_next_cluster_removes_a_file_of_several_arrays_once():
    play = next_of(suspended_in_one_file())
    play.hosts_join()
    play.event(e.ConnectionBack(0.0, play.connection_of(play.session)))
    play.send(m.FailureAcknowledged((0, 1)))
    (send,) = [each for each in play.resume() if isinstance(each, m.SendSpilled)]
    (run,) = runs(play.report(0, m.FeedsArrived(play.session, tuple(feed for _, feed, _ in send.pieces))))
    assert dropped(play.done(run.sequence)) == ["/spilled/1.piece"]


def test_it_may_be_kept_again_by_the_next_cluster_before_anybody_has_come():
    play = next_of(next_of(suspended()))
    play.hosts_join()
    play.proxy_is_back()
    assert any(isinstance(each, m.SendSpilled) for each in play.resume())


def test_a_proxy_that_does_not_come_back_loses_its_session_with_its_files():
    play = next_of(suspended())
    play.hosts_join()
    play.close(play.session)
    assert m.DropSpilled(1, (PIECE,)) in play.outbox()
    assert play.controller.sessions == {}


def test_new_sessions_have_other_numbers():
    play = next_of(suspended())
    play.hosts_join()
    assert play.open(43).number == 2


def test_an_array_that_was_not_spilled_is_an_error():
    play = SuspendPlay()
    session = play.controller.sessions[play.session]
    play.suspended(to_disk=True)
    session.directory.entries[5].spilled = None  # as for a token, which stays on devices
    found = next_of(play).controller.sessions[1].directory.problem(5)
    assert found is not None
    assert (found.code, "its cluster was ended" in found.message) == (Code.DATA_LOSS, True)


def test_a_tenant_that_is_no_more_has_no_sessions():
    play = suspended()
    play.controller.sessions[1].tenant.settings = msgspec.structs.replace(DEFAULT_TENANT, name="gone")
    (persisted,), _ = persisted_of(play)
    after = Cluster("2x1x2")
    after.event(e.SessionsPersisted(0.0, persisted.content, persisted.secrets))
    closed = [each for each in after.flush() if isinstance(each, a.Close)]
    assert [each.connection for each in closed] == list(persisted.sessions.values())
    assert after.controller.sessions == {}


def test_a_proxy_waits_long_for_a_controller_that_is_away_only_while_its_session_is_on_disk():
    play = SuspendPlay()
    play.with_call()

    def patience() -> list[float]:
        return [each.seconds for each in play.actions if isinstance(each, a.SetPatience)]

    play.suspended(to_disk=True)
    assert patience() == [play.controller.settings.suspended_seconds]
    play.operator(m.ResumeRequest(play.session, (), 60.0))
    play.flush()
    assert patience() == [play.controller.settings.suspended_seconds, 0.0]


def test_a_proxy_of_a_session_in_memory_waits_as_long_as_usual():
    play = SuspendPlay()
    play.suspended()
    assert not any(isinstance(each, a.SetPatience) for each in play.actions)
