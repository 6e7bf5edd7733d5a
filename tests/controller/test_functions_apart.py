"""Functions on several islands whose hosts find out whether the islands communicate, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, single
from atoll.launch.worlds import MOST_WORLDS
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from tests.controller.dumps import check_dump
from tests.controller.play import Play, on, runs
from tests.controller.test_worlds import of, registered, sent_until

BROKEN = Status(Code.INVALID_ARGUMENT, "broken")


class Islands(Play):
    """A session on hosts that compile first, except those in `older`."""

    def __init__(self, topology: str, older: tuple[int, ...] = (), **settings: Any) -> None:
        self.older = older
        super().__init__(topology, **settings)

    def compiles_first(self, host: int) -> bool:
        return host not in self.older

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
        self.say(m.RegisterProgram(function, single("f", (), call)))

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
    first, second = runs(play.say(m.Launch(1, (), (11,), ())))
    play.done(first.sequence, host=0)
    play.done(second.sequence, host=2)
    assert play.controller.sessions[play.session].directory.entries[11].state is BufferState.READY


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


def test_functions_that_need_no_world_do_not_count_for_the_limit_of_worlds():
    islands = 7  # 21 pairs
    play = Islands(f"{islands}x1x1")
    pairs = [(one, other) for one in range(islands) for other in range(one)]
    for number, pair in enumerate(pairs[: MOST_WORLDS + 2], 1):
        name = of(registered(play, number, pair), m.Compile)[0].function
        for host in pair:
            play.worker(host, m.NeedsWorld(name) if number <= MOST_WORLDS else compiled(name, is_apart=True))
        play.outbox()
    name = of(registered(play, 100, pairs[MOST_WORLDS]), m.Compile)[0].function
    (ready,) = of(play.report(pairs[MOST_WORLDS][0], m.NeedsWorld(name)), m.FunctionReady)
    assert ready.status.code == Code.RESOURCE_EXHAUSTED
    assert f"on {MOST_WORLDS} different sets of islands" in ready.status.message


def test_a_host_that_needs_a_world_for_a_released_or_an_unknown_function_gets_no_answer():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    play.say(m.ReleaseFunction(1))
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


# ---- workers of an earlier version


def test_islands_with_an_older_worker_have_a_world_from_the_start():
    play = Islands("2x1x1", older=(1,))
    sent = registered(play)
    (serve,) = of(sent, m.JoinWorld)
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(serve.world, ())}
    assert serve == m.JoinWorld(serve.world, 0, 2), "as earlier versions of the controller have sent it"


def test_a_source_that_arrives_when_an_older_worker_has_replaced_another_is_compiled_in_a_world():
    play = Islands("2x1x1")
    play.say(m.RegisterFunction(1, "content 1", 901, ((0, 1),)))
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    play.older = (1,)
    play.join_again(1)
    sent = [each for host in (0, 1) for each in play.report(host, m.FeedsArrived(play.session, (901,)))]
    (serve,) = of(sent, m.JoinWorld)
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(serve.world, ())}


# ---- islands that fail


def test_a_failed_island_closes_no_world_and_the_others_end_their_parts():
    play = Islands("2x1x1")
    play.compile_apart()
    first, _ = runs(play.say(m.Launch(1, (), (11,), ())))
    play.lose(1, "its connection broke")
    assert of(play.outbox(), m.CloseWorld) == []
    error = error_of(play, 11)
    assert error.code == Code.DATA_LOSS
    assert "host 1 of island 1 is gone" in error.message
    assert restarted(sent_until(play, 20)) == []
    play.done(first.sequence)
    assert play.controller.launcher.in_flight == {}


def test_a_function_that_is_apart_needs_no_world_when_its_island_is_back():
    play = Islands("2x1x1")
    play.compile_apart()
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    sent = play.say(m.Recompile(1, 950))
    for host in (0, 1):
        sent += play.report(host, m.FeedsArrived(play.session, (950,)))
    assert of(sent, m.JoinWorld) == []
    assert {(each.world, each.islands) for each in of(sent, m.Compile)} == {(0, (1, 1))}
    for host in (0, 1):
        play.report(host, compiled(of(sent, m.Compile)[0].function, is_apart=True))
    assert len(runs(play.say(m.Launch(1, (), (12,), ())))) == 2


def test_a_function_that_communicates_gets_a_world_at_once_when_its_island_is_back():
    play = Islands("2x1x1")
    name = of(registered(play), m.Compile)[0].function
    before = play.answer(0, name).world
    play.answer(1, name)
    for host in (0, 1):
        play.report(host, compiled(name))
    play.lose(1, "its connection broke")
    play.say(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    (serve,) = of(play.say(m.Recompile(1, 950)), m.JoinWorld)
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
    play.say(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)


def sources_arrive(play: Islands, feed: int) -> list[Any]:
    sent = play.say(m.Recompile(1, feed))
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
        assert runs(play.say(m.Launch(1, (), (11,), ()))) == []
    if is_ready:
        play.report(1, compiled(name))
    play.lose(1, "its connection broke again")
    if not launched_first:
        play.say(m.Launch(1, (), (11,), ()))
    sent = play.report(0, m.Compiled(name, Status(Code.DATA_LOSS, "host 1 is gone"), b"", 0.1, False))
    assert of(sent, m.FunctionReady) + of(sent, m.DropFunction) == []
    play.controller = check_dump(play.controller)
    play.say(m.FailureAcknowledged((1,), (), ()))
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


# ---- gangs that fail


def test_a_failure_on_one_island_does_not_restart_another():
    play = Islands("2x1x1")
    play.compile_apart()
    first, second = runs(play.say(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(first.sequence, BROKEN))
    sent = sent_until(play, 20)
    assert restarted(sent) == []
    assert of([each for _, each in sent], m.CloseWorld) == []
    play.done(second.sequence, host=1)
    assert play.controller.launcher.in_flight == {}
    assert "broken" in error_of(play, 11).message


@pytest.mark.parametrize("joint", [0, 2])
@pytest.mark.parametrize("on_device", [True, False])
def test_hosts_that_wait_for_a_failed_host_of_their_island_have_only_this_island_restarted(joint: int, on_device: bool):
    play = Islands("2x2x1", joint_islands=joint)
    play.compile_apart(devices=(0, 1, 2, 3))
    sent = {to: each for to, each in launched(play) if type(each) is m.Run}
    failed = sent["host", 2].sequence
    play.report(2, m.DeviceFailed(failed, BROKEN) if on_device else m.Failed(failed, BROKEN))
    assert restarted(sent_until(play, 20)) == [1]


def launched(play: Play) -> list[tuple[tuple[str, int], Any]]:
    play.proxy(play.session, m.Launch(1, (), (11,), ()))
    return play.sent()


@pytest.mark.parametrize("joint", [0, 2])
def test_a_failure_on_a_whole_island_restarts_none(joint: int):
    play = Islands("2x2x1", joint_islands=joint)
    play.compile_apart(devices=(0, 1, 2, 3))
    sent = {to: each for to, each in launched(play) if type(each) is m.Run}
    for host in (2, 3):
        play.report(host, m.Failed(sent["host", host].sequence, BROKEN))
    assert restarted(sent_until(play, 20)) == []
