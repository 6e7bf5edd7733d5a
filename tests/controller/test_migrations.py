"""Moves of live sessions: tables of messages, and random clients whose slices are moved about."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slices import SliceRequest
from atoll.controller.operators.report import report
from atoll.controller.sessions import migrations as moves
from atoll.errors import OK, Code, Status
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.protocol import messages as m
from tests.controller.play import Play, on, ready, runs
from tests.controller.world import Client, World


class MovePlay(Play):
    """A session with a slice of the first devices, on a cluster of several islands."""

    def __init__(self, topology: str = "2x1x2", count: int = 1, **options: Any) -> None:
        super().__init__(topology, **options)
        self.say(m.AddSlice(1, SliceRequest(count)))

    def ask(self, island: int = 1, devices: tuple[int, ...] = (), number: int = 1) -> list[Any]:
        self.controller.from_operator(9, m.RemapRequest(self.session, number, island, devices))
        return self.outbox()

    def rest(self, move: int = 1) -> list[Any]:
        return self.say(m.Quiesced(move))

    @property
    def locations(self) -> dict[int, DeviceLocation]:
        return self.controller.sessions[self.session].devices.locations


def told(messages: list[Any]) -> m.OperationReply:
    (answer,) = [each for each in messages if isinstance(each, m.OperationReply)]
    return answer


def test_a_move_step_by_step():
    play = MovePlay()
    plan = play.with_call()
    play.array(5)
    assert play.ask() == [m.Quiesce(1)]
    # The session is still: its function is compiled for the new place. Nothing has changed so far.
    assert play.rest() == [m.SendSources(((1, (1,)),))]
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    assert play.say(m.CompileAgain(1, 77)) == []
    (compile_,) = play.hear(1, m.FeedsArrived(play.session, (77,)))
    assert (compile_.session, compile_.feed, compile_.assignment) == (play.session, 77, (((0, 0),),))
    # The array is copied, by plans of the two hosts; the proxy is told that this takes room in its window.
    *keeps, first, second, retired = play.hear(1, m.Compiled(compile_.function, OK, b"info", 0.1, False))
    assert [type(each) for each in keeps] == [m.RegisterPlan, m.RegisterPlan]
    assert retired == m.CreditReturned(-1)
    (copy,) = second.results
    assert (first.arguments, first.results, second.arguments) == ((5,), (), ())
    assert copy >= 1 << 61
    play.done(first.sequence)
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    # Then all at once.
    said = play.done(second.sequence, host=1)
    assert play.locations[0] == DeviceLocation(1, 1, 0)
    (take_over,) = runs(said)
    assert (take_over.arguments, take_over.results) == ((copy,), (5,))
    order = [type(each) for each in said]
    frees = [each for each in said if isinstance(each, m.Free)]
    assert frees[0] == m.Free(play.session, (5,))
    assert order.index(m.Free) < order.index(m.Run)
    assert frees[1] == m.Free(play.session, (copy,))
    assert m.DropPlan(plan) in said
    assert m.Migrated(1, ((0, 1),)) in said
    assert told(said) == m.OperationReply(OK, f"slice 1 of session {play.session} is on devices 2 now")
    # The program runs where the device is.
    play.done(take_over.sequence, host=1)
    play.controller.from_proxy(play.session, m.Launch(1, (5,), (6,), ()))
    ((to, run),) = [each for each in play.sent() if isinstance(each[1], m.Run)]
    assert to == ("host", 1)
    assert run.arguments == (5,)


def test_what_was_launched_before_ends_where_it_was_launched():
    play = MovePlay()
    play.with_call(arguments=0)
    (run,) = runs(play.say(m.Launch(1, (), (7,), ())))
    play.ask()
    assert play.rest() == []
    assert m.SendSources(((1, (1,)),)) in play.done(run.sequence)


def test_nothing_happens_before_the_proxy_holds_its_client_back():
    play = MovePlay()
    play.array(5)
    assert play.ask() == [m.Quiesce(1)]
    assert play.outbox() == []
    assert play.say(m.Quiesced(99)) == []


def test_a_function_that_is_being_compiled_is_waited_for():
    play = MovePlay()
    play.say(m.RegisterFunction(1, "content", 90, ((0,),)))
    play.ask()
    assert play.rest() == []
    (compile_,) = play.hear(0, m.FeedsArrived(play.session, (90,)))
    said = play.hear(0, m.Compiled(compile_.function, OK, b"info", 0.1, False))
    assert said == [m.FunctionReady(1, OK, b"info"), m.SendSources(((1, (1,)),))]


def test_an_idle_slice_moves_at_once():
    play = MovePlay()
    play.ask()
    said = play.rest()
    assert said[0] == m.Migrated(1, ((0, 1),))
    assert told(said).status.ok


def moved_to_copying(play: MovePlay) -> tuple[m.Run, m.Run]:
    play.array(5)
    play.ask()
    first, second = runs(play.rest())
    return first, second


def test_a_copy_that_fails_leaves_everything_where_it_was():
    play = MovePlay()
    first, second = moved_to_copying(play)
    play.done(first.sequence)
    said = play.hear(1, m.Failed(second.sequence, Status(Code.INTERNAL, "no luck")))
    assert told(said).status.message.startswith("slice 1 of session 1 stays where it is: no luck")
    assert m.Migrated(1, ()) in said
    assert play.locations[0] == DeviceLocation(0, 0, 0)
    assert set(play.controller.sessions[play.session].directory.entries) == {5}
    assert play.controller._moves.under_way == {}
    # It can be tried again.
    assert play.ask() == [m.Quiesce(2)]


def test_a_function_that_does_not_compile_there_leaves_everything_where_it_was():
    play = MovePlay()
    name = play.with_function()
    play.ask()
    play.rest()
    play.say(m.CompileAgain(1, 77))
    (compile_,) = play.hear(1, m.FeedsArrived(play.session, (77,)))
    said = play.hear(1, m.Compiled(compile_.function, Status(Code.INTERNAL, "no"), b"", 0.1, False))
    assert told(said).status.code == Code.INTERNAL
    assert not [each for each in said if isinstance(each, m.FunctionReady)]
    assert play.controller.sessions[play.session].functions == {1: name}
    assert play.controller.functions.users == {name: 1}


@pytest.mark.parametrize("lost", [0, 1])
def test_an_island_that_is_lost_meanwhile_ends_the_move(lost: int):
    play = MovePlay()
    moved_to_copying(play)
    play.controller.worker_lost(lost, "killed")
    said = play.outbox()
    assert told(said).status.code == Code.DATA_LOSS
    assert m.Migrated(1, ()) in said
    assert play.locations[0] == DeviceLocation(0, 0, 0)


def test_a_session_that_ends_meanwhile_ends_the_move():
    play = MovePlay()
    moved_to_copying(play)
    play.controller.close_session(play.session)
    assert "has ended" in told(play.outbox()).status.message
    assert play.controller._moves.under_way == {}


def test_a_session_that_does_not_come_to_rest_goes_on():
    play = MovePlay()
    play.with_call(arguments=0)
    play.say(m.Launch(1, (), (7,), ()))
    play.ask()
    play.rest()
    play.controller.tick(1.0)
    play.controller.tick(1.0 + moves.REST_SECONDS)
    assert play.outbox() == []
    play.controller.tick(2.0 + moves.REST_SECONDS)
    said = play.outbox()
    assert told(said).status.code == Code.DEADLINE_EXCEEDED
    assert "1 of its launches have not ended" in told(said).status.message
    assert m.Migrated(1, ()) in said


def test_a_proxy_that_does_not_answer_is_named():
    play = MovePlay()
    play.ask()
    play.controller.tick(1.0)
    play.controller.tick(2.0 + moves.REST_SECONDS)
    assert "its proxy does not answer" in told(play.outbox()).status.message


def test_arrays_that_do_not_fit_are_refused_and_nobody_waits():
    play = MovePlay(device_memory=12)
    play.array(5)
    other = play.controller.open_session(43, "other.py").number
    body = single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(2),)), feeds=1)
    play.controller.from_proxy(other, m.RegisterProgram(1, body))
    play.controller.from_worker(1, m.FeedsArrived(other, (8,)))
    play.controller.from_proxy(other, m.Launch(1, (), (9,), (8,)))
    (run,) = runs(play.outbox())
    play.done(run.sequence, host=1)
    play.ask(devices=(2,))
    said = play.rest()
    assert told(said).status.code == Code.RESOURCE_EXHAUSTED
    assert "need 8 B on device 0 of host 1, where 4 B are free" in told(said).status.message
    assert not runs(said)


def test_what_would_be_torn_apart_is_refused():
    play = MovePlay()
    play.with_function(devices=(0, 1))
    refused = told(play.ask()).status
    assert refused.code == Code.FAILED_PRECONDITION
    assert "runs on virtual devices that move and on others (1)" in refused.message


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"island": 7}, "island 7 does not exist"),
        ({"number": 7}, "slice 7 does not exist"),
        ({"devices": (1,)}, "device 1 is not one of island 1"),
        ({"devices": (2, 3)}, "needs 1 devices"),
        ({"island": 0, "devices": (0,)}, "they are there already"),
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
    play.controller.from_operator(9, m.RemapRequest(77, 1, 0))
    assert "session 77 does not exist" in told(play.outbox()).status.message


def test_a_lost_island_is_no_target():
    play = MovePlay()
    play.controller.worker_lost(1, "killed")
    play.outbox()
    assert "restarting" in told(play.ask()).status.message


def test_an_array_keeps_who_made_it_and_where():
    play = MovePlay()
    first, second = moved_to_copying(play)
    entries = play.controller.sessions[play.session].directory.entries
    entries[5].context = 33
    play.done(first.sequence)
    play.done(second.sequence, host=1)
    assert (entries[5].maker, entries[5].context, entries[5].hosts) == ("put", 33, (1,))


# ---- islands that come and go


class IslandPlay(MovePlay):
    def operate(self, question: Any) -> list[Any]:
        self.controller.from_operator(9, question)
        return self.outbox()

    def join(self, *hosts: int) -> list[Any]:
        for host in hosts:
            here = ready(self.controller.resources.topology, host, f"unix:/data-{host}")
            self.controller.worker_joined(here, 3000 + host)
        return self.outbox()

    @property
    def states(self) -> list[str]:
        return [island["state"] for island in report(self.controller)["islands"]]


def test_an_island_is_added_while_a_session_runs():
    play = IslandPlay("1x2x1")
    play.with_call()
    play.array(5)
    assert play.operate(m.AddIslandRequest()) == [m.StartIsland(1)]
    assert play.states == ["ready", "starting"]
    # Whoever comes before it is up has no part in it.
    early = play.controller.open_session(50, "early.py")
    assert len(early.devices.virtual) == 2
    play.outbox()
    stores = play.join(2)
    assert [type(each) for each in stores] == [m.OpenStore, m.OpenStore]
    *_, greeting, greeting_too, answer = play.join(3)
    assert greeting == greeting_too == m.HostsBack(((2, "unix:/data-2"), (3, "unix:/data-3")))
    assert answer == m.OperationReply(OK, "island 1 is up, with devices 2, 3")
    late = play.controller.open_session(51, "late.py")
    assert [device.island for device in late.devices.virtual] == [0, 0, 1, 1]
    # The slice can go there.
    play.outbox()
    assert play.ask(1) == [m.Quiesce(1)]


def test_an_island_that_does_not_start_is_given_up():
    play = IslandPlay("1x1x1")
    play.operate(m.AddIslandRequest())
    play.controller.island_given_up(1, "its workers ended 9 times")
    said = play.outbox()
    assert m.EndIsland(1) in said
    assert "does not start" in told(said).status.message
    assert play.states == ["ready", "drained"]
    play.operate(m.AddIslandRequest())
    play.controller.tick(1.0)
    assert play.outbox() == []
    play.controller.tick(200.0)
    assert "not up within 120 s" in told(play.outbox()).status.message
    assert len(play.controller.open_session(52, "").devices.virtual) == 1


def test_an_island_whose_start_succeeds_the_second_time_is_up():
    play = IslandPlay("1x2x1")
    play.operate(m.AddIslandRequest())
    play.join(2)
    play.controller.worker_ended(m.WorkerEnded(2, 3002, -9, "killed"))
    assert not [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert told(play.join(2, 3)).status.ok
    assert play.states == ["ready", "ready"]


def test_an_island_is_drained_of_all_sessions():
    play = IslandPlay("2x1x2")
    play.array(5)
    other = play.controller.open_session(50, "other.py").number
    play.outbox()
    assert play.operate(m.DrainRequest(0)) == [m.Quiesce(1), m.Quiesce(2)]
    assert play.states == ["draining", "ready"]
    assert "being drained already" in told(play.operate(m.DrainRequest(0))).status.message
    assert "only one that is ready" in told(play.operate(m.DrainRequest(1))).status.message
    # Nothing new goes there: neither sessions nor slices.
    assert {device.island for device in play.controller.open_session(51, "late.py").devices.virtual} == {1}
    play.outbox()
    play.controller.from_proxy(other, m.Quiesced(2))
    assert play.outbox() == [m.Migrated(2, ((0, 1), (1, 1)))]
    first, second = runs(play.rest(1))
    play.done(first.sequence)
    said = play.done(second.sequence, host=1)
    assert m.Migrated(1, ((0, 1), (1, 1))) in said
    assert said.count(m.HostsLost((0,))) == 3
    assert m.EndIsland(0) in said
    # Whatever is heard of its worker now was to be expected.
    play.controller.worker_lost(0, "closed")
    assert play.outbox() == []
    play.controller.island_ended(0)
    assert told(play.outbox()) == m.OperationReply(OK, "island 0 is empty, and its workers have ended")
    assert play.states == ["drained", "ready"]
    assert [location.island for location in play.locations.values()] == [1, 1, 1, 1]
    assert "does not exist" in told(play.operate(m.DrainRequest(0))).status.message
    play.controller.tick(500.0)
    assert not [each for each in play.outbox() if isinstance(each, m.OperationReply | m.RestartIsland)]


def test_a_drain_that_cannot_be_moves_nobody():
    play = IslandPlay("2x1x2")
    play.with_put(2)
    body = single("spread", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0, 2),)), feeds=1)
    play.say(m.RegisterProgram(3, body))
    play.controller.open_session(50, "other.py")
    play.outbox()
    (answer,) = play.operate(m.DrainRequest(0))
    assert "island 0 is in use: session 1 (script.py): 'spread' lies on" in answer.status.message
    assert play.states == ["ready", "ready"]
    assert play.controller._moves.under_way == {}


def test_a_drain_during_which_a_move_fails_leaves_the_island():
    play = IslandPlay("3x1x1")
    play.array(5)
    play.operate(m.DrainRequest(0))
    _, second = runs(play.rest())
    said = play.hear(1, m.Failed(second.sequence, Status(Code.INTERNAL, "no luck")))
    assert "island 0 is in use: session 1 (script.py): no luck" in told(said).status.message
    assert play.states == ["ready", "ready", "ready"]


def test_islands_of_other_shapes_are_no_way_out():
    play = IslandPlay("2x1x2")
    play.controller.worker_lost(1, "killed")
    play.outbox()
    (answer,) = play.operate(m.DrainRequest(0))
    assert "the only one that is ready" in answer.status.message
    (answer,) = play.operate(m.DrainRequest(1))
    assert "island 1 is restarting" in answer.status.message
    (answer,) = play.operate(m.DrainRequest(7))
    assert "island 7 does not exist" in answer.status.message


# ---- random clients, whose slices are moved about


class MovingClient(Client):
    """Also makes and releases slices, and holds still while it is moved."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.held = False
        self.slices: list[int] = []

    @property
    def locations(self) -> dict[int, DeviceLocation]:
        return self.world.controller.sessions[self.number].devices.locations

    def apart(self) -> list[int]:
        """Virtual devices, one for each physical one."""
        return sorted({location: device for device, location in sorted(self.locations.items(), reverse=True)}.values())

    def spec(self) -> Any:
        devices = self.apart()
        chosen = tuple(self.rng.sample(devices, self.rng.randint(1, min(3, len(devices)))))
        return self._spec(chosen)

    def island_spec(self) -> Any:
        islands = sorted({location.island for location in self.locations.values()})
        island = self.rng.choice(islands)
        devices = [device for device in self.apart() if self.locations[device].island == island]
        return self._spec(tuple(self.rng.sample(devices, self.rng.randint(1, len(devices)))))

    def _spec(self, devices: tuple[int, ...]) -> Any:
        spec = super().spec()
        tiling = type(spec.sharding.tiling)((len(devices),), tuple(range(len(devices))))
        return type(spec)("float32", (6,), type(spec.sharding)(devices, tiling))

    def say(self, message: Any) -> None:
        if isinstance(message, m.RegisterFunction):
            self.uploads.extend(
                (host, message.feed) for host in {self.locations[d].host for d in message.assignment[0]}
            )
        super().say(message)

    def hear(self, message: Any) -> None:
        match message:
            case m.Quiesce(move=move):
                assert not self.held
                self.held = True
                self.say(m.Quiesced(move))
            case m.Migrated(hosts=hosts):
                assert self.held
                self.held = False
                assert all(self.locations[device].host == host for device, host in hosts)
            case m.SendSources(functions=functions):
                for function, hosts in functions:
                    feed = self.fresh()
                    self.uploads.extend((host, feed) for host in hosts)
                    self.say(m.CompileAgain(function, feed))
            case m.SliceAdded(status=status, slice=number):
                if status.ok:
                    self.slices.append(number)
            case m.FunctionReady(status=status):
                assert status.ok, status
        super().hear(message)

    def act(self) -> None:
        if self.held:
            self.upload()
        elif self.rng.random() < 0.08:
            self.say(m.AddSlice(self.fresh(), SliceRequest(self.rng.randint(1, 2))))
        elif self.rng.random() < 0.02 and self.slices:
            self.say(m.ReleaseSlice(self.slices.pop(self.rng.randrange(len(self.slices)))))
        else:
            super().act()


