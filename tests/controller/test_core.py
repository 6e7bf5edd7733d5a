"""The controller's state machine: tables of events in and messages out; and a play of random clients on model hosts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster_settings import ClusterSettings, Dispatch
from atoll.controller import core, recovery
from atoll.controller.core import Controller
from atoll.controller.launcher import GANG_WINDOW
from atoll.controller.topology import Topology
from atoll.errors import OK, Code, Status, StatusError
from atoll.ir import plan as p
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Transfer,
    single,
)
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.transport import messages as m

BROKEN = Status(Code.INTERNAL, "division by zero")


def joined(topology: str, **settings: Any) -> Controller:
    """A controller whose workers have all joined, without what it told them."""
    parsed = Topology.parse(topology)
    controller = Controller(parsed, ClusterSettings(topology, **settings))
    for host in range(parsed.host_count):
        controller.worker_joined(ready(parsed, host, f"unix:/data-{host}"), 1000 + host)
    controller.take_outbox()
    return controller


def ready(topology: Topology, host: int, address: str) -> m.WorkerReady:
    devices = tuple(
        m.DeviceInfo(i, "null", "cpu", ("device",), "device", (i, 0, 0), 0, i, 0) for i in range(topology.devices)
    )
    return m.WorkerReady(topology.island_of(host), host, devices, "cpu", "1", address)


class Play:
    """One session on a cluster, for tables: `tell` gives what one event makes the controller say."""

    def __init__(self, topology: str = "1x1x2", **settings: Any) -> None:
        self.controller = joined(topology, **settings)
        self.session = self.controller.open_session(42, "script.py").number
        self.controller.take_outbox()

    def say(self, message: Any) -> list[Any]:
        """The session's proxy sends; the answer without destinations."""
        self.controller.from_proxy(self.session, message)
        return self.outbox()

    def hear(self, host: int, message: Any) -> list[Any]:
        """A worker sends."""
        self.controller.from_worker(host, message)
        return self.outbox()

    def outbox(self) -> list[Any]:
        return [message for _, message in self.controller.take_outbox()]

    def sent(self) -> list[tuple[tuple[str, int], Any]]:
        return self.controller.take_outbox()

    def done(self, *sequences: int, host: int = 0) -> list[Any]:
        return self.hear(host, m.Done(tuple((sequence, 0, 1) for sequence in sequences)))

    def join_again(self, *hosts: int) -> list[Any]:
        """Workers that were started anew join."""
        for host in hosts:
            again = ready(self.controller.resources.topology, host, f"unix:/data-{host}-again")
            self.controller.worker_joined(again, 2000 + host)
        return self.outbox()

    # ---- programs, under fixed numbers

    def with_function(self, function: int = 1, devices: tuple[int, ...] = (0,)) -> str:
        """A compiled function; its name."""
        self.say(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
        hosts = sorted({self.controller.sessions[self.session].devices.seats[d].host for d in devices})
        for host in hosts:
            for message in self.hear(host, m.Arrived(self.session, (900 + function,))):
                self.hear(host, m.Compiled(message.function, OK, b"info", 0.1, False))
        return self.controller.sessions[self.session].functions[function]

    def with_call(self, program: int = 1, *, name: str = "f", arguments: int = 1, **options: Any) -> int:
        """A program that calls function 1 on device 0; its plan's number."""
        if 1 not in self.controller.sessions[self.session].functions:
            self.with_function()
        call = Call(1, tuple(range(arguments)), (on(0),), (0,), **options)
        (keep,) = self.say(m.RegisterProgram(program, single(name, (on(0),) * arguments, call)))
        return int(keep.plan)

    def with_put(self, program: int = 2, device: int = 0) -> None:
        buffer = HostBuffer(0, (2,), None, None)
        body = single("put", (), HostToDevice((buffer,), (on(device),)), feeds=1)
        self.say(m.RegisterProgram(program, body))

    def array(self, handle: int, device: int = 0) -> None:
        """An array that is there, by way of program 2."""
        if 2 not in self.controller.sessions[self.session].programs:
            self.with_put()
        feed = 10_000 + handle
        self.hear(0, m.Arrived(self.session, (feed,)))
        (run,) = self.say(m.Launch(2, (), (handle,), (feed,)))
        self.done(run.sequence)


def on(*devices: int) -> ArraySpec:
    return ArraySpec("float32", (2,), Sharding(devices))


def runs(messages: list[Any]) -> list[m.Run]:
    return [message for message in messages if isinstance(message, m.Run)]


# ---- sessions


def test_a_session_opens_a_store_on_every_host_and_learns_of_all_devices():
    controller = joined("2x1x2")
    session = controller.open_session(42, "script.py")
    *stores, (to, welcome) = controller.take_outbox()
    assert stores == [(("host", host), m.OpenStore(session.number, session.secret)) for host in (0, 1)]
    assert to == ("session", session.number)
    assert [(device.id, device.island, device.host) for device in welcome.devices] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 1, 1),
        (3, 1, 1),
    ]
    assert welcome.hosts == ((0, "unix:/data-0"), (1, "unix:/data-1"))
    assert welcome.secret == session.secret
    assert len(session.secret) >= 32


def test_sessions_have_secrets_of_their_own():
    controller = joined("1x1x1")
    assert len({controller.open_session(1, "").secret for _ in range(3)}) == 3


def test_messages_of_a_session_that_is_over_are_ignored():
    play = Play()
    play.controller.close_session(play.session)
    assert play.outbox() == [m.CloseStore(play.session)]
    assert play.say(m.Launch(1, (), (5,), ())) == []
    play.controller.close_session(play.session)
    assert play.outbox() == []


# ---- functions


def test_a_function_is_compiled_once_its_program_has_arrived():
    play = Play("2x1x2")
    assert play.say(m.RegisterFunction(7, "hash", 90, ((3, 2),))) == []
    (compile_,) = play.hear(1, m.Arrived(play.session, (90,)))
    # In the words of the island: its hosts from 0, devices by their ordinals.
    assert compile_ == m.Compile(compile_.function, play.session, 90, (((0, 1), (0, 0)),))
    assert play.hear(1, m.Compiled(compile_.function, OK, b"info", 0.5, False)) == [m.FunctionReady(7, OK, b"info")]


def test_a_program_that_arrives_before_the_wish_is_compiled_at_once():
    play = Play()
    assert play.hear(0, m.Arrived(play.session, (90,))) == []
    (compile_,) = play.say(m.RegisterFunction(7, "hash", 90, ((0,),)))
    assert isinstance(compile_, m.Compile)


def test_a_function_over_two_islands_is_refused_with_what_to_do_instead():
    play = Play("2x1x1")
    (ready,) = play.say(m.RegisterFunction(7, "hash", 90, ((0, 1),)))
    assert ready.status.code == Code.INVALID_ARGUMENT
    assert "2 islands" in ready.status.message
    assert "jax.device_put" in ready.status.message


def test_a_function_on_a_device_that_does_not_exist_is_refused():
    (ready,) = Play().say(m.RegisterFunction(7, "hash", 90, ((0, 9),)))
    assert ready.status.message == "device 9 does not exist"


def test_a_function_that_does_not_compile_is_forgotten_and_its_error_told():
    play = Play()
    play.say(m.RegisterFunction(7, "hash", 90, ((0,),)))
    (compile_,) = play.hear(0, m.Arrived(play.session, (90,)))
    messages = play.hear(0, m.Compiled(compile_.function, BROKEN, b"", 0.5, False))
    assert messages == [m.DropFunction(compile_.function), m.FunctionReady(7, BROKEN, b"")]
    assert play.controller.functions.users == {}


def test_a_function_lives_as_long_as_a_program_that_calls_it():
    play = Play()
    name = play.with_function()
    play.with_call()
    assert play.say(m.ReleaseFunction(1)) == []
    *_, dropped = play.say(m.ReleaseProgram(1))
    assert dropped == m.DropFunction(name)


# ---- launches


def test_a_launch_is_one_message_a_host_and_its_end_makes_room():
    play = Play()
    plan = play.with_call()
    play.array(10)
    (run,) = play.say(m.Launch(1, (10,), (11,), ()))
    assert run == m.Run(run.sequence, play.session, plan, (10,), (11,), ())
    assert play.say(m.Await(5, (11,))) == []
    assert play.done(run.sequence) == [m.Awaited(5, OK), m.Retired(1)]
    assert play.say(m.Await(6, (11,))) == [m.Awaited(6, OK)]


