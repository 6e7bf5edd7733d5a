"""Tests of migrations of live sessions: lists of messages, and random clients whose slices migrate."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.topology import IslandShape
from atoll.errors import OK, Code, Status
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.migration import migrations as moves
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from tests.controller.play import Play, on, runs
from tests.launch.test_worlds import with_function


class MovePlay(Play):
    """Cluster of several islands, with a session that has a slice of the first devices."""

    def __init__(self, topology: str = "2x1x2", count: int = 1, **options: Any) -> None:
        super().__init__(topology, **options)
        self.send(m.AddSlice(1, SliceRequest(count)))

    def ask(self, island: int = 1, devices: tuple[int, ...] = (), number: int = 1) -> list[Any]:
        self.operator(m.RemapRequest(self.session, number, island, devices))
        return self.outbox()

    def quiesced(self, move: int = 1) -> list[Any]:
        return self.send(m.Quiesced(move))

    @property
    def locations(self) -> dict[int, DeviceLocation]:
        return self.controller.sessions[self.session].devices.locations


def answer_in(messages: list[Any]) -> m.OperationReply:
    (answer,) = [each for each in messages if isinstance(each, m.OperationReply)]
    return answer


def test_a_move_step_by_step():
    play = MovePlay()
    plan = play.with_call()
    play.array(5)
    assert play.ask() == [m.Quiesce(1)]
    # The session is quiet. Its function is compiled for the new devices; nothing else has changed so far.
    assert play.quiesced() == [m.SendSources(((1, (1,)),))]
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    assert play.send(m.Recompile(1, 77)) == []
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (77,)))
    assert (compile_.session, compile_.feed, compile_.assignment) == (play.session, 77, (((0, 0),),))
    # The plans of two hosts copy the array. The proxy learns that this takes credits of its window.
    *keeps, first, second, retired = play.report(1, m.Compiled(compile_.function, OK, b"", 0.1, False))
    assert [type(each) for each in keeps] == [m.RegisterPlan, m.RegisterPlan]
    assert retired == m.CreditReturned(-1)
    (copy,) = second.results
    assert (first.arguments, first.results, second.arguments) == ((5,), (), ())
    assert copy >= 1 << 61
    play.done(first.sequence)
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    # Everything else changes at once.
    replies = play.done(second.sequence, host=1)
    assert play.locations[0] == DeviceLocation(1, 1, 0)
    (take_over,) = runs(replies)
    assert (take_over.arguments, take_over.results) == ((copy,), (5,))
    order = [type(each) for each in replies]
    frees = [each for each in replies if isinstance(each, m.Free)]
    assert frees[0] == m.Free(play.session, (5,))
    assert order.index(m.Free) < order.index(m.Run)
    assert frees[1] == m.Free(play.session, (copy,))
    assert m.DropPlan(plan) in replies
    assert m.Migrated(1, ((0, 1),)) in replies
    assert answer_in(replies) == m.OperationReply(OK, f"slice 1 of session {play.session} is on devices 2 now")
    # The program runs where the device is.
    play.done(take_over.sequence, host=1)
    play.proxy(play.session, m.Launch(1, (5,), (6,), ()))
    ((to, run),) = [each for each in play.sent() if isinstance(each[1], m.Run)]
    assert to == ("host", 1)
    assert run.arguments == (5,)


def test_what_was_launched_before_ends_where_it_was_launched():
    play = MovePlay()
    play.with_call(arguments=0)
    (run,) = runs(play.send(m.Launch(1, (), (7,), ())))
    play.ask()
    assert play.quiesced() == []
    assert m.SendSources(((1, (1,)),)) in play.done(run.sequence)


def test_nothing_happens_before_the_proxy_holds_its_client_back():
    play = MovePlay()
    play.array(5)
    assert play.ask() == [m.Quiesce(1)]
    assert play.outbox() == []
    assert play.send(m.Quiesced(99)) == []


def test_a_function_that_is_being_compiled_is_waited_for():
    play = MovePlay()
    play.send(m.RegisterFunction(1, "content", 90, ((0,),)))
    play.ask()
    assert play.quiesced() == []
    (compile_,) = play.report(0, m.FeedsArrived(play.session, (90,)))
    replies = play.report(0, m.Compiled(compile_.function, OK, b"", 0.1, False))
    assert replies == [m.FunctionReady(1, OK, b""), m.SendSources(((1, (1,)),))]


def test_an_idle_slice_moves_at_once():
    play = MovePlay()
    play.ask()
    replies = play.quiesced()
    assert replies[0] == m.Migrated(1, ((0, 1),))
    assert answer_in(replies).status.ok


def test_a_function_over_islands_moves_with_one_of_its_islands():
    play = MovePlay("3x1x1")
    former = with_function(play, (0, 1))
    assert play.ask(island=2) == [m.Quiesce(1)]
    assert play.quiesced() == [m.SendSources(((1, (1, 2)),))]
    replies = play.send(m.Recompile(1, 77))
    for host in (1, 2):
        replies += play.report(host, m.FeedsArrived(play.session, (77,)))
    (serve,) = [each for each in replies if isinstance(each, m.JoinWorld)]
    assert serve.world != former.world
    play.report(1, m.WorldServed(serve.world, "unix:/next"))
    compiles = [each for each in replies if isinstance(each, m.Compile)]
    assert {each.assignment for each in compiles} == {(((1, 0), (0, 0)),)}
    play.report(1, m.Compiled(compiles[0].function, OK, b"", 0.1, False))
    replies = play.report(2, m.Compiled(compiles[0].function, OK, b"", 0.1, False))
    assert answer_in(replies).status.ok
    assert play.locations[0] == DeviceLocation(2, 2, 0)
    sent = play.send(m.Launch(1, (), (11,), ()))
    (gang,) = play.controller.launches.in_flight.values()
    assert sorted(gang.all_islands) == [1, 2]
    assert len(runs(sent)) == 2


def moved_to_copying(play: MovePlay) -> tuple[m.Run, m.Run]:
    play.array(5)
    play.ask()
    first, second = runs(play.quiesced())
    return first, second


def test_a_copy_that_fails_leaves_everything_where_it_was():
    play = MovePlay()
    first, second = moved_to_copying(play)
    play.done(first.sequence)
    replies = play.report(1, m.Failed(second.sequence, Status(Code.INTERNAL, "no luck")))
    assert answer_in(replies).status.message.startswith("slice 1 of session 1 stays where it is: no luck")
    assert m.Migrated(1, ()) in replies
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    assert set(play.controller.sessions[play.session].directory.entries) == {5}
    assert play.controller.migrations.under_way == {}
    # The operator can retry.
    assert play.ask() == [m.Quiesce(2)]


def test_a_function_that_does_not_compile_there_leaves_everything_where_it_was():
    play = MovePlay()
    name = play.with_function()
    play.ask()
    play.quiesced()
    play.send(m.Recompile(1, 77))
    (compile_,) = play.report(1, m.FeedsArrived(play.session, (77,)))
    replies = play.report(1, m.Compiled(compile_.function, Status(Code.INTERNAL, "no"), b"", 0.1, False))
    assert answer_in(replies).status.code == Code.INTERNAL
    assert not [each for each in replies if isinstance(each, m.FunctionReady)]
    assert play.controller.sessions[play.session].functions == {1: name}
    assert play.controller.functions.users == {name: 1}


@pytest.mark.parametrize("lost", [0, 1])
def test_an_island_that_fails_meanwhile_ends_the_move(lost: int):
    play = MovePlay()
    moved_to_copying(play)
    play.lose(lost, "killed")
    replies = play.outbox()
    assert answer_in(replies).status.code == Code.DATA_LOSS
    assert m.Migrated(1, ()) in replies
    assert play.locations[0] == DeviceLocation(0, 0, 0)


def test_a_session_that_ends_meanwhile_ends_the_move():
    play = MovePlay()
    moved_to_copying(play)
    play.close(play.session)
    assert "has ended" in answer_in(play.outbox()).status.message
    assert play.controller.migrations.under_way == {}


def test_a_session_that_does_not_come_to_rest_goes_on():
    play = MovePlay()
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (7,), ()))
    play.ask()
    play.quiesced()
    play.tick(1.0)
    play.tick(1.0 + moves.DRAIN_SECONDS)
    assert play.outbox() == []
    play.tick(2.0 + moves.DRAIN_SECONDS)
    replies = play.outbox()
    assert answer_in(replies).status.code == Code.DEADLINE_EXCEEDED
    assert "1 of its launches have not ended" in answer_in(replies).status.message
    assert m.Migrated(1, ()) in replies


def test_a_proxy_that_does_not_answer_is_named_soon():
    play = MovePlay()
    play.ask()
    play.tick(1.0)
    play.tick(11.0)
    assert play.outbox() == []
    play.tick(12.0)
    assert (
        "session 1 stays where it is: its proxy has not replied after 11 s" in answer_in(play.outbox()).status.message
    )
    assert play.controller.migrations.under_way == {}


def test_arrays_that_do_not_fit_are_refused_and_no_session_waits():
    play = MovePlay(device_memory=12)
    play.array(5)
    other = play.open(43, "other.py").number
    body = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(2),)), feeds=1)
    play.proxy(other, m.RegisterProgram(1, body))
    play.worker(1, m.FeedsArrived(other, (8,)))
    play.proxy(other, m.Launch(1, (), (9,), (8,)))
    (run,) = runs(play.outbox())
    play.done(run.sequence, host=1)
    play.ask(devices=(2,))
    replies = play.quiesced()
    assert answer_in(replies).status.code == Code.RESOURCE_EXHAUSTED
    assert "need 8 B on device 0 of host 1, where only 4 B are free" in answer_in(replies).status.message
    assert not runs(replies)


def test_a_migration_that_would_split_a_function_is_refused():
    play = MovePlay()
    play.with_function(devices=(0, 1))
    refused = answer_in(play.ask()).status
    assert refused.code == Code.FAILED_PRECONDITION
    assert "runs on virtual devices that move and on others (1)" in refused.message


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"island": 7}, "island 7 does not exist"),
        ({"number": 7}, "slice 7 does not exist"),
        ({"devices": (1,)}, "device 1 is not one of island 1"),
        ({"devices": (2, 3)}, "needs 1 device"),
        ({"island": 0, "devices": (0,)}, "the devices are there already"),
    ],
)
def test_moves_that_cannot_be_are_refused_at_once(ask: dict[str, Any], text: str):
    play = MovePlay()
    (answer,) = play.ask(**ask)
    assert text in answer.status.message


def test_a_session_is_moved_once_at_a_time():
    play = MovePlay()
    play.ask()
    (answer,) = play.ask()
    assert "being moved already" in answer.status.message


def test_no_such_session():
    play = MovePlay()
    play.operator(m.RemapRequest(77, 1, 0))
    assert "session 77 does not exist" in answer_in(play.outbox()).status.message


def test_a_lost_island_is_no_target():
    play = MovePlay()
    play.lose(1, "killed")
    play.outbox()
    assert "restarting" in answer_in(play.ask()).status.message


def test_an_array_keeps_who_made_it_and_where():
    play = MovePlay()
    first, second = moved_to_copying(play)
    entries = play.controller.sessions[play.session].directory.entries
    entries[5].traceback_id = 33
    play.done(first.sequence)
    play.done(second.sequence, host=1)
    assert (entries[5].producer, entries[5].traceback_id, entries[5].hosts) == ("put", 33, (1,))


# ---- islands that are removed and added


class IslandPlay(MovePlay):
    def operate(self, question: Any) -> list[Any]:
        self.operator(question)
        return self.outbox()

    def join_new(self, *hosts: int) -> list[Any]:
        for host in hosts:
            self.join(host, pid=3000 + host)
        return self.outbox()

    @property
    def states(self) -> list[str]:
        return [island.state for island in report(self.controller).islands]


def test_an_island_is_added_while_a_session_runs():
    play = IslandPlay("1x2x1")
    play.with_call()
    play.array(5)
    assert play.operate(m.AddIslandRequest()) == [m.StartIsland(1, IslandShape(2, 1, "cpu"))]
    assert play.states == ["ready", "starting"]
    # A session that opens before the island is up does not use it.
    early = play.open(50, "early.py")
    assert len(early.devices.virtual) == 2
    play.outbox()
    stores = play.join_new(2)
    assert [type(each) for each in stores] == [m.OpenStore, m.OpenStore]
    *_, greeting, greeting_too, answer = play.join_new(3)
    assert greeting == greeting_too == m.HostsRestarted(((2, "unix:/data-2"), (3, "unix:/data-3")))
    assert answer == m.OperationReply(OK, "island 1 is up, with devices 2, 3")
    late = play.open(51, "late.py")
    assert [device.island for device in late.devices.virtual] == [0, 0, 1, 1]
    # The slice can move there.
    play.outbox()
    assert play.ask(1) == [m.Quiesce(1)]


def test_an_island_that_does_not_start_is_removed():
    play = IslandPlay("1x1x1")
    play.operate(m.AddIslandRequest())
    play.engine(m.IslandNotRestarted(1, "its workers ended 9 times"))
    replies = play.outbox()
    assert m.EndIsland(1) in replies
    assert "did not start" in answer_in(replies).status.message
    assert play.states == ["ready", "drained"]
    play.operate(m.AddIslandRequest())
    play.tick(1.0)
    assert play.outbox() == []
    play.tick(200.0)
    assert "not up within 120 s" in answer_in(play.outbox()).status.message
    assert len(play.open(52, "").devices.virtual) == 1


def test_an_island_whose_start_succeeds_the_second_time_is_up():
    play = IslandPlay("1x2x1")
    play.operate(m.AddIslandRequest())
    play.join_new(2)
    play.engine(m.WorkerEnded(2, 3002, -9, "killed"))
    assert not [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert answer_in(play.join_new(2, 3)).status.ok
    assert play.states == ["ready", "ready"]


def test_an_island_is_drained_of_all_sessions():
    play = IslandPlay("2x1x2")
    play.array(5)
    other = play.open(50, "other.py").number
    play.outbox()
    assert play.operate(m.DrainRequest(0)) == [m.Quiesce(1), m.Quiesce(2)]
    assert play.states == ["draining", "ready"]
    assert "being drained already" in answer_in(play.operate(m.DrainRequest(0))).status.message
    assert "only one that is ready" in answer_in(play.operate(m.DrainRequest(1))).status.message
    # No new sessions or slices are placed there.
    assert {device.island for device in play.open(51, "late.py").devices.virtual} == {1}
    play.outbox()
    play.proxy(other, m.Quiesced(2))
    assert play.outbox() == [m.Migrated(2, ((0, 1), (1, 1)))]
    first, second = runs(play.quiesced(1))
    play.done(first.sequence)
    replies = play.done(second.sequence, host=1)
    assert m.Migrated(1, ((0, 1), (1, 1))) in replies
    assert replies.count(m.HostsFailed((0,))) == 3
    assert m.EndIsland(0) in replies
    # Reports of its worker are ignored from now on.
    play.lose(0, "closed")
    assert play.outbox() == []
    play.engine(m.IslandEnded(0))
    assert answer_in(play.outbox()) == m.OperationReply(OK, "island 0 is empty, and its workers have ended")
    assert play.states == ["drained", "ready"]
    assert [location.island for location in play.locations.values()] == [1, 1, 1, 1]
    assert (
        answer_in(play.operate(m.DrainRequest(0))).status.message
        == "island 0 was drained already (see `atoll undrain`)"
    )
    play.tick(500.0)
    assert not [each for each in play.outbox() if isinstance(each, m.OperationReply | m.RestartIsland)]


def test_a_session_that_leaves_islands_by_itself_is_told_and_its_devices_stay_for_the_islands_return():
    play = IslandPlay("2x1x2")
    play.array(5)
    play.send(m.LeavesIslands())
    assert play.operate(m.DrainRequest(0)) == [m.HostsLeave((0,))]
    play.tick(1.0)
    play.tick(2.0)
    assert play.states == ["draining", "ready"]
    play.send(m.Release((5,)))
    play.outbox()
    play.tick(3.0)
    assert m.EndIsland(0) in play.outbox()
    assert play.states == ["drained", "ready"]
    assert [location.island for location in play.locations.values()] == [0, 0, 1, 1]


def test_a_drain_does_not_wait_for_ever_for_a_session_that_says_that_it_leaves():
    play = IslandPlay("2x1x2")
    play.array(5)
    play.send(m.LeavesIslands())
    play.operate(m.DrainRequest(0))
    play.tick(1.0)
    play.outbox()
    play.tick(62.0)
    replies = play.outbox()
    assert m.HostsLeave((0,), stay=True) in replies
    assert "session 1 (script.py): it has not left within 60 s" in answer_in(replies).status.message
    assert play.states == ["ready", "ready"]


def test_a_drain_that_is_not_possible_moves_no_session():
    play = IslandPlay("2x1x2")
    play.with_put(2)
    body = single("spread", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0, 2),)), feeds=1)
    play.send(m.RegisterProgram(3, body))
    play.open(50, "other.py")
    play.outbox()
    (answer,) = play.operate(m.DrainRequest(0))
    assert "island 0 is in use: session 1 (script.py): 'spread' lies on" in answer.status.message
    assert play.states == ["ready", "ready"]
    assert play.controller.migrations.under_way == {}


def test_a_drain_is_not_held_up_by_a_proxy_that_does_not_answer():
    play = IslandPlay("2x1x1")
    play.operate(m.DrainRequest(0))
    play.tick(1.0)
    play.tick(12.0)
    reply = answer_in(play.outbox())
    assert reply.status.message == "island 0 is in use: session 1 (script.py): its proxy has not replied after 11 s"
    assert play.states == ["ready", "ready"]
    assert play.operate(m.DrainRequest(0)) == [m.Quiesce(2)], "the operator can retry"


def test_an_island_that_fails_while_it_is_drained_is_restarted_and_its_operator_answered():
    play = IslandPlay("2x1x1")
    play.operate(m.DrainRequest(0))
    play.lose(0, "killed")
    replies = play.outbox()
    assert "island 0 is in use: session 1 (script.py): host 0 of island 0 is gone" in answer_in(replies).status.message
    assert m.Migrated(1, ()) in replies
    assert play.states == ["restarting", "ready"]
    play.join_again(0)
    assert play.states == ["ready", "ready"]


def test_a_drain_during_which_a_move_fails_leaves_the_island():
    play = IslandPlay("3x1x1")
    play.array(5)
    play.operate(m.DrainRequest(0))
    _, second = runs(play.quiesced())
    replies = play.report(1, m.Failed(second.sequence, Status(Code.INTERNAL, "no luck")))
    assert "island 0 is in use: session 1 (script.py): no luck" in answer_in(replies).status.message
    assert play.states == ["ready", "ready", "ready"]


def test_islands_of_other_shapes_are_no_way_out():
    play = IslandPlay("2x1x2")
    play.lose(1, "killed")
    play.outbox()
    (answer,) = play.operate(m.DrainRequest(0))
    assert "the only one that is ready" in answer.status.message
    (answer,) = play.operate(m.DrainRequest(1))
    assert "island 1 is restarting" in answer.status.message
    (answer,) = play.operate(m.DrainRequest(7))
    assert "island 7 does not exist" in answer.status.message


def test_a_proxy_that_releases_the_controllers_copies_ends_its_session_and_nothing_else():
    play = MovePlay()
    play.array(5)
    play.ask()
    first, second = runs(play.quiesced())
    (copy,) = second.results
    play.send(m.Release((copy,)))
    play.done(first.sequence)
    play.done(second.sequence, host=1)
    messages = play.outbox()
    assert play.controller.migrations.under_way == {}
    assert play.session not in play.controller.sessions, messages
    assert play.open(7, "other.py").number, "others are still served"
    assert [each for each in play.outbox() if isinstance(each, m.Welcome)]
