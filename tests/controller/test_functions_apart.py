"""Functions on several islands whose hosts find out whether the islands communicate, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, single
from atoll.launch.worlds import MAX_WORLDS
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on, runs
from tests.launch.test_worlds import of, registered, sent_until

BROKEN = Status(Code.INVALID_ARGUMENT, "broken")


class Islands(Play):
    """A session on hosts that compile first, except those in `not_first`."""

    def __init__(self, topology: str, not_first: tuple[int, ...] = (), **settings: Any) -> None:
        self.not_first = not_first
        super().__init__(topology, **settings)

    def compiles_first(self, host: int) -> bool:
        return host not in self.not_first

    def compile_apart(self, function: int = 1, devices: tuple[int, ...] = (0, 1)) -> list[Any]:
        """A compiled function on these devices, which do not communicate, and a program of its number that calls it."""
        sent = registered(self, function, devices)
        hosts = sorted({self.controller.sessions[self.session].devices.locations[d].host for d in devices})
        for host in hosts:
            sent += self.report(host, compiled(of(sent, m.Compile)[0].function, is_apart=True))
        self.with_program(function, devices)
        return sent

    def with_program(self, function: int, devices: tuple[int, ...]) -> None:
        call = Call(function, (), (on(*devices),), devices)
        self.send(m.RegisterProgram(function, single("f", (), call)))

    def answer(self, host: int, name: str) -> m.LoadInWorld:
        """Return the answer to a host that needs a world for a function."""
        self.worker(host, m.NeedsWorld(name))
        (found,) = [each for to, each in self.sent_now() if to == ("host", host) and type(each) is m.LoadInWorld]
        return found

    def sent_now(self) -> list[tuple[tuple[str, int], Any]]:
        self.last = self.sent()
        return self.last


def compiled(name: str, is_apart: bool = False) -> m.Compiled:
    return m.Compiled(name, OK, b"", 0.1, False, is_apart=is_apart)


def asked(
    play: Islands, function: int = 1, devices: tuple[int, ...] = (0, 1), content: str = ""
) -> dict[int, m.Compile]:
    """Register a function whose source arrives. Return what the hosts are to compile."""
    play.send(m.RegisterFunction(function, content or f"content {function}", 900 + function, (devices,)))
    return arrived(play, 900 + function)


def arrived(play: Islands, feed: int, hosts: tuple[int, ...] = ()) -> dict[int, m.Compile]:
    found = {}
    for host in hosts or range(play.topology.host_count):
        for each in of(play.report(host, m.FeedsArrived(play.session, (feed,))), m.Compile):
            found[host] = each
    return found


def together(play: Islands, function: int, pair: tuple[int, int]) -> int:
    """A compiled function whose islands communicate; its world."""
    compiles = asked(play, function, pair)
    sent = [each for host in pair for each in play.report(host, m.NeedsWorld(compiles[host].function))]
    for host in pair:
        play.report(host, compiled(compiles[host].function))
    return int(of(sent, m.LoadInWorld)[0].world)


def launched(play: Play, handle: int = 11) -> dict[int, m.Run]:
    """Launch program 1. Return its runs, by host."""
    play.proxy(play.session, m.Launch(1, (), (handle,), ()))
    return {number: each for (name, number), each in play.sent() if name == "host" and type(each) is m.Run}


def error_of(play: Play, handle: int) -> Status:
    error = play.controller.sessions[play.session].directory.entries[handle].error
    assert error is not None
    return error


def restarted(sent: list[tuple[Any, Any]]) -> list[int]:
    return [message.island for _, message in sent if type(message) is m.RestartIsland]


# ---- compilation


def test_a_function_whose_islands_do_not_communicate_starts_no_world():
    play = Islands("2x2x1")
    sent = play.compile_apart(devices=(0, 2))
    assert of(sent, m.JoinWorld) == []
    assert {(each.world, each.islands, each.assignment) for each in of(sent, m.Compile)} == {
        (0, (2, 2), (((0, 0), (2, 0)),))
    }
    assert sorted(each.ranks for each in of(sent, m.Compile)) == [(0, 2), (2, 2)]
    sent_runs = launched(play)
    play.done(sent_runs[0].sequence, host=0)
    entry = play.controller.sessions[play.session].directory.entries[11]
    assert entry.state is BufferState.PENDING
    play.done(sent_runs[2].sequence, host=2)
    assert entry.state is BufferState.READY


def test_a_function_whose_islands_communicate_is_loaded_in_a_world():
    play = Islands("3x1x1")
    sent = registered(play, devices=(0, 2))
    name = of(sent, m.Compile)[0].function
    assert of(sent, m.JoinWorld) == []
    first = play.answer(0, name)
    assert [(to, each) for to, each in play.last if type(each) is m.JoinWorld] == [
        (("host", 0), m.JoinWorld(first.world, 0, 2, islands=(0, 2)))
    ]
    play.controller = check_dump(play.controller)
    assert play.answer(2, name) == first
    assert of([each for _, each in play.last], m.JoinWorld) == [], "once"
    (join,) = play.report(0, m.WorldServed(first.world, "unix:/world"))
    assert join == m.JoinWorld(first.world, 1, 2, "unix:/world", (0, 2))
    play.report(0, compiled(name))
    assert [each.status for each in of(play.report(2, compiled(name)), m.FunctionReady)] == [OK]


def test_a_function_is_compiled_for_the_world_that_its_islands_have():
    """Also if its islands do not communicate, since its arguments are probably there."""
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    world = play.answer(0, name).world
    sent = registered(play, 2)
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(world, (1, 1))}
    for host in (0, 1):
        play.report(host, compiled(of(sent, m.Compile)[0].function, is_apart=True))
    assert play.controller.functions.reports[of(sent, m.Compile)[0].function].is_apart


def test_a_host_that_needs_a_world_for_a_released_or_an_unknown_function_gets_no_answer():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    play.send(m.ReleaseFunction(1))
    assert play.report(0, m.NeedsWorld(name)) == []
    assert play.report(0, m.NeedsWorld("unknown")) == []
    alone = of(registered(play, 2, (0,)), m.Compile)[0].function
    assert play.report(0, m.NeedsWorld(alone)) == [], "it is on one island"


def test_hosts_that_disagree_on_a_function_fail_it():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    play.report(0, compiled(name, is_apart=True))
    ready = of(play.report(1, compiled(name)), m.FunctionReady)
    assert [each.status.code for each in ready] == [Code.FAILED_PRECONDITION]
    assert "host 1 and others do not agree" in ready[0].status.message


def test_a_host_that_needs_a_world_for_a_function_that_is_apart_elsewhere_fails_it():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    play.report(0, compiled(name, is_apart=True))
    sent = play.report(1, m.NeedsWorld(name))
    assert of(sent, m.JoinWorld) == []
    assert [each.status.code for each in of(sent, m.FunctionReady)] == [Code.FAILED_PRECONDITION]


def test_the_limit_of_worlds_is_an_error_of_the_function():
    play = Islands("7x1x1")
    pairs = [(one, other) for one in range(7) for other in range(one + 1, 7)]
    for number, pair in enumerate(pairs[:MAX_WORLDS], 1):
        compiles = asked(play, number, pair)
        assert of(play.report(pair[0], m.NeedsWorld(compiles[pair[0]].function)), m.LoadInWorld)
    more = pairs[MAX_WORLDS]
    compiles = asked(play, 50, more)
    sent = play.report(more[0], m.NeedsWorld(compiles[more[0]].function))
    (ready,) = of(sent, m.FunctionReady)
    assert ready.status.code == Code.RESOURCE_EXHAUSTED
    assert f"on {MAX_WORLDS} different sets of islands" in ready.status.message
    assert of(sent, m.DropFunction), "hosts forget what they have compiled"
    assert play.report(more[1], m.NeedsWorld(compiles[more[1]].function)) == []
    compiles = asked(play, 51, more)
    for host in more:
        sent = play.report(host, compiled(compiles[host].function, is_apart=True))
    assert [each.status for each in of(sent, m.FunctionReady)] == [OK], "functions apart need none"


@pytest.mark.parametrize("reported", [(), (0,), (1,), (0, 1)])
def test_a_world_that_starts_between_two_requests_for_a_function_apart_changes_nothing(reported: tuple[int, ...]):
    play = Islands("2x1x1")
    first = asked(play, 1, content="the same")
    for host in reported:
        play.report(host, compiled(first[host].function, is_apart=True))
    other = asked(play, 2)
    for host in (0, 1):
        assert of(play.report(host, m.NeedsWorld(other[host].function)), m.LoadInWorld)
    second = asked(play, 3, content="the same")
    assert {each.function for each in second.values()} == {first[0].function}
    sent: list[Any] = []
    for host in (0, 1):
        # A host answers once if it has not reported, and again for each later request.
        sent += play.report(host, compiled(first[host].function, is_apart=True))
    assert {each.function: each.status for each in of(sent, m.FunctionReady)} | {1: OK} == {1: OK, 3: OK}


# ---- workers that do not find out whether functions need a world


def test_islands_with_a_worker_that_does_not_compile_first_have_a_world_from_the_start():
    play = Islands("2x1x1", not_first=(1,))
    sent = registered(play)
    (serve,) = of(sent, m.JoinWorld)
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(serve.world, ())}


def test_a_source_that_arrives_when_such_a_worker_has_replaced_another_is_compiled_in_a_world():
    play = Islands("2x1x1")
    play.send(m.RegisterFunction(1, "content 1", 901, ((0, 1),)))
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.not_first = (1,)
    play.join_again(1)
    sent = [each for host in (0, 1) for each in play.report(host, m.FeedsArrived(play.session, (901,)))]
    (serve,) = of(sent, m.JoinWorld)
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(serve.world, ())}


def test_functions_survive_that_such_workers_are_replaced_one_island_after_the_other():
    """Workers that do not compile first load every function on several islands in a world, and report nothing else."""
    play = Islands("2x1x1", not_first=(0, 1))
    compiles = asked(play)
    for host in (0, 1):
        play.report(host, compiled(compiles[host].function))
    play.with_program(1, (0, 1))
    for number, island in enumerate((1, 0)):
        play.lose(island, "its connection broke")
        play.send(m.FailureAcknowledged((island,), (), ()))
        play.not_first = (0,) if number == 0 else ()
        play.join_again(island)
        play.send(m.Recompile(1, 950 + number))
        sent: list[Any] = []
        for host, each in arrived(play, 950 + number).items():
            is_apart = bool(each.islands)
            sent += play.report(host, compiled(each.function, is_apart))
        assert [each.status for each in of(sent, m.FunctionReady)] == [OK]
        assert sorted(launched(play, 11 + number)) == [0, 1]


# ---- islands that fail


def test_a_failed_island_closes_no_world_and_the_others_end_their_parts():
    play = Islands("2x1x1")
    play.compile_apart()
    first, _ = runs(play.send(m.Launch(1, (), (11,), ())))
    play.lose(1, "its connection broke")
    assert of(play.outbox(), m.CloseWorld) == []
    error = error_of(play, 11)
    assert error.code == Code.DATA_LOSS
    assert "host 1 of island 1 is gone" in error.message
    assert restarted(sent_until(play, 20)) == []
    play.done(first.sequence)
    assert play.controller.launches.in_flight == {}


def test_a_function_that_is_apart_needs_no_world_when_its_island_is_back():
    play = Islands("2x1x1")
    play.compile_apart()
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    sent = play.send(m.Recompile(1, 950))
    for host in (0, 1):
        sent += play.report(host, m.FeedsArrived(play.session, (950,)))
    assert of(sent, m.JoinWorld) == []
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(0, (1, 1))}
    for host in (0, 1):
        play.report(host, compiled(of(sent, m.Compile)[0].function, is_apart=True))
    assert len(runs(play.send(m.Launch(1, (), (12,), ())))) == 2


def test_a_function_that_communicates_gets_a_world_at_once_when_its_island_is_back():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    before = play.answer(0, name).world
    play.answer(1, name)
    for host in (0, 1):
        play.report(host, compiled(name))
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    (serve,) = of(play.send(m.Recompile(1, 950)), m.JoinWorld)
    assert serve.world > before


def compiled_in_a_world(play: Islands) -> str:
    """A compiled function whose islands communicate, and program 1, which calls it. Return its name."""
    name = str(of(registered(play), m.Compile)[0].function)
    for host in (0, 1):
        play.answer(host, name)
    for host in (0, 1):
        play.report(host, compiled(name))
    play.with_program(1, (0, 1))
    return name


def lose_and_return(play: Islands) -> None:
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)


def sources_arrive(play: Islands, feed: int) -> list[Any]:
    sent = play.send(m.Recompile(1, feed))
    for host in (0, 1):
        sent += play.report(host, m.FeedsArrived(play.session, (feed,)))
    return sent


@pytest.mark.parametrize("is_ready", [True, False], ids=["compiled on the island", "not compiled there"])
@pytest.mark.parametrize("launched_first", [True, False], ids=["launched before", "launched after"])
def test_a_function_that_loses_its_island_again_while_it_is_compiled_again_stays(is_ready: bool, launched_first: bool):
    play = Islands("2x1x1")
    name = compiled_in_a_world(play)
    lose_and_return(play)
    sources_arrive(play, 950)
    if launched_first:
        assert runs(play.send(m.Launch(1, (), (11,), ()))) == []
    if is_ready:
        play.report(1, compiled(name))
    play.lose(1, "its connection broke again")
    if not launched_first:
        play.send(m.Launch(1, (), (11,), ()))
    sent = play.report(0, m.Compiled(name, Status(Code.DATA_LOSS, "host 1 is gone"), b"", 0.1, False))
    assert of(sent, m.FunctionReady) + of(sent, m.DropFunction) == []
    play.controller = check_dump(play.controller)
    play.send(m.FailureAcknowledged((1,), (), ()))
    assert runs(play.join_again(1)) == [], "the hosts do not have the function"
    assert len(of(sources_arrive(play, 951), m.Compile)) == 2
    play.report(0, compiled(name))
    assert sorted(to for to, each in sent_by(play, 1, compiled(name)) if type(each) is m.Run) == [
        ("host", 0),
        ("host", 1),
    ]


def sent_by(play: Play, host: int, message: Any) -> list[tuple[tuple[str, int], Any]]:
    play.worker(host, message)
    return play.sent()


def test_a_first_compilation_that_loses_its_island_fails():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    for host in (0, 1):
        play.answer(host, name)
    play.report(1, compiled(name))
    play.lose(1, "its connection broke")
    sent = play.report(0, m.Compiled(name, Status(Code.DATA_LOSS, "host 1 is gone"), b"", 0.1, False))
    assert [each.status.code for each in of(sent, m.FunctionReady)] == [Code.DATA_LOSS]


def test_an_island_that_ended_its_part_and_is_lost_then_fails_the_run_only():
    play = Islands("2x1x1")
    play.compile_apart()
    sent = launched(play)
    play.done(sent[1].sequence, host=1)
    play.lose(1, "its connection broke")
    assert of([message for _, message in sent_until(play, 30)], m.RestartIsland) == []
    play.done(sent[0].sequence, host=0)
    assert play.controller.launches.in_flight == {}
    assert "island 1" in error_of(play, 11).message


def test_a_function_apart_that_is_requested_while_an_island_restarts_stays_apart():
    play = Islands("2x1x1")
    name = of(play.compile_apart(), m.Compile)[0].function
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.send(m.RegisterFunction(2, "content 1", 902, ((0, 1),)))
    compiles = arrived(play, 902, (0,))
    sent = play.report(0, compiled(compiles[0].function, is_apart=True)) if compiles else []
    play.join_again(1)
    sent += play.send(m.Recompile(1, 950))
    for feed in (902, 950):
        for host in (0, 1):
            for each in of(play.report(host, m.FeedsArrived(play.session, (feed,))), m.Compile):
                assert each.function == name
                assert each.world == 0
                sent += play.report(host, compiled(each.function, is_apart=True))
    statuses = [each.status for each in of(sent, m.FunctionReady)]
    assert statuses
    assert all(each == OK for each in statuses)
    assert of(sent, m.JoinWorld) == []
    assert sorted(launched(play)) == [0, 1]


def test_an_island_that_fails_between_the_question_and_the_answer_does_not_end_the_function():
    play = Islands("2x1x1")
    compiles = asked(play)
    (load,) = of(play.report(0, m.NeedsWorld(compiles[0].function)), m.LoadInWorld)
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    sent = play.report(0, m.Compiled(compiles[0].function, Status(Code.DATA_LOSS, "closed"), b"", 0.1, False))
    sent += play.send(m.Recompile(1, 950))
    again = arrived(play, 950)
    for host, each in again.items():
        sent += play.report(host, m.NeedsWorld(each.function))
    loads = of(sent, m.LoadInWorld)
    assert len(loads) == 2
    assert {each.world for each in loads} != {load.world}
    for host in (0, 1):
        sent += play.report(host, compiled(again[host].function))
    assert of(sent, m.FunctionReady)[-1].status == OK


def test_a_world_that_cannot_start_fails_no_function_apart_that_was_to_be_loaded_in_it():
    play = Islands("2x1x1")
    play.compile_apart()
    play.lose(1, "its connection broke")
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    crossing = asked(play, 2)
    (load,) = of(play.report(0, m.NeedsWorld(crossing[0].function)), m.LoadInWorld)
    play.send(m.Recompile(1, 950))
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
            play.worker(host, compiled(each.function, is_apart=True))
            for (name, number), message in play.sent():
                sent.append(message)
                if name == "host" and type(message) is m.Run:
                    runs[number] = message
    statuses = {each.function: each.status.code for each in of(sent, m.FunctionReady)}
    assert (statuses.get(1, Code.OK), statuses.get(3)) == (Code.OK, Code.OK)
    assert play.controller.sessions[play.session].directory.entries[11].error is None
    assert sorted(runs) == [0, 1]


def test_an_idle_world_with_runs_of_a_function_apart_is_not_closed():
    """The function was compiled for the world, and was released, but its run is in line on the hosts."""
    play = Islands("4x1x1")
    pairs = [(one, other) for one in range(4) for other in range(one + 1, 4)]
    first = together(play, 10, pairs[0])
    compiles = asked(play)
    assert compiles[0].world == first
    for host in (0, 1):
        play.report(host, compiled(compiles[host].function, is_apart=True))
    play.with_program(1, (0, 1))
    for number, pair in enumerate(pairs[1:5], 11):
        together(play, number, pair)
    assert sorted(launched(play)) == [0, 1]
    play.send(m.ReleaseProgram(1))
    for number in (1, *range(10, 15)):
        play.send(m.ReleaseFunction(number))
    compiles = asked(play, 30, pairs[5])
    closed = {each.world for each in of(play.report(2, m.NeedsWorld(compiles[2].function)), m.CloseWorld)}
    assert first not in closed


def test_a_loaded_controller_knows_which_functions_run_apart():
    play = Islands("2x1x1")
    play.compile_apart()
    play.controller = check_dump(play.controller)
    assert all(host.compiles_first for host in play.controller.resources.hosts.values())
    launched(play)
    play.lose(1, "its connection broke")
    sent = play.outbox() + [message for _, message in sent_until(play, 30)]
    assert of(sent, m.CloseWorld) + of(sent, m.RestartIsland) == []


# ---- gangs that fail


def test_a_failure_on_one_island_does_not_restart_another():
    play = Islands("2x1x1")
    play.compile_apart()
    first, second = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(first.sequence, BROKEN))
    sent = sent_until(play, 20)
    assert restarted(sent) == []
    assert of([each for _, each in sent], m.CloseWorld) == []
    play.done(second.sequence, host=1)
    assert play.controller.launches.in_flight == {}
    assert "broken" in error_of(play, 11).message


@pytest.mark.parametrize("joint", [0, 2])
@pytest.mark.parametrize("on_device", [True, False])
def test_hosts_that_wait_for_a_failed_host_of_their_island_have_only_this_island_restarted(joint: int, on_device: bool):
    play = Islands("2x2x1", joint_islands=joint)
    play.compile_apart(devices=(0, 1, 2, 3))
    sent = launched(play)
    failed = sent[2].sequence
    play.report(2, m.DeviceFailed(failed, BROKEN) if on_device else m.Failed(failed, BROKEN))
    assert restarted(sent_until(play, 20)) == [1]
    assert "broken" in error_of(play, 11).message


@pytest.mark.parametrize("joint", [0, 2])
def test_a_failure_on_a_whole_island_restarts_none(joint: int):
    play = Islands("2x2x1", joint_islands=joint)
    play.compile_apart(devices=(0, 1, 2, 3))
    sent = launched(play)
    for host in (2, 3):
        play.report(host, m.Failed(sent[host].sequence, BROKEN))
    assert restarted(sent_until(play, 20)) == []


def test_an_island_that_failed_starts_other_collectives_before_the_others_have_ended():
    """Its hosts compute with each other, and not with those of other islands."""
    play = Islands("2x2x1")
    play.compile_apart(devices=(0, 1, 2, 3))
    sent = launched(play)
    play.report(0, m.Failed(sent[0].sequence, BROKEN))
    ended = play.report(1, m.Failed(sent[1].sequence, BROKEN))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(sent[0].sequence)] * 2
    play.report(2, m.Failed(sent[2].sequence, BROKEN))
    ended = play.report(3, m.Done(((sent[3].sequence, 0, 1),)))
    assert of(ended, m.CollectiveEnded) == [m.CollectiveEnded(sent[2].sequence)]
