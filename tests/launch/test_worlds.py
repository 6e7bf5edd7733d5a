"""Tests of functions on several islands: their worlds, and the effect of an island's failure on them."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.launch.worlds import IDLE_WORLDS, MAX_WORLDS
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from atoll.state.closed_worlds import ended_with_others
from atoll.state.gang_states import GangState
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on, runs

ENDED = Status(Code.CANCELLED, "its session has ended")


def of(messages: list[Any], kind: type[Any]) -> list[Any]:
    return [each for each in messages if type(each) is kind]


def registered(play: Play, function: int = 1, devices: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Register a function on these devices. Return the messages up to its compilation."""
    sent = play.send(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
    for host in range(play.topology.host_count):
        sent += play.report(host, m.FeedsArrived(play.session, (900 + function,)))
    return sent


def with_function(play: Play, devices: tuple[int, ...] = (0, 1)) -> m.JoinWorld:
    """Compile a function on these devices, and register program 1, which calls it."""
    sent = registered(play, 1, devices)
    (serve,) = of(sent, m.JoinWorld)
    play.report(0, m.WorldServed(serve.world, "unix:/world"))
    for host in {play.topology.island_of(device) for device in devices}:
        play.report(host, m.Compiled(of(sent, m.Compile)[0].function, OK, b"", 0.1, False))
    play.send(m.RegisterProgram(1, single("f", (), Call(1, (), (on(*devices),), devices))))
    return serve


def sent_until(play: Play, end: int) -> list[tuple[Any, Any]]:
    """Let the seconds before `end` pass. Return the messages with their receivers."""
    sent: list[tuple[Any, Any]] = []
    for now in range(1, end):
        play.tick(float(now))
        sent += play.sent()
    return sent


def test_the_first_host_serves_a_world_and_the_others_join_it():
    play = Play("3x1x1")
    sent = registered(play, devices=(0, 2))
    (serve,) = of(sent, m.JoinWorld)
    assert (serve.rank, serve.ranks, serve.address) == (0, 2, "")
    (join,) = play.report(0, m.WorldServed(serve.world, "unix:/world"))
    assert join == m.JoinWorld(serve.world, 1, 2, "unix:/world", serve.islands)
    assert play.report(0, m.WorldServed(serve.world, "unix:/world")) == [], "a second report has no effect"


def test_hosts_compile_a_function_of_a_world_for_ranks_of_the_world():
    play = Play("2x2x1")
    compiles = of(registered(play, devices=(1, 2)), m.Compile)
    assert {each.assignment for each in compiles} == {(((1, 0), (2, 0)),)}
    assert sorted(each.ranks for each in compiles) == [(0, 2), (2, 2)]
    assert len({each.world for each in compiles}) == 1
    assert compiles[0].world


def test_a_function_whose_parts_run_apart_needs_no_world_and_no_common_platform():
    play = Play("2x2x1")
    sent = play.send(m.RegisterFunction(1, "content", 901, ((1, 2),), runs_apart=True))
    for host in range(4):
        sent += play.report(host, m.FeedsArrived(play.session, (901,)))
    assert of(sent, m.JoinWorld) == []
    compiles = of(sent, m.Compile)
    assert {(each.world, each.assignment) for each in compiles} == {(0, (((1, 0), (2, 0)),))}
    assert sorted(each.ranks for each in compiles) == [(0, 2), (2, 2)]


def test_functions_get_a_new_world_when_a_drained_island_is_back():
    play = Play("2x1x1")
    closed = with_function(play).world
    play.drain_and_return(1)
    sent = registered(play)
    (serve,) = of(sent, m.JoinWorld)
    assert serve.world != closed
    assert {each.world for each in of(sent, m.Compile)} == {serve.world}


def test_functions_on_the_same_islands_share_a_world_and_those_on_one_island_have_none():
    play = Play("2x1x2")
    first, second = (of(registered(play, i, devices), m.Compile) for i, devices in ((1, (0, 2)), (2, (1, 3))))
    assert {each.world for each in first} == {each.world for each in second}
    alone = of(registered(play, 3, (0, 1)), m.Compile)
    assert [(each.world, each.ranks) for each in alone] == [(0, (0, 0))]


def test_a_run_is_one_gang_on_each_of_its_islands_and_ends_with_all():
    play = Play("2x1x1", joint_islands=0)
    with_function(play)
    sent = runs(play.send(m.Launch(1, (), (11,), ())))
    assert len(sent) == 2
    gangs = list(play.controller.launches.in_flight.values())
    assert sorted(gang.island for gang in gangs) == [0, 1]
    assert all(gang.run.spec.collective and gang.state is GangState.RUNNING for gang in gangs)
    entry = play.controller.sessions[play.session].directory.entries[11]
    play.done(sent[0].sequence, host=0)
    assert entry.state is BufferState.PENDING
    play.done(sent[1].sequence, host=1)
    assert entry.state is BufferState.READY


def test_runs_on_islands_that_overlap_are_in_the_same_order_on_all_of_them():
    play = Play("3x1x1")
    with_function(play, (0, 1))
    for function, devices in ((2, (1, 2)), (3, (0, 2))):
        sent = registered(play, function, devices)
        serve = of(sent, m.JoinWorld)[0]
        play.report(devices[0], m.WorldServed(serve.world, "unix:/world"))
        for host in devices:
            play.report(host, m.Compiled(of(sent, m.Compile)[0].function, OK, b"", 0.1, False))
        definition = single("f", (), Call(function, (), (on(*devices),), devices))
        play.send(m.RegisterProgram(function, definition))
    order: dict[str, list[int]] = {}
    for launch in range(60):
        play.proxy(play.session, m.Launch(1 + launch % 3, (), (100 + launch,), ()))
        for (name, number), message in play.sent():
            if type(message) is m.Run:
                order.setdefault(f"{name} {number}", []).append(message.results[0])
    assert len(order) == 3
    for one in order.values():
        for other in order.values():
            both = set(one) & set(other)
            assert [each for each in one if each in both] == [each for each in other if each in both]


def test_a_failed_island_closes_its_world_and_fails_its_runs_elsewhere():
    play = Play("2x1x1")
    serve = with_function(play)
    play.send(m.Launch(1, (), (11,), ()))
    play.lose(1, "its connection broke")
    sent = play.sent()
    (close,) = [message for name, message in sent if name == ("host", 0) and type(message) is m.CloseWorld]
    assert close.world == serve.world
    assert close.status.code == Code.DATA_LOSS
    error = play.controller.sessions[play.session].directory.entries[11].error
    assert error is not None
    assert error.code == Code.DATA_LOSS
    assert "host 1 of island 1 is gone" in error.message


def test_a_function_gets_a_new_world_when_its_island_is_back():
    play = Play("2x1x1")
    serve = with_function(play)
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    sent = play.send(m.Recompile(1, 950))
    (again,) = of(sent, m.JoinWorld)
    assert again.world > serve.world
    play.report(0, m.WorldServed(again.world, "unix:/again"))
    late = runs(play.send(m.Launch(1, (), (12,), ())))
    assert late == [], "the function is not compiled again"
    compiles: list[Any] = []
    for host in (0, 1):
        compiles += of(play.report(host, m.FeedsArrived(play.session, (950,))), m.Compile)
    assert [each.world for each in compiles] == [again.world] * 2
    play.report(0, m.Compiled(compiles[0].function, OK, b"", 0.1, True))
    assert len(runs(play.report(1, m.Compiled(compiles[0].function, OK, b"", 0.1, True)))) == 2


def test_a_world_waits_for_an_island_that_restarts():
    play = Play("2x1x1")
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    assert of(registered(play), m.JoinWorld) == []
    (serve,) = of(play.join_again(1), m.JoinWorld)
    assert serve.rank == 0


def test_a_removed_island_ends_the_wait_for_its_world():
    play = Play("2x1x1")
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.send(m.RegisterFunction(1, "content 1", 901, ((0, 1),)))
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    assert len(of(play.outbox(), m.CloseWorld)) == 1


def test_a_run_that_failed_on_one_island_ends_on_the_others_and_its_functions_move_to_another_world():
    play = Play("2x1x1")
    serve = with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(first.sequence, Status(Code.INVALID_ARGUMENT, "an argument has been deleted")))
    sent = sent_until(play, 10)
    closed = [(name, message) for name, message in sent if type(message) is m.CloseWorld]
    assert [name for name, _ in closed] == [("host", 0), ("host", 1)], "once"
    successor = closed[0][1].successor
    assert (closed[0][1].world, successor) == (serve.world, serve.world + 1)
    assert [each.world for each in of([message for _, message in sent], m.JoinWorld)] == [successor]
    assert not of([message for _, message in sent], m.RestartIsland)
    play.report(1, m.Failed(second.sequence, Status(Code.UNKNOWN, "Connection closed by peer")))
    for now in range(10, 13):
        play.tick(float(now))
    assert play.controller.launches.in_flight == {}
    error = play.controller.sessions[play.session].directory.entries[11].error
    assert error is not None
    assert "an argument has been deleted" in error.message
    assert len(runs(play.send(m.Launch(1, (), (12,), ())))) == 2, "hosts run it when the function has moved"


