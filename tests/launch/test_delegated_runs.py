"""Tests of delegated runs: the messages to hosts, and revocations."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from atoll.controller.islands.island_hosts import LAUNCH_NS
from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, HostBuffer, HostToDevice, Program, Transfer, single
from atoll.protocol import messages as m
from atoll.state.host_window import BUSY_NS
from atoll.state.tallies import counts_of
from tests.controller.play import BROKEN, Play, on, runs
from tests.work_counts import instructions_of

NODES = 6
ARRAY = 10


def program(device: int = 0) -> Program:
    """Return a program that alternately calls a function on this device and transfers the result to the next one.

    The devices are on different islands.
    """
    nodes: list[Any] = []
    for value in range(0, NODES, 2):
        call = Call(1 + device, (0,), (on(device),), (device,))
        nodes += [call, Transfer((1 + value,), (on(device + 1),), False, reshard=True)]
    return Program("step", (on(device),), tuple(nodes), tuple(range(2, NODES + 1, 2)))


@pytest.fixture
def play() -> Play:
    """Return two islands with one device each, and a session that has both to itself."""
    play = Play("2x1x1", delegate_after_seconds=0.0)
    play.with_function()
    play.array(ARRAY)
    play.send(m.RegisterProgram(5, program()))
    return play


def launched(play: Play, result: int = 20) -> list[m.Run]:
    results = tuple(range(result, result + NODES // 2))
    return runs(play.send(m.Launch(5, (ARRAY,), results, ())))


def progress(run: m.Run, *segments: int, is_over: bool = False) -> m.RunProgress:
    """Return a report that these segments have ended, each after 10 ns."""
    times = [number for segment in segments for number in (10 * segment + 1, 10 * segment + 11)]
    first, *_ = (*segments, 0)
    took = [10 for _ in segments]
    samples = tuple((each, 10) for each in run.sampled if each in segments)
    counted = m.GangsEnded(sum(took), min(times, default=0), 0, max(times, default=0), tuple(counts_of(took)), samples)
    packed = struct.pack(f"<{len(times)}q", *times)
    return m.RunProgress(run.sequence, first, packed, counted if segments else None, is_over)


def awaited(play: Play, handle: int) -> list[Any]:
    return play.send(m.Await(handle, (handle,)))


def another(play: Play) -> int:
    """Open a session that is ready to launch on device 0, which it then shares. Return its number."""
    number = play.open(43).number
    play.flush()
    play.proxy(number, m.RegisterFunction(1, "content 1", 901, ((0,),)))
    play.proxy(number, m.RegisterProgram(5, Program("other", (), (Call(1, (), (on(0),), (0,)),), (0,))))
    return number


def test_a_host_gets_all_of_its_segments_in_one_message_and_says_once_that_they_ended(play):
    first, second = launched(play)
    assert (first.segments, second.segments, first.ahead) == (NODES, NODES // 2, 2)
    assert second.sequence == first.sequence + 2, "that of its first gang"
    assert awaited(play, 20) == []
    assert play.report(0, progress(first, *range(NODES), is_over=True)) == []
    messages = play.report(1, progress(second, *range(NODES // 2), is_over=True))
    assert m.Awaited(20, Status()) in messages
    assert m.CreditReturned(1) in messages
    assert play.controller.launches.in_flight == {}
    used = {each.program: each.device_ns for each in play.controller.meter.take(2)[1]}
    assert used["step"] == 10 * (NODES + NODES // 2), "all gangs are charged"
    spans = play.controller.trace.spans()
    assert len(spans) == 1 + NODES + NODES // 2
    assert {span.kind for span in spans if span.sequence >= first.sequence} == {"call", "send", "receive"}


def test_what_is_reported_in_parts_is_counted_as_what_is_reported_at_once(play):
    first, second = launched(play)
    for message in (progress(first, 0, 1), progress(first, 2, 3, 4), progress(first, 5, is_over=True)):
        play.report(0, message)
    play.report(1, progress(second, *range(NODES // 2), is_over=True))
    tallies, tenant = play.controller.launches.charges.tallies, play.controller.sessions[play.session].tenant.name
    assert tallies[0, tenant].moved == {"put": [1, 8], "send": [NODES // 2, 0]}
    assert tallies[1, tenant].moved == {"receive": [NODES // 2, 8 * NODES // 2]}
    assert tallies[0, tenant].running == tallies[1, tenant].running == 0
    spans = [span for span in play.controller.trace.spans() if span.host == 0 and span.sequence >= first.sequence]
    assert [span.ended - span.started for span in spans] == [10] * NODES


def test_gangs_with_different_devices_of_a_host_are_charged_for_these():
    play = Play("2x1x2", delegate_after_seconds=0.0)
    for function, device in ((1, 0), (2, 1)):
        play.with_function(function, (device,))
    play.array(ARRAY)
    calls = (Call(1, (0,), (on(0),), (0,)), Call(2, (), (on(1),), (1,)), Call(2, (), (on(1),), (1,)))
    nodes = (*calls, Transfer((1,), (on(2),), False, reshard=True))
    play.send(m.RegisterProgram(5, Program("both", (on(0),), nodes, (2, 3, 4))))
    first, _ = runs(play.send(m.Launch(5, (ARRAY,), (20, 21, 22), ())))
    assert first.ahead
    play.controller.meter.take(2)
    # 10 ns on one device; 12 and then 3 ns on the other, and a send.
    times = struct.pack("<8q", 100, 110, 100, 112, 100, 115, 110, 110)
    ended = m.GangsEnded(15, 100, 0, 115, tuple(counts_of([10, 2, 3, 0])))
    play.report(0, m.RunProgress(first.sequence, 0, times, ended, True))
    used = {each.program: each.device_ns for each in play.controller.meter.take(2)[1]}
    assert used["both"] == 10 + 12 + 3


def test_the_next_launch_follows_before_the_one_before_has_ended(play):
    assert len(launched(play)) == 2
    assert len(launched(play, 30)) == 2
    assert launched(play, 40) == [], "at most two"


def test_what_a_session_launches_later_waits_for_the_run_on_its_island(play):
    first, second = launched(play)
    play.with_call(6, arguments=0)
    assert play.send(m.Launch(6, (), (50,), ())) == []
    play.report(1, progress(second, *range(NODES // 2), is_over=True))
    (run,) = runs(play.report(0, progress(first, *range(NODES), is_over=True)))
    assert run.results == (50,)


@pytest.mark.parametrize(
    ("started", "limits"),
    [
        ((0, 0), (0, 0)),
        ((1, 0), (1, 0)),
        ((2, 0), (2, 1)),  # what was sent is received
        ((3, 1), (3, 1)),
        ((1, 2), (4, 2)),  # what is awaited has been sent, and so has all before it
        ((6, 3), (6, 3)),
    ],
)
def test_a_run_is_revoked_at_any_segment(play, started, limits):
    """When another session launches, the controller dispatches the remaining nodes one by one, behind the
    other launch.
    """
    first, second = launched(play)
    awaited(play, 20)
    other = another(play)
    play.proxy(other, m.Launch(5, (), (1,), ()))
    sent = play.sent()
    assert [message for to, message in sent if isinstance(message, m.RevokeRuns)] == [m.RevokeRuns(play.session)] * 2
    both = ((first, started[0]), (second, started[1]))
    messages: list[Any] = []
    for host, (run, count) in enumerate(both):
        messages += play.report(host, m.RunsRevoked(play.session, ((run.sequence, count),)))
    limited = [message for message in messages if isinstance(message, m.SetRunLimit)]
    assert [message.runs for message in limited] == [((first.sequence, limits[0]),), ((second.sequence, limits[1]),)]
    messages = []
    for host, (run, _) in enumerate(both):
        messages += play.report(host, progress(run, *range(limits[host]), is_over=True))
    ended: list[int] = []
    while messages:  # the remaining nodes, as hosts receive them
        message = messages.pop(0)
        sequences = [message.sequence] if isinstance(message, m.Run) else []
        sequences += [each for each, _ in message.units] if isinstance(message, m.Dispatch) else []
        for sequence in sequences:
            gang = play.controller.launches.in_flight[sequence]
            ended.append(sequence)
            messages += play.report(gang.hosts[0], m.Done(((sequence, 0, 1),)))
        if isinstance(message, m.Awaited):
            assert message == m.Awaited(20, Status())
            break
    else:
        raise AssertionError("the launch has not ended")
    assert len(ended) == len(set(ended)) == NODES + NODES // 2 - sum(limits), "each gang runs once"


def test_segments_that_end_after_a_revocation_are_charged_to_the_session(play):
    first, second = launched(play)
    play.report(0, progress(first, 0))
    charged: list[tuple[int, int]] = []
    policy = play.controller.scheduler.policy_of(0)
    policy.charge = lambda gang, nanoseconds: charged.append((gang.sequence, nanoseconds))  # type: ignore[method-assign]
    play.proxy(another(play), m.Launch(5, (), (1,), ()))
    play.report(0, progress(first, 1))
    for host, run in enumerate((first, second)):
        play.report(host, m.RunsRevoked(play.session, ((run.sequence, 3),)))
    play.report(0, progress(first, 2, 3, 4, is_over=True))
    assert charged == [(first.sequence, 30 + LAUNCH_NS)], "only the segments after the last report"


def test_a_launch_beside_others_is_dispatched_node_by_node(play):
    other = another(play)
    play.report(0, m.FeedsArrived(other, (901,)))
    play.proxy(other, m.Launch(5, (), (1,), ()))
    play.flush()
    assert all(run.ahead == 0 for run in launched(play))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_fails_in_a_delegated_run_fails_the_launch(play, lost, asked):
    first, second = launched(play)
    awaited(play, 20)
    if asked:  # the progress so far
        play.proxy(another(play), m.Launch(5, (), (1,), ()))
        play.report(1 - lost, m.RunsRevoked(play.session, (((first, second)[1 - lost].sequence, 1),)))
    play.lose(lost, "killed")
    messages = play.outbox()
    left = (second, first)[lost]
    assert m.DropRun(play.session, left.sequence) in messages
    messages += play.report(1 - lost, progress(left, 0, is_over=True))
    (status,) = [message.status for message in messages if isinstance(message, m.Awaited)]
    assert status.code == Code.DATA_LOSS
    assert all(gang.node.session != play.session for gang in play.controller.launches.in_flight.values())


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_revoked_run_fails_with_an_island_on_which_it_has_begun_and_not_ended(play, has_ended):
    first, second = launched(play)
    awaited(play, 21)
    play.proxy(another(play), m.Launch(5, (), (1,), ()))
    for host, run in enumerate((first, second)):
        play.report(host, m.RunsRevoked(play.session, ((run.sequence, 1),)))
    if has_ended:
        play.report(1, progress(second, 0, is_over=True))
    play.lose(1, "killed")
    messages = play.outbox()
    assert m.DropRun(play.session, first.sequence) in messages
    messages += play.report(0, progress(first, 0, 1, is_over=True))
    (status,) = [message.status for message in messages if isinstance(message, m.Awaited)]
    assert status.code == Code.DATA_LOSS
    assert all(gang.node.session != play.session for gang in play.controller.launches.in_flight.values())


def run_all(play: Play, messages: list[Any], last: m.Awaited) -> None:
    """Let hosts end what these messages start, and what follows from that, until the session gets the `last` one."""
    while not any(isinstance(message, m.Awaited) for message in messages):
        sequences = [each.sequence for each in runs(messages)]
        sequences += [number for each in messages if isinstance(each, m.Dispatch) for number, _ in each.units]
        messages = [
            message
            for sequence in sequences
            for message in play.done(sequence, host=play.controller.launches.in_flight[sequence].hosts[0])
        ]
        assert sequences, "nothing is left to do"
    assert last in messages


@pytest.fixture
def revoked(play: Play) -> tuple[m.Run, m.Run]:
    """Return the parts of a revoked run. Island 0 runs one segment of it, and island 1 none."""
    first, second = launched(play)
    awaited(play, 22)
    play.proxy(another(play), m.Launch(5, (), (1,), ()))
    for host, (run, begun) in enumerate(((first, 1), (second, 0))):
        play.report(host, m.RunsRevoked(play.session, ((run.sequence, begun),)))
    play.report(1, progress(second, is_over=True))
    return first, second


def test_a_revoked_run_fails_with_an_island_that_is_removed_before_it_has_begun_there(play, revoked):
    first, _ = revoked
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    messages = play.outbox()
    assert m.DropRun(play.session, first.sequence) in messages
    messages += play.report(0, progress(first, 0, is_over=True))
    (status,) = [message.status for message in messages if isinstance(message, m.Awaited)]
    assert status.message == "island 1 is removed: it failed too often"
    assert play.controller.scheduler.nodes(1) == []
    assert all(gang.node.session != play.session for gang in play.controller.launches.in_flight.values())


def test_a_revoked_run_outlives_an_island_that_fails_before_it_has_begun_there(play, revoked):
    first, _ = revoked
    play.lose(1, "killed")
    messages = play.outbox() + play.send(m.FailureAcknowledged((1,))) + play.join_again(1)
    messages += play.report(0, progress(first, 0, is_over=True))
    run_all(play, messages, m.Awaited(22, Status()))


def test_a_run_fails_with_an_island_that_is_removed_before_the_other_hosts_have_answered(play):
    launched(play)
    behind, _ = launched(play, 30)
    awaited(play, 32)
    play.lose(1, "killed")
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    messages = play.outbox() + play.report(0, m.RunsRevoked(play.session, ((behind.sequence, 0),)))
    messages += play.report(0, progress(behind, is_over=True))
    (status,) = [message.status for message in messages if isinstance(message, m.Awaited)]
    assert status.message == "island 1 is removed: it failed too often"
    assert play.controller.scheduler.nodes(1) == []


def test_a_run_behind_another_outlives_the_loss_of_all_of_its_islands(play):
    nodes: list[Any] = []
    for value in range(0, NODES, 2):
        nodes += [Call(1, (), (on(0),), (0,)), Transfer((value,), (on(1),), False, reshard=True)]
    play.send(m.RegisterProgram(6, Program("made", (), tuple(nodes), tuple(range(1, NODES, 2)))))
    launched(play)
    assert len(runs(play.send(m.Launch(6, (), (30, 31, 32), ())))) == 2
    awaited(play, 32)
    for host in (1, 0):
        play.lose(host, "killed")
        play.send(m.FailureAcknowledged((host,)))
    play.join_again(1, 0)
    play.send(m.Recompile(1, 950))
    play.report(0, m.FeedsArrived(play.session, (950,)))
    function = play.controller.sessions[play.session].functions[1]
    run_all(play, play.report(0, m.Compiled(function, OK, b"", 0.1, False)), m.Awaited(32, Status()))


@pytest.mark.parametrize("begun", [0, 1])
def test_a_run_behind_another_outlives_the_loss_of_an_island_unless_another_island_has_begun_it(play, begun):
    first, second = launched(play)
    behind, behind_second = launched(play, 30)
    play.lose(1, "killed")
    messages = play.outbox()
    assert m.RevokeRuns(play.session) in messages
    assert m.DropRun(play.session, first.sequence) in messages, "it was the first on the failed island"
    answer = m.RunsRevoked(play.session, ((first.sequence, 1), (behind.sequence, begun)))
    messages = play.report(0, answer)
    errors = [play.controller.sessions[play.session].directory.entries[handle].error for handle in (20, 30)]
    assert errors[0] is not None
    assert "(its hosts had started it) (in step)" in errors[0].message
    play.report(0, progress(first, is_over=True))
    if begun:
        assert m.DropRun(play.session, behind.sequence) in messages
        assert errors[1] is not None
        assert "host 1 of island 1 is gone" in errors[1].message
        assert "(hosts of other islands had begun it) (in step)" in errors[1].message
        return
    assert errors[1] is None
    assert m.SetRunLimit(play.session, ((behind.sequence, 0),)) in messages
    messages = play.report(0, progress(behind, is_over=True))
    messages += play.send(m.FailureAcknowledged((1,))) + play.join_again(1)
    again = {each.host_feeds for each in runs(messages)}
    assert again.isdisjoint({behind_second.host_feeds, second.host_feeds}), "earlier reports are ignored"
    awaited(play, 30)
    run_all(play, messages, m.Awaited(30, Status()))


def test_a_failure_reaches_all_hosts_of_the_run(play):
    first, second = launched(play)
    awaited(play, 20)
    messages = play.report(0, m.Failed(first.sequence, BROKEN))
    assert m.DropRun(play.session, first.sequence) in messages
    assert m.DropRun(play.session, second.sequence) in messages
    assert any(isinstance(message, m.FailFeeds) for message in messages)
    play.report(0, progress(first, is_over=True))
    messages = play.report(1, progress(second, is_over=True))
    assert [message.status.code for message in messages if isinstance(message, m.Awaited)] == [BROKEN.code]


def test_a_failure_takes_along_what_needs_it_and_lets_others_go_on(play):
    first, second = launched(play)
    behind, _ = launched(play, 30)
    messages = play.report(0, m.Failed(first.sequence, BROKEN))
    assert m.SetRunLimit(play.session, ((behind.sequence, NODES),)) in messages
    assert messages.index(m.DropRun(play.session, first.sequence)) < messages.index(
        m.SetRunLimit(play.session, ((behind.sequence, NODES),))
    )
    play.report(0, progress(first, is_over=True))
    play.report(1, progress(second, is_over=True))
    play.send(m.RegisterProgram(6, Program("next", (on(1),), there_and_back(), (3, 4))))
    assert runs(play.send(m.Launch(6, (30,), (50, 51), ())))[0].ahead == 2
    play.report(0, m.Failed(behind.sequence, BROKEN))
    assert play.controller.sessions[play.session].directory.entries[50].error == BROKEN


def there_and_back() -> tuple[Transfer | Call, ...]:
    """Return nodes that receive arrays from device 1, use them on device 0, and send the results back."""
    return (
        Transfer((0,), (on(0),), False, reshard=True),
        Call(1, (1,), (on(0),), (0,)),
        Transfer((2,), (on(1),), False, reshard=True),
        Call(1, (2,), (on(0),), (0,)),
    )


def test_the_memory_of_granted_runs_goes_with_their_session(play):
    play.with_function(2, (1,))
    play.send(m.RegisterProgram(7, Program("busy", (), (Call(2, (), (on(1),), (1,)),), (0,))))
    busy: list[int] = []
    while play.controller.scheduler.statistics(1).busy_ns < BUSY_NS:  # then island 1 is fully occupied
        (run,) = runs(play.send(m.Launch(7, (), (100 + len(busy),), ())))
        busy.append(run.sequence)
    (first,), (second,) = launched(play), launched(play, 30)
    play.close(play.session)
    for run in (first, second):
        play.report(0, progress(run, is_over=True))
    play.done(*busy, host=1)
    assert not any(play.controller.ledger.used.values())


def test_hosts_of_a_closed_session_await_nothing_that_will_not_be_sent(play):
    first, second = launched(play)
    play.close(play.session)
    sent = play.sent()
    feeds = ((second.host_feeds, 1), (second.host_feeds + 1, 1), (second.host_feeds + 2, 1))
    failed = [(to, message) for to, message in sent if isinstance(message, m.FailFeeds)]
    assert [(to, message.feeds) for to, message in failed] == [(("host", 1), feeds)]
    play.report(0, progress(first, 0, is_over=True))
    play.report(1, m.Failed(second.sequence, BROKEN))
    play.report(1, progress(second, is_over=True))
    assert play.controller.launches.in_flight == {}
    assert not any(play.controller.ledger.used.values())


def test_memory_is_reserved_for_the_most_that_is_ever_needed_and_only_results_keep_theirs(play):
    used = play.controller.ledger.used
    first, second = launched(play)
    assert play.controller.ledger.used != used
    play.report(0, progress(first, *range(NODES), is_over=True))
    play.report(1, progress(second, *range(NODES // 2), is_over=True))
    play.send(m.Release((*range(20, 20 + NODES // 2), ARRAY)))
    assert not any(play.controller.ledger.used.values())


@pytest.mark.parametrize(("place", "nbytes", "counts"), [(0, 23, 22), (NODES, 16, 22), (-1, 16, 22), (0, 16, 21)])
def test_what_is_no_progress_ends_the_connection_of_who_reports_it(play, place, nbytes, counts):
    first, _ = launched(play)
    ended = m.GangsEnded(1, 0, 0, 1, (0,) * counts)
    with pytest.raises(Exception, match=r"segments|bytes|counts"):
        play.controller.launches.delegated_runs.progressed(
            0, m.RunProgress(first.sequence, place, bytes(nbytes), ended, True)
        )


def test_a_program_on_no_island_is_no_delegated_run(play):
    play.send(m.RegisterProgram(6, Program("nothing", (), (), ())))
    play.send(m.Launch(6, (), (), ()))
    assert launched(play) != [], "its session continues"


def work_of_a_commit(own: int, others: int) -> int:
    """Return the work for the end of a run, after which the next one starts on its islands.

    Further runs are in line: `own` runs of the session on these islands, and `others` of another one on other islands.
    """
    play = Play("4x1x1", delegate_after_seconds=0.0, dumps=False)
    for device in (0, 2):
        play.with_function(1 + device, (device,))
    play.array(ARRAY)
    other = play.open(43).number
    play.proxy(other, m.RegisterFunction(3, "content 3", 903, ((2,),)))
    play.flush()
    buffer = HostBuffer(0, (2,), None, None)
    play.proxy(other, m.RegisterProgram(2, single("put", (), HostToDevice((buffer,), (on(2),)), feeds=1)))
    play.worker(2, m.FeedsArrived(other, (1,)))
    play.proxy(other, m.Launch(2, (), (ARRAY,), (1,)))
    (put,) = runs(play.outbox())
    play.done(put.sequence, host=2)
    started: dict[int, list[m.Run]] = {}
    for session, device, waiting in ((other, 2, others), (play.session, 0, own)):
        play.proxy(session, m.RegisterProgram(5, program(device)))
        play.flush()
        for first in range(100, 100 + NODES * (3 + waiting), NODES):
            play.proxy(session, m.Launch(5, (ARRAY,), tuple(range(first, first + NODES // 2)), ()))
        started[session] = runs(play.outbox())
        assert [each.segments for each in started[session]] == [NODES, NODES // 2] * 2, "the others wait"
    launches, (first, second, *_) = play.controller.launches, started[play.session]

    def end() -> None:
        launches.delegated_runs.progressed(0, progress(first, *range(NODES), is_over=True))
        launches.delegated_runs.progressed(1, progress(second, *range(NODES // 2), is_over=True))
        launches.gang_starts.start_ready()

    work = instructions_of(end)
    assert len(runs(play.outbox())) == 2
    return work


def test_the_work_of_a_commit_does_not_depend_on_the_number_of_runs_in_line():
    few = work_of_a_commit(1, 1)
    assert work_of_a_commit(60, 1) < 1.05 * few
    assert work_of_a_commit(1, 60) < 1.05 * few