class MovingWorld(World):
    """Also has an operator, who moves slices."""

    kind_of_client = MovingClient

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked = 0

    def move(self) -> None:
        client = self.rng.choice(list(self.clients.values()))
        assert isinstance(client, MovingClient)
        if client.slices:
            island = self.rng.choice(list(self.controller.resources.islands))
            ask = m.RemapRequest(client.number, self.rng.choice(client.slices), island)
            self.controller.from_operator(self.asked, ask)
            self.asked += 1
            self.deliver()

    def settle(self) -> None:
        super().settle()
        while self.controller._moves.under_way:
            self.now += 1
            self.controller.tick(self.now)
            self.deliver()
            super().settle()


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.integers(20, 200),
    st.sampled_from(["2x1x2", "1x2x2", "2x2x1", "3x1x1", "1x1x3"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 100]),
)
def test_clients_whose_slices_are_moved_notice_nothing(seed, steps, topology, doom, memory):
    world = MovingWorld(random.Random(seed), topology, doom, device_memory=memory)
    rng = world.rng
    for _ in range(rng.randint(1, 3)):
        world.open()
    for _ in range(steps):
        if rng.random() < 0.1:
            world.move()
        elif rng.random() < 0.7:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif rng.random() < 0.01 and len(world.clients) > 1:
            world.close(rng.choice(list(world.clients.values())))
        else:
            world.work()
    world.settle()

    assert len(world.told) == world.asked, "each operator is answered once"
    for client in world.clients.values():
        assert not client.held
        for handle in sorted(client.unreleased):
            client.wait(handle)
        world.deliver()
        session = world.controller.sessions[client.number]
        assert client.retired == client.launched, "each launch ends once"
        assert set(client.outcomes) == set(client.waits), "each wait ends"
        for wait, handle in client.waits.items():
            status, taint, maybe = client.outcomes[wait], client.taint[handle], client.maybe[handle]
            is_lost = world.has_lost and status.code in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED)
            if not is_lost and status.message not in world.exhausted:
                assert not (status.ok and taint), f"{handle} is there although it depends on {taint}"
                # An array that could not be made is nowhere, and does not keep its devices from coming together.
                refused = bool(taint) and "share a physical one" in status.message
                assert status.ok or refused or status.message in taint | maybe, f"{status} is none of {taint | maybe}"
        for handle, spec in client.arrays.items():
            if session.directory.entries[handle].error is not None:
                continue
            hosts = {client.locations[device].host for device in spec.sharding.devices}
            holding = {host.number for host in world.hosts.values() if handle in host.stores[client.number]}
            assert holding == hosts, "an array is where its virtual devices are, and nowhere else"
        assert all(number > 0 for number in session.programs), "the controller's own programs are gone"
        for handle in sorted(client.unreleased):
            client.release(handle)
        world.deliver()
        assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
        for host in world.hosts.values():
            assert host.stores[client.number] == {}, "all memory goes"
    assert not any(world.controller.memory.used.values())

    for client in list(world.clients.values()):
        world.close(client)
    for host in world.hosts.values():
        assert (host.plans, host.stores, host.walks) == ({}, {}, {})
        assert not any(host.lines.values())
    assert world.controller.functions.users == {}
    assert world.controller.slices.sessions == {}