def test_a_run_that_failed_on_one_device_ends_on_the_others_with_its_error():
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(1, m.DeviceFailed(second.sequence, Status(Code.INVALID_ARGUMENT, "the kernel failed")))
    sent = sent_until(play, 10)
    assert [name for name, message in sent if type(message) is m.CloseWorld] == [("host", 0), ("host", 1)]
    for host, each in enumerate((first, second)):
        play.report(host, m.Failed(each.sequence, Status(Code.UNKNOWN, "Connection closed by peer")))
    for now in range(10, 13):
        play.tick(float(now))
    error = play.controller.sessions[play.session].directory.entries[11].error
    assert error is not None
    assert "the kernel failed" in error.message


@pytest.mark.parametrize(("is_closed", "closes"), [(False, 0), (True, 2)])
def test_the_world_of_a_run_is_replaced_soon_if_it_failed_by_the_end_of_its_session(is_closed, closes):
    """The other sessions of its tenant wait for that."""
    play = Play("2x1x1")
    with_function(play)
    first, *_ = runs(play.send(m.Launch(1, (), (11,), ())))
    if is_closed:
        play.close(play.session)
    play.report(0, m.Failed(first.sequence, Status(Code.CANCELLED, "its session has ended")))
    sent = [message for _, message in sent_until(play, 4)]
    assert (len(of(sent, m.CloseWorld)), of(sent, m.RestartIsland)) == (closes, [])


