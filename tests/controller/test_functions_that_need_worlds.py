"""Functions on several islands whose hosts find out by themselves whether they need a world."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, single
from atoll.launch.worlds import MOST_WORLDS
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on

BROKEN = Status(Code.INVALID_ARGUMENT, "the kernel failed")


def of(messages: list[Any], kind: type[Any]) -> list[Any]:
    return [each for each in messages if type(each) is kind]


def play_of(topology: str) -> Play:
    play = Play(topology)
    compile_first(play)
    return play


def compile_first(play: Play) -> None:
    """Make workers newer than those that `Play` has by default."""
    for host in play.controller.resources.hosts.values():
        host.compiles_first = True


def joins_again(play: Play, host: int) -> list[Any]:
    sent = play.join_again(host)
    compile_first(play)
    return sent


def asked(play: Play, function: int = 1, devices: tuple[int, ...] = (0, 1), content: str = "") -> dict[int, m.Compile]:
    """Register a function whose source arrives. Return what the hosts are to compile."""
    play.say(m.RegisterFunction(function, content or f"content {function}", 900 + function, (devices,)))
    return arrived(play, 900 + function)


def arrived(play: Play, feed: int, hosts: tuple[int, ...] = ()) -> dict[int, m.Compile]:
    found = {}
    for host in hosts or range(play.topology.host_count):
        for each in of(play.report(host, m.FeedsArrived(play.session, (feed,))), m.Compile):
            found[host] = each
    return found


def apart(compile_: m.Compile) -> m.Compiled:
    return m.Compiled(compile_.function, OK, b"", 0.1, False, is_apart=True)


def with_function(play: Play, devices: tuple[int, ...] = (0, 1)) -> str:
    """A function whose islands run apart, and a program 1 that calls it."""
    compiles = asked(play, 1, devices)
    for host, each in compiles.items():
        play.report(host, apart(each))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(*devices),), devices))))
    return next(iter(compiles.values())).function


def launched(play: Play, handle: int = 11) -> dict[int, m.Run]:
    """The runs of program 1, by host."""
    play.proxy(play.session, m.Launch(1, (), (handle,), ()))
    return {number: each for (name, number), each in play.sent() if name == "host" and type(each) is m.Run}


def error_of(play: Play, handle: int = 11) -> str:
    error = play.controller.sessions[play.session].directory.entries[handle].error
    return "" if error is None else error.message


def seconds(play: Play, end: int, begin: int = 1) -> list[tuple[tuple[str, int], Any]]:
    sent: list[tuple[tuple[str, int], Any]] = []
    for now in range(begin, end):
        play.tick(float(now))
        sent += play.sent()
    return sent


# ---- compilation


def test_hosts_compile_first_and_a_function_apart_has_no_world():
    play = play_of("2x2x1")
    compiles = asked(play, 1, (1, 2))
    assert {host: (each.world, each.islands, each.ranks) for host, each in compiles.items()} == {
        1: (0, (2, 2), (0, 2)),
        2: (0, (2, 2), (2, 2)),
    }
    sent = play.report(1, apart(compiles[1])) + play.report(2, apart(compiles[2]))
    assert [each.status for each in of(sent, m.FunctionReady)] == [OK]
    assert of(sent, m.JoinWorld) == []


def test_the_first_host_that_needs_a_world_starts_it_and_all_load_in_it():
    play = play_of("2x1x1")
    compiles = asked(play)
    first = play.report(1, m.NeedsWorld(compiles[1].function))
    (serve,) = of(first, m.JoinWorld)
    second = play.report(0, m.NeedsWorld(compiles[0].function))
    assert of(second, m.JoinWorld) == []
    assert of(first + second, m.LoadInWorld) == [m.LoadInWorld(compiles[0].function, serve.world)] * 2


def test_a_host_that_needs_a_world_for_a_released_function_gets_no_answer():
    play = play_of("2x1x1")
    compiles = asked(play)
    dropped = of(play.say(m.ReleaseFunction(1)), m.DropFunction)
    assert dropped
    assert play.report(0, m.NeedsWorld(compiles[0].function)) == []
    assert play.report(0, m.NeedsWorld("unknown")) == []


def test_the_limit_of_worlds_is_an_error_of_the_function():
    play = play_of("7x1x1")
    pairs = [(one, other) for one in range(7) for other in range(one + 1, 7)]
    for number, pair in enumerate(pairs[:MOST_WORLDS], 1):
        compiles = asked(play, number, pair)
        assert of(play.report(pair[0], m.NeedsWorld(compiles[pair[0]].function)), m.LoadInWorld)
    more = pairs[MOST_WORLDS]
    compiles = asked(play, 50, more)
    sent = play.report(more[0], m.NeedsWorld(compiles[more[0]].function))
    (ready,) = of(sent, m.FunctionReady)
    assert ready.status.code == Code.RESOURCE_EXHAUSTED
    assert of(sent, m.DropFunction), "hosts forget what they have compiled"
    assert play.report(more[1], m.NeedsWorld(compiles[more[1]].function)) == []
    compiles = asked(play, 51, more)
    for host in more:
        sent = play.report(host, apart(compiles[host]))
    assert [each.status for each in of(sent, m.FunctionReady)] == [OK], "functions apart need none"


@pytest.mark.parametrize("reported", [(), (0,), (1,), (0, 1)])
def test_a_world_that_starts_between_two_requests_for_a_function_apart_changes_nothing(reported: tuple[int, ...]):
    play = play_of("2x1x1")
    first = asked(play, 1, content="the same")
    for host in reported:
        play.report(host, apart(first[host]))
    other = asked(play, 2)
    for host in (0, 1):
        assert of(play.report(host, m.NeedsWorld(other[host].function)), m.LoadInWorld)
    second = asked(play, 3, content="the same")
    assert {each.function for each in second.values()} == {first[0].function}
    sent: list[Any] = []
    for host in (0, 1):
        # A host answers once if it has not reported, and again for each later request.
        sent += play.report(host, apart(first[host]))
    assert {each.function: each.status for each in of(sent, m.FunctionReady)} | {1: OK} == {1: OK, 3: OK}


def test_a_function_apart_that_is_requested_while_an_island_restarts_stays_apart():
    play = play_of("2x1x1")
    name = with_function(play)
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    play.say(m.RegisterFunction(2, "content 1", 902, ((0, 1),)))
    compiles = arrived(play, 902, (0,))
    sent = play.report(0, apart(compiles[0])) if compiles else []
    joins_again(play, 1)
    sent += play.say(m.Recompile(1, 950))
    for feed in (902, 950):
        for host in (0, 1):
            for each in of(play.report(host, m.FeedsArrived(play.session, (feed,))), m.Compile):
                assert each.function == name
                assert each.world == 0
                sent += play.report(host, apart(each))
    statuses = [each.status for each in of(sent, m.FunctionReady)]
    assert statuses
    assert all(each == OK for each in statuses)
    assert of(sent, m.JoinWorld) == []
    assert sorted(launched(play)) == [0, 1]


def test_a_function_in_a_world_is_compiled_first_again_when_its_island_is_back():
    play = play_of("2x1x1")
    compiles = asked(play)
    sent = [each for host in (0, 1) for each in play.report(host, m.NeedsWorld(compiles[host].function))]
    (serve,) = of(sent, m.JoinWorld)
    for host in (0, 1):
        play.report(host, m.Compiled(compiles[host].function, OK, b"", 0.1, False))
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    joins_again(play, 1)
    play.say(m.Recompile(1, 950))
    compiles = arrived(play, 950)
    sent = []
    for host, each in compiles.items():
        if not each.world:
            sent += play.report(host, m.NeedsWorld(each.function))
    worlds = {each.world for each in compiles.values() if each.world} | {each.world for each in of(sent, m.LoadInWorld)}
    assert len(worlds) == 1
    assert worlds.pop() > serve.world
    for host in (0, 1):
        sent += play.report(host, m.Compiled(compiles[host].function, OK, b"", 0.1, False))
    assert [each.status for each in of(sent, m.FunctionReady)] == [OK]


def test_an_island_that_fails_between_the_question_and_the_answer_does_not_end_the_function():
    play = play_of("2x1x1")
    compiles = asked(play)
    (load,) = of(play.report(0, m.NeedsWorld(compiles[0].function)), m.LoadInWorld)
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    joins_again(play, 1)
    sent = play.report(0, m.Compiled(compiles[0].function, Status(Code.DATA_LOSS, "closed"), b"", 0.1, False))
    sent += play.say(m.Recompile(1, 950))
    again = arrived(play, 950)
    for host, each in again.items():
        sent += play.report(host, m.NeedsWorld(each.function))
    loads = of(sent, m.LoadInWorld)
    assert len(loads) == 2
    assert {each.world for each in loads} != {load.world}
    for host in (0, 1):
        sent += play.report(host, m.Compiled(again[host].function, OK, b"", 0.1, False))
    assert of(sent, m.FunctionReady)[-1].status == OK


def test_a_cluster_with_an_older_worker_uses_worlds():
    play = play_of("2x1x1")
    play.controller.resources.hosts[1].compiles_first = False
    compiles = asked(play)
    assert {each.islands for each in compiles.values()} == {()}
    assert len({each.world for each in compiles.values()}) == 1
    assert compiles[0].world


# ---- runs


def test_a_run_apart_ends_with_all_islands():
    play = play_of("2x1x1")
    with_function(play)
    sent = launched(play)
    entry = play.controller.sessions[play.session].directory.entries[11]
    play.done(sent[0].sequence, host=0)
    assert entry.state is BufferState.PENDING
    play.done(sent[1].sequence, host=1)
    assert entry.state is BufferState.READY


def test_a_lost_island_fails_the_run_and_the_other_island_ends_its_part():
    play = play_of("2x1x1")
    with_function(play)
    sent = launched(play)
    play.lose(1, "its connection broke")
    assert of(play.outbox(), m.CloseWorld) == []
    assert "host 1 of island 1 is gone" in error_of(play)
    later = [message for _, message in seconds(play, 30)]
    assert of(later, m.RestartIsland) == []
    play.done(sent[0].sequence, host=0)
    assert play.controller.launcher.in_flight == {}


def test_an_island_that_ended_its_part_and_is_lost_then_fails_the_run_only():
    play = play_of("2x1x1")
    with_function(play)
    sent = launched(play)
    play.done(sent[1].sequence, host=1)
    play.lose(1, "its connection broke")
    assert of([message for _, message in seconds(play, 30)], m.RestartIsland) == []
    play.done(sent[0].sequence, host=0)
    assert play.controller.launcher.in_flight == {}
    assert "island 1" in error_of(play)


def test_a_failure_on_a_device_restarts_the_island_whose_devices_wait_for_it_and_no_other():
    """The collectives inside an island do not end by themselves."""
    play = play_of("2x2x1")
    with_function(play, (0, 1, 2, 3))
    sent = launched(play)
    play.report(1, m.DeviceFailed(sent[1].sequence, BROKEN))
    restarts = of([message for _, message in seconds(play, 30)], m.RestartIsland)
    assert [each.island for each in restarts] == [0]
    for host in (2, 3):
        play.done(sent[host].sequence, host=host)
    assert "the kernel failed" in error_of(play)
    assert play.controller.launcher.in_flight == {}


def test_a_host_that_failed_restarts_its_island_and_no_other():
    play = play_of("2x2x1")
    with_function(play, (0, 1, 2, 3))
    sent = launched(play)
    play.report(0, m.Failed(sent[0].sequence, BROKEN))
    restarts = of([message for _, message in seconds(play, 30)], m.RestartIsland)
    assert [each.island for each in restarts] == [0], "island 1 still computes"
    assert "the kernel failed" in error_of(play)


def test_an_island_that_failed_starts_other_collectives_before_the_others_have_ended():
    """Its hosts compute with each other, and not with those of other islands."""
    play = play_of("2x2x1")
    with_function(play, (0, 1, 2, 3))
    sent = launched(play)
    play.report(0, m.Failed(sent[0].sequence, BROKEN))
    ended = play.report(1, m.Failed(sent[1].sequence, BROKEN))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(sent[0].sequence)] * 2
    play.report(2, m.Failed(sent[2].sequence, BROKEN))
    ended = play.report(3, m.Done(((sent[3].sequence, 0, 1),)))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(sent[2].sequence)]


def test_the_failure_of_an_island_is_reported_while_another_one_computes():
    play = play_of("2x1x1")
    with_function(play)
    sent = launched(play)
    play.report(0, m.Failed(sent[0].sequence, BROKEN))
    later = seconds(play, 30)
    assert of([message for _, message in later], m.RestartIsland) == []
    assert "the kernel failed" in error_of(play)
    play.done(sent[1].sequence, host=1)
    assert play.controller.launcher.in_flight == {}


def test_a_loaded_controller_knows_which_functions_run_apart():
    play = play_of("2x1x1")
    with_function(play)
    play.controller = check_dump(play.controller)
    assert all(host.compiles_first for host in play.controller.resources.hosts.values())
    launched(play)
    play.lose(1, "its connection broke")
    sent = play.outbox() + [message for _, message in seconds(play, 30)]
    assert of(sent, m.CloseWorld) + of(sent, m.RestartIsland) == []


def test_functions_survive_an_upgrade_of_all_workers_one_island_after_the_other():
    """Workers of an older version load every function on several islands in a world, and say nothing else of it."""
    play = Play("2x1x1")
    older(play, 0, 1)
    compiles = asked(play)
    for host in (0, 1):
        play.report(host, m.Compiled(compiles[host].function, OK, b"", 0.1, False))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    for number, island in enumerate((1, 0)):
        play.lose(island, "its connection broke")
        play.say(m.FailureAcknowledged((island,), (), ()))
        play.join_again(island)
        older(play, *((0,) if number == 0 else ()))
        play.say(m.Recompile(1, 950 + number))
        sent: list[Any] = []
        for host, each in arrived(play, 950 + number).items():
            is_apart = bool(each.islands)
            sent += play.report(host, m.Compiled(each.function, OK, b"", 0.1, False, is_apart=is_apart))
        assert [each.status for each in of(sent, m.FunctionReady)] == [OK]
        assert sorted(launched(play, 11 + number)) == [0, 1]


def older(play: Play, *hosts: int) -> None:
    for number, host in play.controller.resources.hosts.items():
        host.compiles_first = number not in hosts


def test_an_idle_world_with_runs_of_a_function_apart_is_not_closed():
    """The function was compiled for the world, and was released, but its run is in line on the hosts."""
    play = play_of("4x1x1")
    pairs = [(one, other) for one in range(4) for other in range(one + 1, 4)]
    first = together(play, 10, pairs[0])
    compiles = asked(play)
    world = compiles[0].world
    for host in (0, 1):
        play.report(host, apart(compiles[host]))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    for number, pair in enumerate(pairs[1:5], 11):
        together(play, number, pair)
    assert sorted(launched(play)) == [0, 1]
    play.say(m.ReleaseProgram(1))
    for number in (1, *range(10, 15)):
        play.say(m.ReleaseFunction(number))
    compiles = asked(play, 30, pairs[5])
    closed = {each.world for each in of(play.report(2, m.NeedsWorld(compiles[2].function)), m.CloseWorld)}
    assert first not in closed or world != first


def together(play: Play, function: int, pair: tuple[int, int]) -> int:
    """A compiled function whose islands communicate; its world."""
    compiles = asked(play, function, pair)
    sent = [each for host in pair for each in play.report(host, m.NeedsWorld(compiles[host].function))]
    for host in pair:
        play.report(host, m.Compiled(compiles[host].function, OK, b"", 0.1, False))
    return int(of(sent, m.LoadInWorld)[0].world)


def test_a_world_that_cannot_start_fails_no_function_apart_that_was_to_be_loaded_in_it():
    play = play_of("2x1x1")
    with_function(play)
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    joins_again(play, 1)
    crossing = asked(play, 2)
    (load,) = of(play.report(0, m.NeedsWorld(crossing[0].function)), m.LoadInWorld)
    play.say(m.Recompile(1, 950))
    again = arrived(play, 950)
    new = asked(play, 3)
    assert launched(play) == {}, "the function is being compiled"
    failed = Status(Code.UNAVAILABLE, "this host cannot join the hosts of islands 0, 1")
    sent = play.report(1, m.WorldFailed(load.world, failed))
    sent += play.report(0, m.Compiled(crossing[0].function, failed, b"", 0.0, False))
    sent += play.report(1, m.NeedsWorld(crossing[1].function))
    runs: dict[int, m.Run] = {}
    for compiles in (again, new):
        for host, each in compiles.items():
            play.worker(host, apart(each))
            for (name, number), message in play.sent():
                sent.append(message)
                if name == "host" and type(message) is m.Run:
                    runs[number] = message
    statuses = {each.function: each.status.code for each in of(sent, m.FunctionReady)}
    assert (statuses.get(1, Code.OK), statuses.get(3)) == (Code.OK, Code.OK)
    assert error_of(play) == ""
    assert sorted(runs) == [0, 1]