def test_a_result_may_be_used_before_it_is_there():
    play = Play()
    play.with_call()
    play.array(10)
    (first,) = play.say(m.Launch(1, (10,), (11,), ()))
    (second,) = play.say(m.Launch(1, (11,), (12,), ()))
    assert second.arguments == first.results


def test_a_launch_waits_for_its_feeds_and_holds_back_its_session():
    play = Play()
    play.with_call()
    play.array(9)
    assert play.say(m.Launch(2, (), (10,), (77,))) == []
    assert play.say(m.Launch(1, (9,), (11,), ())) == []
    assert [run.results for run in runs(play.hear(0, m.Arrived(play.session, (77,))))] == [(10,), (11,)]


def test_a_gang_over_two_hosts_is_done_when_both_are():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    first, second = play.say(m.Launch(1, (), (11,), ()))
    assert first.sequence == second.sequence
    assert play.done(first.sequence, host=1) == []
    assert play.done(first.sequence, host=0) == [m.Retired(1)]


def test_both_ends_of_a_transfer_are_sent_at_once():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    program = single("copy", (on(0),), Transfer((0,), (on(1),)))
    send, receive = play.say(m.RegisterProgram(3, program))
    first, second = play.say(m.Launch(3, (10,), (11,), ()))
    assert (first.plan, first.arguments, first.results) == (send.plan, (10,), ())
    assert (second.plan, second.arguments, second.results) == (receive.plan, (), (11,))
    (feed,) = first.feeds
    assert second.feeds == (feed,)
    assert feed >= m.OWN_NUMBERS, "proxies' own numbers are all below"
    assert second.sequence > first.sequence
    assert play.done(first.sequence) == []
    assert play.done(second.sequence, host=1) == [m.Retired(1)]


def chain_of(length: int) -> Program:
    """Calls of function 1 on device 0, each on what the one before made."""
    nodes = tuple(Call(1, (i,), (on(0),), (0,)) for i in range(length))
    return Program("chain", (on(0),), nodes, (length,))


def test_a_program_of_many_nodes_is_one_message_a_host_and_then_whose_turn_it_is():
    play = Play("2x1x1")
    play.with_function()
    play.array(10)
    far = on(1)
    nodes = (
        Call(1, (0,), (on(0),), (0,)),
        Call(1, (1,), (on(0),), (0,)),
        Transfer((2,), (far,)),
        Transfer((3,), (on(0),)),
    )
    play.say(m.RegisterProgram(1, Program("f", (on(0),), nodes, (2, 3, 4))))
    messages = play.controller.from_proxy(play.session, m.Launch(1, (10,), (11, 12, 13), ())) or play.sent()
    by_host = {host: [message for (_, to), message in messages if to == host] for host in (0, 1)}
    run, go = by_host[0]
    assert (run.arguments, run.results) == ((10,), (11, 13))
    assert go == m.Go(play.session, run.sequence, tuple((run.sequence + i, 1) for i in (1, 2, 4)))
    there, back = by_host[1]
    assert there.sequence == run.sequence + 3
    assert back == m.Go(play.session, there.sequence, ((run.sequence + 5, 1),))
    assert play.done(*(run.sequence + i for i in (0, 1, 2, 4))) == []
    assert play.done(there.sequence, run.sequence + 5, host=1) == [m.Retired(1)]


@pytest.mark.parametrize("program", [5, 99])
def test_a_launch_gives_back_the_room_that_it_took(program):
    play = Play()
    play.with_call(program=5)
    play.array(10)
    said = play.say(m.Launch(program, (10,), (11,), (), room=4))
    told = said if program == 99 else play.done(runs(said)[0].sequence)
    assert m.Retired(4) in told


def test_a_program_whose_plan_is_too_large_for_a_message_is_refused_and_costs_no_worker(monkeypatch):
    monkeypatch.setattr("atoll.controller.programs.MAX_PLAN_BYTES", 1000)
    play = Play()
    play.with_call(program=4)
    play.array(10)
    assert play.say(m.RegisterProgram(5, chain_of(100))) == []
    play.say(m.Launch(5, (10,), (11, 13), ()))
    (answer,) = play.say(m.Await(1, (11,)))
    assert (answer.status.code, "too large" in answer.status.message) == (Code.INVALID_ARGUMENT, True)