def test_the_world_of_a_run_that_only_some_hosts_began_is_replaced_soon():
    """Host 0 has ended the stopped run, which is not known yet, and begun the next one, which failed with the world."""
    play = Play("2x1x1")
    with_function(play)
    stopped, late = (runs(play.send(m.Launch(1, (), (handle,), ())))[0] for handle in (11, 12))
    node = play.controller.launches.in_flight[stopped.sequence].node
    assert play.controller._worlds.replace(node, ENDED)
    (first, second) = of(play.outbox(), m.CloseWorld)
    assert first.ended == second.ended == (stopped.sequence,)
    play.done(stopped.sequence, host=0)
    play.report(0, m.Failed(late.sequence, ended_with_others(ENDED)))
    play.report(1, m.Failed(stopped.sequence, ENDED))
    sent = [message for _, message in sent_until(play, 4)]
    assert [(each.world, each.ended) for each in of(sent, m.CloseWorld)] == [(first.successor, (late.sequence,))] * 2
    assert of(play.report(1, m.Failed(late.sequence, ENDED)), m.CollectiveEnded) == [
        m.CollectiveEnded(late.sequence),
        m.CollectiveEnded(late.sequence),
    ]
    sent_until(play, 8)
    error = play.controller.sessions[play.session].directory.entries[12].error
    assert error is not None
    assert (error.code, error.details.retriable) == (Code.UNAVAILABLE, True)
    assert "its session has ended" in error.message


def test_the_world_of_a_run_is_replaced_although_its_function_was_released():
    play = Play("2x1x1")
    with_function(play)
    first, _ = runs(play.send(m.Launch(1, (), (11,), ())))
    play.send(m.ReleaseProgram(1))
    play.send(m.ReleaseFunction(1))
    play.report(0, m.Failed(first.sequence, Status(Code.INVALID_ARGUMENT, "an argument has been deleted")))
    sent = sent_until(play, 10)
    assert [name for name, message in sent if type(message) is m.CloseWorld] == [("host", 0), ("host", 1)]
    assert not of([message for _, message in sent], m.RestartIsland)


def test_a_failure_on_a_device_of_a_gang_that_has_ended_is_ignored():
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.done(first.sequence)
    play.report(1, m.Done(((second.sequence, 0, 1),)))
    assert play.report(1, m.DeviceFailed(second.sequence, Status(Code.INVALID_ARGUMENT, "late"))) == []
    assert play.report(1, m.DeviceFailed(12345, Status(Code.INVALID_ARGUMENT, "unknown"))) == []


def test_a_host_that_failed_in_a_collective_starts_others_when_it_has_ended_on_all_islands():
    play = Play("2x1x1")
    with_function(play)
    broken = Status(Code.INVALID_ARGUMENT, "broken")
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    assert of(play.report(0, m.Failed(first.sequence, broken)), m.CollectiveEnded) == []
    assert of(play.report(1, m.Failed(second.sequence, broken)), m.CollectiveEnded) == [
        m.CollectiveEnded(first.sequence),
        m.CollectiveEnded(second.sequence),
    ]
    first, second = runs(play.send(m.Launch(1, (), (12,), ())))
    assert of(play.report(0, m.Failed(first.sequence, broken)), m.CollectiveEnded) == []
    ended = play.report(1, m.Done(((second.sequence, 0, 1),)))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(first.sequence)]


def test_a_loaded_controller_knows_which_hosts_have_failed_in_a_collective():
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(first.sequence, Status(Code.INVALID_ARGUMENT, "broken")))
    play.controller = check_dump(play.controller)
    ended = play.report(1, m.Done(((second.sequence, 0, 1),)))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(first.sequence)]


def test_a_source_that_arrives_when_its_world_is_closed_is_compiled_in_the_next_one():
    play = Play("2x1x1")
    (serve,) = of(play.send(m.RegisterFunction(1, "content 1", 901, ((0, 1),))), m.JoinWorld)
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    compiles = of(play.report(0, m.FeedsArrived(play.session, (901,))), m.Compile)
    (again,) = of(play.join_again(1), m.JoinWorld)
    assert again.world > serve.world
    assert [each.world for each in compiles] == [again.world]


def test_a_run_that_does_not_end_in_a_replaced_world_has_its_island_restarted():
    play = Play("2x1x1")
    with_function(play)
    first, second = (runs(play.send(m.Launch(1, (), (handle,), ()))) for handle in (11, 12))
    for each in (first, second):
        play.report(0, m.Failed(each[0].sequence, Status(Code.INVALID_ARGUMENT, "an argument has been deleted")))
    sent = sent_until(play, 20)
    closed = [name for name, message in sent if type(message) is m.CloseWorld and message.successor]
    assert closed == [("host", 0), ("host", 1)], "one message for both runs"
    (restart,) = [message for _, message in sent if type(message) is m.RestartIsland]
    assert restart.island == 1
    assert "hosts [1] of island 1 had not ended f 11 s after it failed: an argument has been deleted" in restart.reason


def test_the_island_of_a_stopped_run_that_one_host_does_not_end_does_not_restart_for_a_wait():
    """Its host computes on: without tenants, loops have no checks. No host of a closed world waits for another one."""
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.close(play.session)
    for now in range(1, 10):
        play.tick(float(now), running={1: (second.sequence,)})
    play.report(0, m.Failed(first.sequence, Status(Code.UNKNOWN, "Connection closed by peer")))
    for now in range(10, 30):
        play.tick(float(now), running={1: (second.sequence,)})
    (restart,) = [message for message in play.outbox() if type(message) is m.RestartIsland]
    assert restart.island == 1
    assert "of island 1 had not ended f 11 s after it failed: the run of f was stopped" in restart.reason