def test_another_sessions_work_gets_in_between_the_nodes_of_a_long_program():
    play = Play()
    play.with_function()
    play.array(10)
    play.say(m.RegisterProgram(1, chain_of(100)))
    (run, go) = play.say(m.Launch(1, (10,), (11,), ()))
    assert len(go.turns) == GANG_WINDOW - 1
    other = play.controller.open_session(7, "other.py").number
    play.outbox()
    buffer = HostBuffer(0, (2,), None, None)
    play.controller.from_proxy(
        other, m.RegisterProgram(1, single("put", (), HostToDevice((buffer,), (on(0),)), feeds=1))
    )
    play.controller.from_worker(0, m.Arrived(other, (5,)))
    play.controller.from_proxy(other, m.Launch(1, (), (1,), (5,)))
    play.outbox()
    messages = play.done(run.sequence, *(sequence for sequence, _ in go.turns[: GANG_WINDOW // 2]))
    assert [type(message) for message in messages] == [m.Go, m.Run, m.Go]
    assert len(messages[0].turns) == 1, "one was ready before the newcomer came"
    assert messages[1].session == other


def test_a_node_that_fails_ends_its_program_and_those_after_it_are_not_walked():
    play = Play()
    play.with_function()
    play.array(10)
    play.say(m.RegisterProgram(1, chain_of(100)))
    (run, go) = play.say(m.Launch(1, (10,), (11,), ()))
    assert play.hear(0, m.Failed(run.sequence, BROKEN)) == [m.DropRun(play.session, run.sequence)]
    *_, retired = play.done(*(sequence for sequence, _ in go.turns))
    assert retired == m.Retired(1)
    assert play.say(m.Await(5, (11,))) == [m.Awaited(5, BROKEN)]
    assert play.controller.scheduler.statistics(0).waiting == 0


def test_values_between_nodes_take_memory_until_their_last_use():
    play = Play(device_memory=100)
    play.with_function()
    play.array(10)
    play.say(m.RegisterProgram(1, chain_of(100)))  # of 8 bytes each
    (run, *more) = play.say(m.Launch(1, (10,), (11,), ()))
    sequences = [run.sequence]
    while sequences or more:
        sequences += [sequence for message in more if isinstance(message, m.Go) for sequence, _ in message.turns]
        more = play.done(sequences.pop(0)) if sequences else []
    assert play.say(m.Await(5, (11,))) == [m.Awaited(5, OK)]
    assert play.controller.memory.used == {(0, 0): 16, (0, 1): 0}, "what is there is the argument and the result"
    assert play.controller.memory.peak[0, 0] <= 100


def test_dispatched_in_sequence_a_node_waits_for_the_one_before_to_be_enqueued():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_function()
    play.array(10)
    play.controller.take_outbox()
    play.say(m.RegisterProgram(1, chain_of(3)))
    (run,) = play.say(m.Launch(1, (10,), (11,), ()))
    (second,) = play.hear(0, m.Enqueued(run.sequence))
    assert second == m.Go(play.session, run.sequence, ((run.sequence + 1, 1),))
    # An end says as much.
    assert play.done(run.sequence) == []
    (third,) = play.done(run.sequence + 1)
    assert third.turns == ((run.sequence + 2, 1),)


def test_a_long_computation_is_followed_by_one_and_short_ones_by_many():
    play = Play()
    play.with_call()
    play.array(10)
    for i in range(20):
        play.controller.from_proxy(play.session, m.Launch(1, (10,), (100 + i,), ()))
    first = runs(play.outbox())
    assert len(first) > 10
    now = 0
    in_flight = list(first)
    while in_flight:  # each takes 50 ms, and so the controller learns
        run = in_flight.pop(0)
        in_flight += runs(play.hear(0, m.Done(((run.sequence, now, now + 50_000_000),))))
        now += 50_000_000
    for i in range(20):
        play.controller.from_proxy(play.session, m.Launch(1, (10,), (200 + i,), ()))
    assert len(runs(play.outbox())) == 3


def test_dispatched_in_sequence_a_launch_waits_for_the_one_before_to_be_enqueued():
    play = Play(dispatch=Dispatch.SEQUENTIAL)
    play.with_call()
    play.array(10)
    play.controller.take_outbox()
    (first,) = play.say(m.Launch(1, (10,), (11,), ()))
    assert first.acknowledge
    assert play.say(m.Launch(1, (11,), (12,), ())) == []
    (second,) = play.hear(0, m.Enqueued(first.sequence))
    assert second.arguments == (11,)
    assert play.say(m.Launch(1, (12,), (13,), ())) == []
    # A failure is an end, too.
    (third, *_) = runs(play.hear(0, m.Failed(second.sequence, BROKEN))) or [None]
    assert third is None, "what it would have used is an error now"
    (fourth,) = play.say(m.Launch(1, (10,), (14,), ()))
    assert fourth.results == (14,)


@pytest.mark.parametrize(
    ("launch", "code", "text"),
    [
        (m.Launch(99, (), (11,), ()), Code.NOT_FOUND, "program 99"),
        (m.Launch(1, (), (11,), ()), Code.INVALID_ARGUMENT, "f takes 1 arguments"),
        (m.Launch(1, (10,), (11,), (5,)), Code.INVALID_ARGUMENT, "0 feeds"),
        (m.Launch(1, (10,), (11, 12), ()), Code.INVALID_ARGUMENT, "gives 1 results"),
        (m.Launch(1, (77,), (11,), ()), Code.NOT_FOUND, "array 77"),
        (m.Launch(4, (), (11,), ()), Code.INVALID_ARGUMENT, "device 9"),
    ],
)
def test_a_launch_that_cannot_be_makes_its_results_errors_and_room_for_the_next(launch, code, text):
    play = Play()
    play.with_call()
    play.array(10)
    play.say(m.RegisterProgram(4, single("far", (), Call(1, (), (on(9),), (9,)))))
    assert play.say(launch) == [m.Retired(1)]
    (awaited,) = play.say(m.Await(5, launch.results))
    assert awaited.status.code == code
    assert text in awaited.status.message


def test_a_result_that_exists_already_ends_the_session():
    play = Play()
    play.with_call()
    play.array(10)
    with pytest.raises(StatusError, match="exists already"):
        play.say(m.Launch(1, (10,), (10,), ()))


@pytest.mark.parametrize(
    "message",
    [
        m.Launch(1, (10,), (10,), ()),
        m.Launch(1, (99,), (10,), ()),
        m.Launch(99, (), (10,), ()),
        m.Launch(99, (), (11, 11), ()),
        m.MakeError((10,), BROKEN),
        m.MakeError((11, 11), BROKEN),
    ],
)
def test_new_arrays_take_nobodys_handle_whatever_else_is_wrong(message):
    play = Play()
    play.with_call()
    play.array(10)
    with pytest.raises(StatusError, match=r"exists already|same handle"):
        play.say(message)
    play.controller.close_session(play.session)
    assert not any(play.controller.memory.used.values())


def test_a_donated_array_cannot_be_used_again():
    play = Play()
    play.with_call(donated=(0,))
    play.array(10)
    play.say(m.Launch(1, (10,), (11,), ()))
    play.say(m.Launch(1, (10,), (12,), ()))
    (awaited,) = play.say(m.Await(5, (12,)))
    assert "array 10 has been deleted or donated" in awaited.status.message


def test_errors_that_the_client_made_are_errors_to_whatever_uses_them():
    play = Play()
    play.with_call()
    assert play.say(m.MakeError((10,), BROKEN)) == []
    play.say(m.Launch(1, (10,), (11,), ()))
    assert play.say(m.Await(5, (11,))) == [m.Awaited(5, BROKEN)]


# ---- memory


def test_memory_goes_after_the_last_launch_that_uses_it():
    play = Play()
    play.with_call()
    play.array(10)
    play.controller.from_proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.controller.from_proxy(play.session, m.Release((10, 11)))
    run, free = play.outbox()
    assert isinstance(run, m.Run)
    assert free == m.Free(play.session, (10, 11))


def test_memory_that_a_waiting_gang_needs_stays_until_it_starts():
    play = Play()
    play.with_call()
    play.array(10)
    play.say(m.Launch(2, (), (20,), (77,)))
    play.say(m.Launch(1, (10,), (11,), ()))
    assert play.say(m.Release((10,))) == []
    *_, free = play.hear(0, m.Arrived(play.session, (77,)))
    assert free == m.Free(play.session, (10,))


def test_a_deleted_array_goes_at_once_and_cannot_be_used():
    play = Play()
    play.with_call()
    play.array(10)
    assert play.say(m.Release((10,), delete=True)) == [m.Free(play.session, (10,), True)]
    play.say(m.Launch(1, (10,), (11,), ()))
    (awaited,) = play.say(m.Await(5, (11,)))
    assert "deleted" in awaited.status.message


def test_a_deleted_array_that_a_waiting_gang_needs_goes_when_that_has_started():
    play = Play()
    play.with_call()
    play.array(10)
    play.say(m.Launch(2, (), (20,), (77,)))
    play.say(m.Launch(1, (10,), (11,), ()))
    assert play.say(m.Release((10,), delete=True)) == []
    *_, free = play.hear(0, m.Arrived(play.session, (77,)))
    assert free == m.Free(play.session, (10,), True)


def test_a_released_programs_plan_stays_for_the_launches_before():
    play = Play()
    plan = play.with_call()
    play.array(10)
    play.say(m.Launch(2, (), (20,), (77,)))
    play.say(m.Launch(1, (10,), (11,), ()))
    assert play.say(m.ReleaseProgram(1)) == []
    *_, run, drop = play.hear(0, m.Arrived(play.session, (77,)))
    assert isinstance(run, m.Run)
    assert drop == m.DropPlan(plan)


# ---- memory of limited devices: arrays of `on` take 8 bytes


def test_what_does_not_fit_waits_until_others_let_go():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.say(m.Launch(1, (10,), (11,), ()))
    assert play.say(m.Launch(1, (10,), (12,), ())) == []
    play.done(first.sequence)
    free, second = play.say(m.Release((11,)))
    assert (free.handles, second.results) == ((11,), (12,))


def test_a_result_that_is_released_early_counts_until_its_gang_has_ended():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.say(m.Launch(1, (10,), (11,), ()))
    play.say(m.Release((11,)))
    assert play.say(m.Launch(1, (10,), (12,), ())) == []
    (second,) = runs(play.done(first.sequence))
    assert second.results == (12,)


def test_what_waits_for_memory_in_vain_is_told_who_holds_it():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.say(m.Launch(1, (10,), (11,), (), context=77))
    play.say(m.Launch(1, (10,), (12,), (), context=78))
    play.say(m.Await(5, (12,)))
    play.controller.tick(100.0)
    play.controller.tick(110.0)
    assert play.outbox() == [], "as long as something runs there, it may let go"
    play.done(first.sequence)
    play.controller.tick(111.0)
    (awaited, _) = play.outbox()
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    for part in ("device 0 of host 0", "f needs 8 B", "4 B of 20 B are free", "session 1 (script.py): 16 B"):
        assert part in awaited.status.message
    report = msgspec.msgpack.decode(awaited.status.payloads[m.MEMORY_REPORT], type=m.MemoryReport)
    assert {(h.context, h.maker, h.ready, h.ready_bytes) for h in report.holders} == {(0, "put", 1, 8), (77, "f", 1, 8)}
    # And whoever stood behind goes on.
    play.say(m.Release((11,)))
    assert len(runs(play.say(m.Launch(1, (10,), (13,), ())))) == 1


def test_what_can_never_fit_is_refused_though_others_work():
    play = Play(device_memory=7)
    play.with_put()
    play.hear(0, m.Arrived(play.session, (77,)))
    assert play.say(m.Launch(2, (), (11,), (77,))) == []
    play.say(m.Await(5, (11,)))
    play.controller.tick(100.0)
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED


def test_an_output_in_the_place_of_a_donated_input_needs_no_room():
    play = Play(device_memory=10)
    play.with_call(donated=(0,))
    play.array(10)
    assert len(runs(play.say(m.Launch(1, (10,), (11,), ())))) == 1
    assert len(runs(play.say(m.Launch(1, (11,), (12,), ())))) == 1
    assert play.controller.memory.used[0, 0] == 8


def test_views_of_an_array_share_its_memory_until_the_last_is_gone():
    play = Play(device_memory=10)
    play.array(10)
    view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.say(m.RegisterProgram(3, single("view", (on(0),), view)))
    (run,) = play.say(m.Launch(3, (10,), (11,), ()))
    play.done(run.sequence)
    play.say(m.Release((10,)))
    assert play.controller.memory.used[0, 0] == 8
    play.say(m.Release((11,)))
    assert play.controller.memory.used[0, 0] == 0


# ---- failures


def test_a_failure_reaches_its_results_and_what_is_made_of_them_and_nothing_else():
    play = Play()
    play.with_call()
    play.array(10)
    (bad,) = play.say(m.Launch(1, (10,), (11,), ()))
    (good,) = play.say(m.Launch(1, (10,), (12,), ()))
    messages = play.hear(0, m.Failed(bad.sequence, BROKEN))
    assert messages == [m.Retired(1)]
    play.done(good.sequence)
    assert play.say(m.Launch(1, (11,), (13,), ())) == [m.Retired(1)]
    statuses = [play.say(m.Await(handle, (handle,))) for handle in (11, 12, 13)]
    assert statuses == [[m.Awaited(11, BROKEN)], [m.Awaited(12, OK)], [m.Awaited(13, BROKEN)]]


def test_what_could_not_be_sent_to_a_host_that_is_lost_fails_by_that_loss():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.say(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    send, _ = play.say(m.Launch(3, (10,), (11,), ()))
    unreachable = Status(Code.UNAVAILABLE, "host 1 cannot be reached")
    assert play.hear(0, m.Failed(send.sequence, unreachable)) == [], "the end of that host may be about to be known"
    play.say(m.Await(5, (11,)))
    play.controller.worker_lost(1, "killed")
    play.controller.tick(10.0)
    play.controller.tick(20.0)
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS
    assert play.controller.scheduler.statistics(0).in_flight == 0


def test_what_could_not_be_sent_to_a_host_that_is_there_fails_by_itself():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.say(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    send, receive = play.say(m.Launch(3, (10,), (11,), ()))
    unreachable = Status(Code.UNAVAILABLE, "host 1 cannot be reached")
    assert play.hear(0, m.Failed(send.sequence, unreachable)) == []
    play.controller.tick(10.0)
    play.controller.tick(11.0)
    assert [type(each) for each in play.outbox()] == [m.FailFeeds]
    assert play.hear(1, m.Failed(receive.sequence, unreachable)) == [m.Retired(1)]


def test_the_other_end_of_a_failed_transfer_is_told_what_befell_it():
    play = Play("2x1x1")
    play.with_put()
    play.say(m.RegisterProgram(3, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    play.array(10)
    send, receive = play.say(m.Launch(3, (10,), (11,), ()))
    assert play.hear(0, m.Failed(send.sequence, BROKEN)) == [m.FailFeeds(play.session, receive.feeds, BROKEN)]
    assert play.say(m.Await(7, (11,))) == [m.Awaited(7, BROKEN)], "nobody waits for the other end to learn of it"
    assert play.hear(1, m.Failed(receive.sequence, BROKEN)) == [m.Retired(1)]


def test_what_a_lost_host_has_sent_is_awaited_by_nobody():
    play = Play("2x1x1")
    play.array(10)
    body = single("transfer", (on(0),), Transfer((0,), (on(1),), reshard=True))
    play.say(m.RegisterProgram(7, body))
    send, receive = runs(play.say(m.Launch(7, (10,), (11,), ())))
    play.done(send.sequence)
    play.controller.worker_lost(0, "killed")
    told = [message for message in play.outbox() if isinstance(message, m.FailFeeds)]
    assert [message.feeds for message in told] == [receive.feeds]
    play.hear(1, m.Failed(receive.sequence, told[0].status))
    assert play.controller.scheduler.statistics(1).in_flight == 0


def test_a_lost_host_fails_what_was_there_what_ran_there_and_what_stood_in_line():
    play = Play("2x1x1")
    play.with_put()
    play.with_call()
    play.array(10)
    launches = 2 * GANG_WINDOW
    for i in range(launches):
        play.say(m.Launch(1, (10,), (100 + i,), ()))
    play.say(m.Launch(2, (), (11,), (77,)))
    for handle in (100, 100 + launches - 1, 11):
        assert play.say(m.Await(handle, (handle,))) == []
    play.say(m.Inquire(5, "layout", 0, -1, b""))
    play.say(m.Inquire(6, "layout", 1, -1, b""))

    play.controller.worker_lost(0, "killed")
    messages = play.outbox()

    assert runs(messages) == [], "nothing more is sent to it"
    told = {x.wait: x.status for x in messages if isinstance(x, m.Awaited)}
    assert set(told) == {100, 100 + launches - 1, 11}
    for status in told.values():
        assert status.code == Code.DATA_LOSS
        assert "host 0 of island 0 is gone (worker 1000: killed)" in status.message
    assert "(in f)" in told[100].message
    assert "(in put)" in told[11].message
    assert sum(x.launches for x in messages if isinstance(x, m.Retired)) == launches + 1
    assert not any(isinstance(x, m.Answered) for x in messages), "questions wait until somebody can answer"
    assert m.HostsLost((0,)) in messages
    statistics = play.controller.scheduler.statistics(0)
    assert (statistics.waiting, statistics.in_flight) == (0, 0)
    # What needs the lost array fails at once.
    assert play.say(m.Launch(1, (10,), (12,), ())) == [m.Retired(1)]
    assert play.say(m.Inquire(7, "layout", 0, -1, b"")) == []
    (answered,) = play.hear(1, m.Answer(play.session, 2, OK, b"{0}"))
    assert answered == m.Answered(6, OK, b"{0}")
    # And to be told twice changes nothing.
    play.controller.worker_lost(0, "again")
    assert play.outbox() == []
    asked = [x for x in play.join_again(0) if isinstance(x, m.Query)]
    assert [play.hear(0, m.Answer(x.session, x.query, OK, b"{1}")) for x in asked] == [
        [m.Answered(5, OK, b"{1}")],
        [m.Answered(7, OK, b"{1}")],
    ]


def test_the_loss_of_one_island_leaves_the_others_to_work():
    play = Play("2x1x1")
    play.with_function(1, (1,))
    play.say(m.RegisterProgram(5, single("g", (), Call(1, (), (on(1),), (1,)))))
    play.controller.worker_lost(0, "killed")
    play.outbox()
    (run,) = play.say(m.Launch(5, (), (13,), ()))
    assert play.done(run.sequence, host=1) == [m.Retired(1)]
    assert play.say(m.Await(7, (13,))) == [m.Awaited(7, OK)]


def test_the_loss_of_one_host_is_that_of_its_island():
    play = Play("2x2x1")
    play.controller.worker_lost(1, "killed")
    assert m.HostsLost((0, 1)) in play.outbox()
    assert [play.controller.resources.is_lost(host) for host in range(4)] == [True, True, False, False]


def test_a_restarted_island_gets_back_what_it_had_and_runs_what_waited():
    play = Play()
    name = play.with_function()
    plan = play.with_call(arguments=0)
    play.controller.worker_lost(0, "killed")
    play.outbox()
    assert play.say(m.Launch(1, (), (11,), ())) == [], "it waits for the island"
    play.say(m.LossSeen((0,)))

    back = play.join_again(0)
    secret = play.controller.sessions[play.session].secret
    assert back[0] == m.OpenStore(play.session, secret)
    assert [x.plan for x in back if isinstance(x, m.KeepPlan)] == [plan]
    assert m.HostsBack(((0, "unix:/data-0-again"),)) in back
    assert runs(back) == [], "the function is not there yet"

    assert play.say(m.CompileAgain(1, 95)) == []
    (compile_,) = play.hear(0, m.Arrived(play.session, (95,)))
    assert compile_.function == name
    ready, run = play.hear(0, m.Compiled(name, OK, b"info", 0.1, True))
    assert ready == m.FunctionReady(1, OK, b"info")
    assert (run.plan, run.results) == (plan, (11,))


def test_a_restarted_island_gets_back_the_plans_of_released_programs_that_launches_wait_for():
    play = Play("2x1x1")
    play.array(10)
    play.controller.worker_lost(1, "killed")
    body = single("transfer", (on(0),), Transfer((0,), (on(1),), reshard=True))
    kept = play.say(m.RegisterProgram(7, body))
    plan = next(message.plan for message in kept if isinstance(message, m.KeepPlan))
    assert runs(play.say(m.Launch(7, (10,), (11,), ()))) == [], "it waits for the island"
    play.say(m.ReleaseProgram(7))

    back = play.join_again(1)
    plans = [message.plan for message in back if isinstance(message, m.KeepPlan)]
    assert {run.plan for run in runs(back)} == {plan, *plans}
    assert back.index(runs(back)[-1]) > max(i for i, x in enumerate(back) if isinstance(x, m.KeepPlan))
    for run, host in zip(runs(back), (0, 1), strict=True):
        play.done(run.sequence, host=host)
    assert play.controller._plans.keys() == {
        plan.number for plan in play.controller.sessions[play.session].programs[2].plans.values()
    }


def test_bytes_sent_before_the_proxy_knew_of_a_loss_are_lost():
    play = Play()
    play.with_put()
    play.controller.worker_lost(0, "killed")
    play.outbox()
    assert play.say(m.Launch(2, (), (11,), (77,))) == [m.Retired(1)]
    (awaited,) = play.say(m.Await(5, (11,)))
    assert awaited.status.code == Code.DATA_LOSS
    play.say(m.LossSeen((0,)))
    assert play.say(m.Launch(2, (), (12,), (78,))) == []
    play.join_again(0)
    (run,) = play.hear(0, m.Arrived(play.session, (78,)))
    assert run.results == (12,)


def test_a_compilation_goes_on_when_its_island_is_back():
    play = Play()
    play.say(m.RegisterFunction(7, "hash", 90, ((0,),)))
    (compile_,) = play.hear(0, m.Arrived(play.session, (90,)))
    play.controller.worker_lost(0, "killed")
    assert not any(isinstance(x, m.FunctionReady) for x in play.outbox())
    play.say(m.LossSeen((0,)))
    play.join_again(0)
    play.say(m.CompileAgain(7, 91))
    play.hear(0, m.Arrived(play.session, (91,)))
    ready = play.hear(0, m.Compiled(compile_.function, OK, b"info", 0.1, False))
    assert m.FunctionReady(7, OK, b"info") in ready


def test_an_island_that_does_not_come_back_fails_all_that_waits_for_it():
    play = Play()
    play.with_call(arguments=0)
    play.say(m.RegisterFunction(7, "hash", 90, ((0,),)))
    play.controller.worker_lost(0, "killed")
    play.say(m.Launch(1, (), (11,), ()))
    play.say(m.Await(5, (11,)))
    play.controller.tick(1000.0)
    assert play.outbox() == []
    play.controller.tick(1000.0 + recovery.RESTART_SECONDS + 1)
    messages = play.outbox()
    (awaited,) = [x for x in messages if isinstance(x, m.Awaited)]
    assert "island 0 is gone for good: it was not up again within 120 s" in awaited.status.message
    assert [x.function for x in messages if isinstance(x, m.FunctionReady)] == [7]
    (awaited,) = [play.say(m.Launch(1, (), (12,), ())), play.say(m.Await(6, (12,)))][1]
    assert awaited.status.code == Code.UNAVAILABLE


def test_a_silent_host_is_named_and_its_island_restarted():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.say(m.Launch(1, (), (11,), ()))
    play.say(m.Await(5, (11,)))
    leases = play.controller.leases
    for now in range(100, 120):
        leases.heard(0, now)
        if now == 100:
            leases.heard(1, now)
        play.controller.tick(float(now))
    messages = play.outbox()
    (restart,) = [x for x in messages if isinstance(x, m.RestartIsland)]
    assert "host 1 of island 0 has not answered for 10 s" in restart.reason
    (awaited,) = [x for x in messages if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DEADLINE_EXCEEDED
    assert "host 1 of island 0" in awaited.status.message


def test_a_gang_that_failed_on_one_host_and_hangs_on_another_costs_the_island():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.say(m.Launch(1, (), (11,), ()))
    play.hear(0, m.Failed(run.sequence, BROKEN))
    for now in range(100, 104):
        play.controller.tick(float(now))
    assert play.outbox() == []
    play.controller.tick(106.0)
    (restart,) = [x for x in play.outbox() if isinstance(x, m.RestartIsland)]
    assert "hosts [1] of island 0 wait for another, where f failed: division by zero" in restart.reason


def test_a_failure_over_several_hosts_that_was_the_loss_of_one_is_told_as_that():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.say(m.Launch(1, (), (11,), ()))
    play.say(m.Await(5, (11,)))
    assert play.hear(0, m.Failed(run.sequence, Status(Code.UNKNOWN, "connection reset by peer"))) == []
    play.controller.worker_lost(1, "killed")
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def test_a_read_of_what_another_hosts_loss_has_broken_is_told_as_that_loss():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    play.say(m.RegisterProgram(2, single("get", (on(0, 1),), DeviceToHost((0,), 0, None), feeds=1)))
    play.say(m.Launch(1, (), (11,), ()))
    (read, *_) = play.say(m.Launch(2, (11,), (12,), (5,)))
    play.say(m.Await(5, (12,)))
    assert play.hear(0, m.Failed(read.sequence, Status(Code.UNKNOWN, "connection reset by peer"))) == []
    play.controller.worker_lost(1, "killed")
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.DATA_LOSS


def test_a_failure_over_several_hosts_that_are_all_there_is_told_a_little_later():
    play = Play("1x2x1")
    play.with_function(1, (0, 1))
    play.say(m.RegisterProgram(1, single("f", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = play.say(m.Launch(1, (), (11,), ()))
    play.say(m.Await(5, (11,)))
    for host in (0, 1):
        assert play.hear(host, m.Failed(run.sequence, BROKEN)) == []
    play.controller.tick(100.0)
    play.controller.tick(101.0)
    assert m.Awaited(5, BROKEN) in play.outbox()


def test_a_program_that_crashes_its_worker_is_refused_and_no_other():
    play = Play()
    play.with_call(arguments=0)
    play.say(m.Launch(1, (), (11,), ()))
    play.controller.worker_ended(m.WorkerEnded(0, 1000, -6, "killed by SIGABRT"))
    play.outbox()
    play.say(m.LossSeen((0,)))
    assert play.say(m.Launch(1, (), (12,), ())) == [m.Retired(1)]
    (awaited,) = play.say(m.Await(5, (12,)))
    assert awaited.status.code == Code.ABORTED
    assert "killed by SIGABRT" in awaited.status.message
    (ready,) = play.say(m.RegisterFunction(8, "content 1", 91, ((0,),)))
    assert ready.status.code == Code.ABORTED, "not even when it is compiled anew"
    assert play.say(m.RegisterFunction(9, "another", 92, ((0,),))) == []


def test_a_program_whose_worker_was_killed_is_not_to_blame():
    play = Play()
    play.with_call(arguments=0)
    play.say(m.Launch(1, (), (11,), ()))
    play.controller.worker_ended(m.WorkerEnded(0, 1000, -9, "killed by SIGKILL"))
    assert play.controller.blame.refused == {}
    assert play.controller.blame.suspects == set()


def test_a_client_that_uploads_without_end_loses_its_own_session_and_nobody_elses(monkeypatch):
    monkeypatch.setattr(core, "MAX_EARLY_FEEDS", 3)
    play = Play()
    other = play.controller.open_session(43, "other.py").number
    play.outbox()
    play.hear(0, m.Arrived(play.session, (1, 2, 3)))
    closing, close = play.hear(0, m.Arrived(play.session, (4, 5)))
    assert closing.status.code == Code.RESOURCE_EXHAUSTED
    assert close == m.CloseStore(play.session)
    assert list(play.controller.sessions) == [other]


# ---- closing


def test_a_closed_session_leaves_no_plan_no_function_and_no_gang_in_line():
    play = Play()
    name = play.with_function()
    plan = play.with_call()
    play.array(10)
    play.say(m.Launch(2, (), (20,), (77,)))  # waits for ever
    play.say(m.Launch(1, (10,), (11,), ()))
    play.say(m.ReleaseProgram(1))
    play.say(m.ReleaseFunction(1))
    play.controller.close_session(play.session)
    messages = play.outbox()
    for message in (m.DropPlan(plan), m.DropFunction(name), m.CloseStore(play.session)):
        assert message in messages
    assert play.controller.functions.users == {}
    assert play.controller.scheduler.statistics(0).waiting == 0


def test_what_a_closed_session_has_started_does_not_wait_for_what_it_will_not_start():
    play = Play("2x1x1")
    play.with_put()
    play.array(10)
    play.say(m.RegisterProgram(3, single("copy", (on(1),), Transfer((0,), (on(0),)))))
    play.say(m.RegisterProgram(4, single("copy", (on(0),), Transfer((0,), (on(1),)))))
    (_, first) = play.say(m.Launch(4, (10,), (11,), ()))
    play.done(first.sequence - 1)
    play.done(first.sequence, host=1)
    # Island 1 is full, so that its part of the copy cannot start, and host 0's waits for it.
    island = play.controller.scheduler._islands[1]
    island.loads[1].full, island.full_hosts = True, 1
    (waiting,) = play.say(m.Launch(3, (11,), (12,), ()))
    play.controller.close_session(play.session)
    failed, *closes = play.outbox()
    assert (failed.feeds, failed.status.code) == (waiting.feeds, Code.CANCELLED)
    assert closes[:2] == [m.CloseStore(play.session)] * 2


def test_gangs_of_a_closed_session_keep_their_place_in_the_window_until_they_end():
    play = Play()
    play.with_call()
    play.array(10)
    (run,) = play.say(m.Launch(1, (10,), (11,), ()))
    play.controller.close_session(play.session)
    play.outbox()
    assert play.controller.scheduler.statistics(0).in_flight == 1
    assert play.done(run.sequence) == []
    assert play.controller.scheduler.statistics(0).in_flight == 0


# ---- a play of random clients on model hosts


class ModelWalk:
    """A run of a plan on a model host."""

    def __init__(self, run: m.Run, plan: p.Plan) -> None:
        self.run = run
        self.plan = plan
        self.left = list(plan.legs)
        self.values: set[int] = set()
        self.problem: Status | None = None
        self.reported = False


@dataclass
class ModelTurn:
    """Legs that have one turn, in their session's line, as far as they have come."""

    sequence: int
    steps: Iterator[int]
    together: bool


class ModelHost:
    """A worker as the controller may take it to be: it walks a session's legs in order, and parks what lacks bytes.

    What hosts compute together keeps its order, and ends on none of them before all have begun.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.plans: dict[int, p.Plan] = {}
        self.stores: dict[int, dict[int, Status | None]] = {}
        self.freed: Counter[tuple[int, int]] = Counter()
        self.sequences: list[tuple[int, int]] = []  # (session, sequence) as they came
        self.lines: dict[int, deque[Any]] = defaultdict(deque)  # of each session: legs, frees and ends in order
        self.together: deque[int] = deque()  # sequences of legs that have yet to begin
        self.walks: dict[int, ModelWalk] = {}  # with legs to come, by the sequence of their first
        self.inbox: dict[tuple[int, int], Status | None] = {}
        self.running: list[tuple[int, Status | None]] = []
        self.begun: set[int] = set()  # sequences of what is computed together
        self.enqueued: deque[int] = deque()  # sequences, to be told
        self.sends: list[tuple[int, int, int]] = []  # (host, session, feed) that are to arrive
        self.functions: set[str] = set()
        self.compiled: list[str] = []  # to be told

    def take(self, message: Any) -> None:
        match message:
            case m.OpenStore(session=session):
                self.stores[session] = {}
            case m.KeepPlan(plan=plan, body=body):
                self.plans[plan] = body
            case m.DropPlan(plan=plan):
                del self.plans[plan]
            case m.Compile(function=function):
                self.functions.add(function)
                self.compiled.append(function)
            case m.DropFunction(function=function):
                self.functions.discard(function)
            case m.FailFeeds(session=session, feeds=feeds, status=status):
                self.inbox.update(((session, feed), status) for feed in feeds)
                self.go_on()
            case m.Run(sequence=sequence):
                self.walks[sequence] = ModelWalk(message, self.plans[message.plan])
                self.turn(self.walks[sequence], sequence, message.legs)
                self.go_on()
            case m.Go(run=run, turns=turns):
                for sequence, legs in turns:
                    if run in self.walks:
                        self.turn(self.walks[run], sequence, legs)
                    else:
                        self.running.append((sequence, None))
                self.go_on()
            case m.DropRun(session=session) | m.CloseStore(session=session) | m.Free(session=session, delete=False):
                self.lines[session].append(message)
                self.go_on()

    def turn(self, walk: ModelWalk, sequence: int, count: int) -> None:
        self.sequences.append((walk.run.session, sequence))
        legs, walk.left = walk.left[:count], walk.left[count:]
        if not walk.left:
            del self.walks[walk.run.sequence]
        together = any(leg.together for leg in legs)
        self.lines[walk.run.session].append(
            ModelTurn(sequence, self.turn_of(walk, legs, sequence, together), together)
        )
        if together:
            self.together.append(sequence)

    def turn_of(self, walk: ModelWalk, legs: list[p.Leg], sequence: int, together: bool) -> Iterator[int]:
        for leg in legs:
            yield from self.walk(walk, leg, sequence)
        self.running.append((sequence, None if walk.reported and not together else walk.problem))
        walk.reported = walk.problem is not None
        if walk.problem is None:
            if together:
                self.begun.add(sequence)
            if walk.run.acknowledge:
                self.enqueued.append(sequence)

    def arrive(self, session: int, feed: int) -> None:
        if session in self.stores:
            self.inbox.setdefault((session, feed), None)
            self.go_on()

    def go_on(self) -> None:
        progress = True
        while progress:
            progress = False
            for session, line in list(self.lines.items()):
                while line and self.do(session, line[0]):
                    line.popleft()
                    progress = True

    def do(self, session: int, item: Any) -> bool:
        match item:
            case m.Free(handles=handles):
                for handle in handles:
                    self.freed[session, handle] += 1
                    self.stores[session].pop(handle, None)
            case m.DropRun(run=run):
                self.walks.pop(run, None)
            case m.CloseStore():
                del self.stores[session]
                for run in [run for run, walk in self.walks.items() if walk.run.session == session]:
                    del self.walks[run]
            case ModelTurn():
                if next(item.steps, None) is not None:
                    return False
                if item.together:
                    self.together.remove(item.sequence)
        return True

    def walk(self, walk: ModelWalk, leg: p.Leg, sequence: int) -> Iterator[int]:
        """Yields while bytes are missing."""
        run, plan = walk.run, walk.plan
        store = self.stores[run.session]
        if leg is plan.legs[0]:
            for handle in run.arguments:
                assert handle in store, "an argument has been freed before its use, or was never made"
                walk.problem = walk.problem or store[handle]
            walk.values.update(plan.arguments)
        if "doomed" in plan.name and leg is plan.legs[run.sequence % len(plan.legs)]:
            walk.problem = walk.problem or Status(Code.INTERNAL, plan.name)
        while leg.together and walk.problem is None and self.together[0] != sequence:
            yield -1
        for step in leg.steps:
            if walk.problem is not None:
                break
            assert walk.values.issuperset(p.uses(step)), "a value was dropped or donated before its last use"
            walk.values.difference_update(p.consumes(step))
            if isinstance(step, p.Send):
                self.sends.extend((piece.host, run.session, run.feeds[piece.feed]) for piece in step.pieces)
            if isinstance(step, p.Receive):
                for piece in step.pieces:
                    while (run.session, run.feeds[piece.feed]) not in self.inbox:
                        yield piece.feed
                    walk.problem = walk.problem or self.inbox[run.session, run.feeds[piece.feed]]
            walk.values.update(defines(step))
        handles = dict(zip(plan.results, run.results, strict=True))
        later = plan.legs[plan.legs.index(leg) :] if walk.problem is not None and not walk.reported else (leg,)
        for value in [value for each in later for value in each.results if not walk.reported]:
            store[handles[value]] = walk.problem
        walk.values.difference_update(leg.drops)

    def finish(self, index: int) -> Any:
        sequence, problem = self.running.pop(index)
        return m.Done(((sequence, 0, 1),)) if problem is None else m.Failed(sequence, problem)


def defines(step: p.Step) -> tuple[int, ...]:
    match step:
        case p.Execute(first_output=first):
            return tuple(range(first, first + 3))
        case p.Move(outputs=outputs):
            return outputs
        case p.Put(output=output) | p.Receive(output=output) | p.Select(output=output):
            return (output,)
        case p.Get(completion=completion):
            return (completion,)
    return ()


class Client:
    """A session that does random things, and knows what must become of each of its handles."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.rng = world.rng
        self.number = number
        self.next = 1
        self.launched = self.retired = 0
        self.arrays: dict[int, ArraySpec] = {}  # live and usable
        self.taint: dict[int, set[str]] = {}  # programs that fail, and it with them
        self.maybe: dict[int, set[str]] = {}  # programs with which it may fail
        self.unreleased: set[int] = set()
        self.waits: dict[int, int] = {}  # wait -> handle
        self.outcomes: dict[int, Status] = {}
        self.programs: dict[Any, int] = {}
        self.functions: dict[tuple[int, ...], int] = {}
        self.uploads: list[tuple[int, int]] = []  # (host, feed)
        self.lost: set[int] = set()  # hosts to which it sends nothing

    def fresh(self) -> int:
        self.next += 1
        return self.next

    def say(self, message: Any) -> None:
        self.world.controller.from_proxy(self.number, message)

    def hear(self, message: Any) -> None:
        match message:
            case m.Retired(launches=launches):
                self.retired += launches
            case m.HostsLost(hosts=hosts):
                self.lost.update(hosts)
                self.uploads = [(host, feed) for host, feed in self.uploads if host not in hosts]
                self.say(m.LossSeen(hosts))
            case m.HostsBack(hosts=addresses):
                back = {host for host, _ in addresses}
                self.lost -= back
                seats = self.world.controller.sessions[self.number].devices.seats
                for devices, function in self.functions.items():
                    hosts = sorted({seats[device].host for device in devices} & back)
                    if hosts:
                        feed = self.fresh()
                        self.say(m.CompileAgain(function, feed))
                        self.uploads.extend((host, feed) for host in hosts)
            case m.Awaited(wait=wait, status=status):
                assert wait not in self.outcomes, "each wait is answered once"
                self.outcomes[wait] = status

    def spec(self) -> ArraySpec:
        """A sharding over some devices of the cluster."""
        seats = self.world.controller.sessions[self.number].devices.seats
        devices = tuple(self.rng.sample(sorted(seats), self.rng.randint(1, min(3, len(seats)))))
        tiling = Tiled((len(devices),), tuple(range(len(devices))))
        return ArraySpec("float32", (6,), Sharding(devices, tiling))

    def island_spec(self) -> ArraySpec:
        island = self.rng.randrange(self.world.controller.resources.topology.islands)
        seats = self.world.controller.sessions[self.number].devices.seats
        devices = [d for d, seat in seats.items() if seat.island == island]
        chosen = tuple(self.rng.sample(devices, self.rng.randint(1, len(devices))))
        return ArraySpec("float32", (6,), Sharding(chosen, Tiled((len(chosen),), tuple(range(len(chosen))))))

    def program(self, body: Program) -> int:
        if body not in self.programs:
            number = self.programs[body] = self.fresh()
            self.say(m.RegisterProgram(number, body))
        return self.programs[body]

    def name(self, kind: str) -> str:
        return f"{kind} doomed {self.fresh()}" if self.rng.random() < self.world.doom else kind

    def launch(self, body: Program, arguments: tuple[int, ...], feeds: tuple[int, ...] = ()) -> list[int]:
        number = self.program(body)
        results = [self.fresh() for _ in body.results]
        taint = set().union(*(self.taint[handle] for handle in arguments))
        # A program of several nodes may fail when others have used what it had made until then.
        late = {name for name in taint if name.startswith("chain")}
        maybe = late.union(*(self.maybe[handle] for handle in arguments))
        taint = taint - late
        if "doomed" in body.name:
            taint = taint | {body.name}
        self.say(m.Launch(number, arguments, tuple(results), feeds))
        self.launched += 1
        for handle in results:
            self.taint[handle], self.maybe[handle] = taint, maybe
            self.unreleased.add(handle)
        if "doomed" in body.name or self.rng.random() < 0.1:
            self.say(m.ReleaseProgram(self.programs.pop(body)))
        return results

    def some_array(self) -> int | None:
        return self.rng.choice(sorted(self.arrays)) if self.arrays else None

    def put(self) -> None:
        spec = self.spec()
        body = single(self.name("put"), (), HostToDevice((HostBuffer(0, (6,), None, None),), (spec,)), feeds=1)
        feed = self.fresh()
        seats = self.world.controller.sessions[self.number].devices.seats
        self.uploads.extend((host, feed) for host in {seats[d].host for d in spec.sharding.devices})
        (handle,) = self.launch(body, (), (feed,))
        self.arrays[handle] = spec

    def transfer(self) -> None:
        handle = self.some_array()
        if handle is None:
            return
        source, target = self.arrays[handle], self.spec()
        donate = self.rng.random() < 0.2
        body = single(self.name("transfer"), (source,), Transfer((0,), (target,), donate, reshard=True))
        (result,) = self.launch(body, (handle,))
        if donate:
            del self.arrays[handle]
        self.arrays[result] = target

    def function(self, devices: tuple[int, ...]) -> int:
        if devices not in self.functions:
            function = self.functions[devices] = self.fresh()
            self.say(m.RegisterFunction(function, "content", self.fresh(), (devices,)))
        return self.functions[devices]

    def chain(self) -> None:
        """A program of several nodes: calls on values of any node before, with transfers where these are elsewhere."""
        handle = self.some_array()
        if handle is None:
            return
        specs = [self.arrays[handle]]
        nodes: list[Any] = []
        gone: set[int] = set()  # values that have been donated

        def donate(value: int) -> bool:
            if self.rng.random() < 0.3:
                gone.add(value)
            return value in gone

        for _ in range(self.rng.randint(2, 6)):
            target = self.island_spec()
            value = self.rng.choice([i for i in range(len(specs)) if i not in gone])
            if specs[value] != target:
                nodes.append(Transfer((value,), (target,), donate(value), reshard=True))
                value = len(specs)
                specs.append(target)
            devices = target.sharding.devices
            donated = (0,) if donate(value) else ()
            nodes.append(Call(self.function(devices), (value,), (target,), devices, donated))
            specs.append(target)
        left = [value for value in range(1, len(specs)) if value not in gone]
        results = tuple(sorted(self.rng.sample(left, min(len(left), self.rng.randint(1, 2)))))
        found = self.launch(Program(self.name("chain"), (specs[0],), tuple(nodes), results), (handle,))
        if 0 in gone:
            del self.arrays[handle]
        self.arrays.update((result, specs[value]) for result, value in zip(found, results, strict=True))

    def call(self) -> None:
        spec = self.island_spec()
        devices = spec.sharding.devices
        fitting = [h for h, s in self.arrays.items() if s == spec]
        arguments = tuple(self.rng.choices(fitting, k=self.rng.randint(0, 2))) if fitting else ()
        call = Call(
            self.function(devices),
            tuple(range(len(arguments))),
            (spec, spec),
            devices,
            completion=self.rng.random() < 0.3,
        )
        results = self.launch(single(self.name("call"), (spec,) * len(arguments), call), arguments)
        self.arrays.update((result, spec) for result in results[:2])

    def get(self) -> None:
        whole = [h for h, s in self.arrays.items() if len(s.sharding.devices) == 1]
        if whole:
            handle = self.rng.choice(whole)
            body = single(self.name("get"), (self.arrays[handle],), DeviceToHost((0,), 0, None), feeds=1)
            (completion,) = self.launch(body, (handle,), (self.fresh(),))
            self.wait(completion)
            self.release(completion)

    def wait(self, handle: int | None = None) -> None:
        if handle is None and self.unreleased:
            handle = self.rng.choice(sorted(self.unreleased))
        if handle is not None:
            number = self.fresh()
            self.waits[number] = handle
            self.say(m.Await(number, (handle,)))

    def release(self, handle: int | None = None) -> None:
        if handle is None and self.unreleased:
            handle = self.rng.choice(sorted(self.unreleased))
        if handle is not None:
            self.unreleased.remove(handle)
            self.arrays.pop(handle, None)
            self.say(m.Release((handle,)))

    def upload(self) -> None:
        there = [upload for upload in self.uploads if upload[0] not in self.lost]
        if there:
            host, feed = self.rng.choice(there)
            self.uploads.remove((host, feed))
            self.world.controller.from_worker(host, m.Arrived(self.number, (feed,)))

    def act(self) -> None:
        self.rng.choice(
            [self.put, self.transfer, self.chain, self.chain, self.call, self.call, self.get, self.wait, self.release]
            + [self.upload] * 4
        )()


class World:
    """The controller with model hosts, random clients, and messages in between that keep their order."""

    def __init__(self, rng: random.Random, topology: str, doom: float, **settings: Any) -> None:
        self.rng = rng
        self.doom = doom
        self.now = 0.0
        self.controller = joined(topology, **settings)
        self.down: set[int] = set()  # islands
        self.told: list[m.Told] = []  # operators
        self.has_lost = False
        self.hosts = {number: ModelHost(number) for number in self.controller.resources.hosts}
        self.clients: dict[int, Client] = {}

    def open(self) -> Client:
        number = self.controller.open_session(1, "").number
        client = self.clients[number] = Client(self, number)
        self.deliver()
        return client

    def deliver(self) -> None:
        while sent := self.controller.take_outbox():
            for (kind, number), message in sent:
                if kind == "host":
                    if self.controller.resources.hosts[number].island not in self.down:
                        self.hosts[number].take(message)
                elif kind == "session" and number in self.clients:
                    self.clients[number].hear(message)
                elif kind == "operator":
                    self.told.append(message)
                elif isinstance(message, m.RestartIsland):
                    self.end(message.island)

    def lose(self, island: int) -> None:
        self.end(island)
        self.controller.worker_lost(self.rng.choice(self.controller.resources.hosts_of(island)), "killed")
        self.deliver()

    def end(self, island: int) -> None:
        """Nothing is left of what was on the island's hosts, or on its way from and to them."""
        self.down.add(island)
        self.has_lost = True
        hosts = list(self.controller.resources.hosts_of(island))
        for host in hosts:
            self.hosts[host] = ModelHost(host)
        for other in self.hosts.values():
            other.sends = [send for send in other.sends if send[0] not in hosts]

    def restore(self, island: int) -> None:
        self.down.discard(island)
        topology = self.controller.resources.topology
        for host in self.controller.resources.hosts_of(island):
            self.controller.worker_joined(ready(topology, host, f"unix:/data-{host}-again"), 2000 + host)
        self.deliver()

    def ended(self, host: ModelHost) -> list[int]:
        """What could end there now, by its place; not what waits for other hosts to begin."""
        in_flight = self.controller._launcher.in_flight
        found = []
        for index, (sequence, problem) in enumerate(host.running):
            gang = in_flight.get(sequence)
            together = gang is not None and problem is None and sequence in host.begun
            if not together or all(sequence in self.hosts[other].begun for other in gang.work.template.hosts):
                found.append(index)
        return found

    def work(self) -> bool:
        """One host ends one run, or one piece arrives. False where there is nothing to do."""
        ended = {host.number: self.ended(host) for host in self.hosts.values()}
        busy = [h for h in self.hosts.values() if ended[h.number] or h.sends or h.enqueued or h.compiled]
        if not busy:
            return False
        host = self.rng.choice(busy)
        if host.enqueued:
            self.controller.from_worker(host.number, m.Enqueued(host.enqueued.popleft()))
        elif host.compiled:
            self.controller.from_worker(host.number, m.Compiled(host.compiled.pop(), OK, b"", 0.0, False))
        elif host.sends and (not ended[host.number] or self.rng.random() < 0.5):
            to, session, feed = host.sends.pop(self.rng.randrange(len(host.sends)))
            self.hosts[to].arrive(session, feed)
        else:
            message = host.finish(self.rng.choice(ended[host.number]))
            self.controller.from_worker(host.number, message)
        self.deliver()
        return True

    def close(self, client: Client) -> None:
        del self.clients[client.number]
        self.controller.close_session(client.number)
        self.deliver()

    def settle(self) -> None:
        """All uploads come, all islands come back, all work is done."""
        for _ in range(1000):
            for island in sorted(self.down):
                self.restore(island)
            for client in self.clients.values():
                while client.uploads:
                    client.upload()
            self.deliver()
            while self.work():
                pass
            # What waits for memory in vain, or failed on several hosts, is told so once nothing else goes on.
            statistics = [self.controller.scheduler.statistics(i) for i in self.controller.resources.islands]
            if not self.down and not any(each.waiting or each.in_flight for each in statistics):
                return
            self.now += 1
            self.controller.tick(self.now)
            self.deliver()
        raise AssertionError("something waits for ever")


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "1x2x2", "2x2x1", "3x1x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 60, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.02]),
)
def test_whatever_clients_do_all_ends_in_order_exactly_once_and_leaves_nothing(
    seed, steps, topology, doom, memory, dispatch, loss
):
    world = World(random.Random(seed), topology, doom, device_memory=memory, dispatch=dispatch)
    rng = world.rng
    for _ in range(rng.randint(1, 3)):
        world.open()
    for _ in range(steps):
        if world.clients and rng.random() < 0.75:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif rng.random() < 0.05 and len(world.clients) > 1:
            world.close(rng.choice(list(world.clients.values())))
        elif rng.random() < loss:
            islands = sorted(set(world.controller.resources.islands) - world.down)
            if islands:
                world.lose(rng.choice(islands))
        elif world.down and rng.random() < 0.2:
            world.restore(min(world.down))
        else:
            world.work()
    world.settle()

    for client in world.clients.values():
        for handle in sorted(client.unreleased):
            client.wait(handle)
        world.deliver()
        assert client.retired == client.launched, "each launch ends once"
        assert set(client.outcomes) == set(client.waits), "each wait ends"
        for wait, handle in client.waits.items():
            status = client.outcomes[wait]
            taint, maybe = client.taint[handle], client.maybe[handle]
            if memory and status.code == Code.RESOURCE_EXHAUSTED:
                continue
            if world.has_lost and status.code in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED):
                continue
            assert not (status.ok and taint), f"{handle} is there although it depends on {taint}"
            assert status.ok or status.message in taint | maybe, f"{status} is none of {taint | maybe}"
        for handle in sorted(client.unreleased):
            client.release(handle)
        world.deliver()
        session = world.controller.sessions[client.number]
        assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
        assert session.in_flight == 0
        assert session.feeds.awaited == {}
        for host in world.hosts.values():
            assert host.stores[client.number] == {}, "all memory goes"
    assert not any(world.controller.memory.used.values()), "and so does what is reserved"
    if memory:
        assert max(world.controller.memory.peak.values()) <= memory
    for host in world.hosts.values():
        assert all(count == 1 for count in host.freed.values()), "nothing is freed twice"
        last: dict[int, int] = defaultdict(int)
        for session_number, sequence in host.sequences:
            assert sequence > last[session_number], "a session's gangs keep their order"
            last[session_number] = sequence
    for island in world.controller.resources.islands:
        statistics = world.controller.scheduler.statistics(island)
        assert (statistics.waiting, statistics.in_flight) == (0, 0)

    for client in list(world.clients.values()):
        world.close(client)
    for host in world.hosts.values():
        assert (host.plans, host.stores) == ({}, {})
        assert not any(host.lines.values())
        assert host.walks == {}
    assert world.controller.functions.users == {}
    assert world.controller._launcher.in_flight == {}