@pytest.mark.parametrize("is_back", [False, True])
def test_a_run_that_hangs_after_the_loss_of_an_island_that_had_ended_it_has_its_island_restarted(is_back):
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(1, m.Done(((second.sequence, 0, 1),)))
    play.lose(1, "its connection broke")
    if is_back:
        play.send(m.FailureAcknowledged((1,), (), ()))
        play.join_again(1)
        (again,) = of(play.send(m.Recompile(1, 950)), m.JoinWorld)
        play.report(0, m.WorldServed(again.world, "unix:/again"))
    play.outbox()
    sent = sent_until(play, 20)
    assert not [message for _, message in sent if type(message) is m.CloseWorld and message.successor], (
        "the host has left the world"
    )
    (restart,) = [message for _, message in sent if type(message) is m.RestartIsland]
    assert restart.island == 0
    assert first.sequence not in play.controller.launches.in_flight


def play_with_a_full_island() -> tuple[Play, Any, list[Any]]:
    """Launch a run on two islands, of which the first is full.

    Return the put of its input there, and the parts of the run that have begun.
    """
    play = Play("2x1x1", joint_islands=0)
    with_function(play)
    both = on(0, 1)
    play.send(m.RegisterProgram(3, single("f", (both,), Call(1, (0,), (both,), (0, 1)))))
    play.with_function(5, (0,))
    play.send(m.RegisterProgram(5, single("g", (), Call(5, (), (on(0),), (0,)))))
    buffers = (HostBuffer(0, (4,), None, None),)
    play.send(m.RegisterProgram(2, single("put", (), HostToDevice(buffers, (both,)), feeds=1)))
    play.send(m.Launch(2, (), (10,), (77,)))
    put, _ = play.report(0, m.FeedsArrived(play.session, (77,))) + play.report(1, m.FeedsArrived(play.session, (77,)))
    for handle in (20, 21):
        play.send(m.Launch(5, (), (handle,), ()))
    return play, put, runs(play.send(m.Launch(3, (10,), (11,), ())))


def test_islands_that_communicate_begin_a_run_in_one_step() -> None:
    play, put, parts = play_with_a_full_island()
    assert parts == []
    later = [each for each in runs(play.done(put.sequence)) if each.results == (11,)]
    assert len(later) == 2, "the first island is not full any more"


@pytest.mark.parametrize("ends", ["its launch fails", "its session ends"])
def test_no_island_has_begun_a_run_that_ends_while_an_island_is_full(ends: str) -> None:
    play, put, _ = play_with_a_full_island()
    if ends == "its session ends":
        play.close(play.session)
        play.sent()
    else:
        play.report(0, m.Failed(put.sequence, Status(Code.INTERNAL, "the array is broken")))
    sent = sent_until(play, 20)
    assert not [message for _, message in sent if type(message) in (m.RestartIsland, m.CloseWorld)]
    assert not any(each.run.spec.collective for each in play.controller.launches.in_flight.values())


def closed_worlds(sent: list[tuple[Any, Any]]) -> list[tuple[Any, bool, tuple[int, ...]]]:
    """Return the receivers of `CloseWorld`, whether there is a successor, and the runs that have ended."""
    return [(name, each.successor > 0, each.ended) for name, each in sent if type(each) is m.CloseWorld]


def test_a_lost_island_ends_the_runs_that_others_have_not_begun() -> None:
    play = Play("2x1x1")
    with_function(play)
    sent = [runs(play.send(m.Launch(1, (), (handle,), ()))) for handle in (11, 12)]
    play.outbox()
    play.lose(1, "its connection broke")
    ended = tuple(here.sequence for here, _ in sent)
    assert closed_worlds(play.sent()) == [(("host", 0), False, ended)]


def test_islands_of_other_platforms_run_nothing_together():
    play = Play("2x1x1")
    hosts = play.controller.resources.hosts
    hosts[1].platform = "cuda"
    (ready,) = of(registered(play), m.FunctionReady)
    assert ready.status.code == Code.INVALID_ARGUMENT
    assert "island 0 has cpu, island 1 has cuda" in ready.status.message
    hosts[0].platform = "cuda"
    (ready,) = of(registered(play), m.FunctionReady)
    assert "platform cuda cannot run one computation together" in ready.status.message


def test_a_tenants_worlds_are_limited_and_idle_ones_are_closed():
    play = Play("6x1x1")
    pairs = [(one, other) for one in range(6) for other in range(one)]
    pairs += [(0, 1, 2), (0, 1, 3), (0, 1, 4)]
    for number, devices in enumerate(pairs[:MAX_WORLDS], 1):
        assert len(of(registered(play, number, devices), m.JoinWorld)) == 1
    (ready,) = of(registered(play, 99, pairs[MAX_WORLDS]), m.FunctionReady)
    assert ready.status.code == Code.RESOURCE_EXHAUSTED
    assert f"on {MAX_WORLDS} different sets" in ready.status.message
    for number in range(1, MAX_WORLDS + 1):
        play.send(m.ReleaseFunction(number))
    closed = of(registered(play, 99, pairs[MAX_WORLDS]), m.CloseWorld)
    assert len({each.world for each in closed}) == MAX_WORLDS - IDLE_WORLDS


def test_an_idle_world_with_a_run_in_flight_is_not_closed():
    play = Play("6x1x1")
    serve = with_function(play)
    runs(play.send(m.Launch(1, (), (11,), ())))
    play.send(m.ReleaseProgram(1))
    play.send(m.ReleaseFunction(1))
    others = [(0, 2), (0, 3), (0, 4), (0, 5), (1, 2)]
    for number, devices in enumerate(others, 10):
        registered(play, number, devices)
        play.send(m.ReleaseFunction(number))
    closed = {each.world for each in of(registered(play, 99, (1, 3)), m.CloseWorld)}
    assert closed
    assert serve.world not in closed


CANNOT_JOIN = Status(Code.UNAVAILABLE, "no free port")


def test_functions_of_a_world_that_cannot_start_fail_on_all_hosts_and_the_next_ones_get_a_new_world():
    play = Play("2x1x1")
    sent = registered(play)
    (serve,) = of(sent, m.JoinWorld)
    assert play.report(1, m.WorldFailed(serve.world + 1, CANNOT_JOIN)) == [], "no such world"
    closed = of(play.report(0, m.WorldFailed(serve.world, CANNOT_JOIN)), m.CloseWorld)
    assert closed == [m.CloseWorld(serve.world, CANNOT_JOIN)] * 2, "on both hosts"
    name = of(sent, m.Compile)[0].function
    play.report(0, m.Compiled(name, CANNOT_JOIN, b"", 0.1, False))
    (ready,) = of(play.report(1, m.Compiled(name, CANNOT_JOIN, b"", 0.1, False)), m.FunctionReady)
    assert ready.status == CANNOT_JOIN
    (again,) = of(registered(play, 2), m.JoinWorld)
    assert again.world > serve.world
    assert of(play.report(0, m.WorldServed(again.world, "unix:/again")), m.JoinWorld)


def test_functions_that_are_lost_with_a_world_are_compiled_again_and_launches_wait_for_them():
    play = Play("2x1x1")
    with_function(play)
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(first.sequence, Status(Code.INVALID_ARGUMENT, "an argument has been deleted")))
    (successor,) = of([message for _, message in sent_until(play, 10)], m.JoinWorld)
    play.report(1, m.Failed(second.sequence, Status(Code.UNKNOWN, "Connection closed by peer")))
    waits = runs(play.send(m.Launch(1, (), (12,), ())))
    assert len(waits) == 2, "they wait on their hosts"
    asked = of(play.report(1, m.WorldFailed(successor.world, CANNOT_JOIN)), m.SendSources)
    assert asked == [m.SendSources(((1, (0, 1)),))]
    for host, each in enumerate(waits):
        play.report(host, m.Failed(each.sequence, Status(Code.NOT_FOUND, "the function is not on this host")))
    for now in range(10, 13):
        play.tick(float(now))
    error = play.controller.sessions[play.session].directory.entries[12].error
    assert error is not None
    assert error.message == "no free port (in f)"
    play.outbox()
    play.controller = check_dump(play.controller)
    assert runs(play.send(m.Launch(1, (), (13,), ()))) == [], "the function is not compiled again"
    sent = play.send(m.Recompile(1, 950))
    for host in (0, 1):
        sent += play.report(host, m.FeedsArrived(play.session, (950,)))
    (again,) = of(sent, m.JoinWorld)
    name = of(sent, m.Compile)[0].function
    play.report(0, m.WorldServed(again.world, "unix:/again"))
    play.report(0, m.Compiled(name, OK, b"", 0.1, False))
    assert len(runs(play.report(1, m.Compiled(name, OK, b"", 0.1, False)))) == 2


@pytest.mark.parametrize(
    "bad",
    [
        m.WorldServed(-1, "unix:/a"),
        m.WorldServed(1, "x" * 5000),
        m.WorldFailed(-1, CANNOT_JOIN),
        m.WorldFailed(1, OK),
    ],
)
def test_a_false_service_is_refused(bad):
    play = Play("2x1x1")
    play.report(0, bad)
    assert play.closed


def test_a_status_of_a_closed_world_can_be_encoded():
    assert m.CloseWorld(1, Status(Code.DATA_LOSS, "gone")).status.code == Code.DATA_LOSS


def test_a_function_whose_first_compilation_lost_its_island_is_ready_when_it_is_compiled_again():
    play = Play("2x1x1")
    (serve,) = of(sent := registered(play), m.JoinWorld)
    play.report(0, m.WorldServed(serve.world, "unix:/world"))
    name = of(sent, m.Compile)[0].function
    play.lose(1, "its connection broke")
    (close,) = of(play.outbox(), m.CloseWorld)
    assert of(play.report(0, m.Compiled(name, close.status, b"", 0.1, False)), m.FunctionReady) == []
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    play.send(m.Recompile(1, 950))
    for host in (0, 1):
        play.report(host, m.FeedsArrived(play.session, (950,)))
    first = play.report(1, m.Compiled(name, OK, b"", 0.1, False))
    assert of(first, m.FunctionReady) == [], "host 0 compiles it again"
    ready = of(play.report(0, m.Compiled(name, OK, b"", 0.1, False)), m.FunctionReady)
    assert [each.status for each in ready] == [OK, OK]


def with_function_of_one_island(play: Play) -> None:
    """Compile a function on device 0, and register program 2, which calls it."""
    compiles = of(registered(play, 2, (0,)), m.Compile)
    play.report(0, m.Compiled(compiles[0].function, OK, b"", 0.1, False))
    play.send(m.RegisterProgram(2, single("g", (), Call(2, (), (on(0),), (0,)))))


def restart_0(play: Play) -> None:
    """Restart island 0. Its session compiles function 2 again, but no function of several islands."""
    play.lose(0, "its connection broke")
    play.send(m.FailureAcknowledged((0,), (), ()))
    play.join_again(0)
    sent = [*play.send(m.Recompile(2, 950)), *play.report(0, m.FeedsArrived(play.session, (950,)))]
    play.report(0, m.Compiled(of(sent, m.Compile)[0].function, OK, b"", 0.1, False))


def test_a_restarted_island_does_not_wait_for_functions_of_an_island_that_is_lost():
    play = Play("2x1x1")
    with_function(play)
    with_function_of_one_island(play)
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    play.send(m.FailureAcknowledged((1,), (), ()))
    restart_0(play)
    assert len(runs(play.send(m.Launch(2, (), (12,), ())))) == 1


def test_an_island_stops_waiting_for_functions_of_an_island_that_fails_meanwhile():
    play = Play("2x1x1")
    with_function(play)
    with_function_of_one_island(play)
    restart_0(play)
    session = play.controller.sessions[play.session]
    needed = play.controller.resources.islands[0].needs_recompile
    assert needed == {play.session: {session.functions[1]}}
    assert len(runs(play.send(m.Launch(2, (), (12,), ())))) == 1, "it does not call function 1"
    play.lose(1, "its connection broke")
    assert needed == {}


def test_a_function_of_an_island_that_ended_meanwhile_is_not_compiled_again():
    play = Play("2x1x1")
    sent = registered(play)
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    play.send(m.FailureAcknowledged((1,), (), ()))
    assert of(play.send(m.Recompile(1, 950)), m.Compile) == []
    assert of(play.report(0, m.FeedsArrived(play.session, (950,))), m.DropFeed) == [m.DropFeed(play.session, 950)]
    compiled = play.report(0, m.Compiled(of(sent, m.Compile)[0].function, OK, b"", 0.1, False))
    (ready,) = of(compiled, m.FunctionReady)
    assert "island 1" in ready.status.message
