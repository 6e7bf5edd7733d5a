"""Tests of joint gangs: one gang for a call of a function on many islands."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.launch.memory_waits import MemoryWaits
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import check_dump
from tests.controller.play import BROKEN, Play, on, runs

ALL = (0, 1, 2)
SIZE = 8  # bytes of an array on each of its devices


def playing(islands: int = 3, joint_islands: int = 3, **settings: Any) -> Play:
    """Return a session on islands with one device each.

    Program 1 makes an array on all devices, program 2 replaces it, and program 3 makes one on device 1 only.
    """
    play, every = Play(f"{islands}x1x1", joint_islands=joint_islands, **settings), tuple(range(islands))
    for function, devices in ((1, every), (2, (1,))):
        sent = play.send(
            m.RegisterFunction(function, f"content {function}", 900 + function, (devices,), runs_apart=True)
        )
        for host in devices:
            sent += play.report(host, m.FeedsArrived(play.session, (900 + function,)))
        (name,) = {each.function for each in sent if type(each) is m.Compile}
        for host in devices:
            play.report(host, m.Compiled(name, OK, b"", 0.1, False))
    everywhere = on(*every)
    play.send(m.RegisterProgram(1, single("make", (), Call(1, (), (everywhere,), every))))
    step = Call(1, (0,), (everywhere,), every, donated=(0,))
    play.send(m.RegisterProgram(2, single("step", (everywhere,), step)))
    play.send(m.RegisterProgram(3, single("alone", (), Call(2, (), (on(1),), (1,)))))
    return play


def in_flight(play: Play) -> list[Gang[Any]]:
    return list(play.controller.launches.in_flight.values())


def state_of(play: Play, handle: int) -> BufferState:
    return play.controller.sessions[play.session].directory.entries[handle].state


def used(play: Play) -> list[int]:
    return [play.controller.launches.reservations.ledger.used_on((host, 0)) for host in ALL]


def test_a_call_on_all_islands_is_one_gang_and_ends_with_the_last_of_them():
    play = playing()
    sent = runs(play.send(m.Launch(1, (), (11,), ())))
    assert len(sent) == 3
    (gang,) = in_flight(play)
    assert {each.sequence for each in sent} == {gang.sequence}
    assert gang.islands == ALL
    for host in ALL:
        assert state_of(play, 11) is BufferState.PENDING
        play.done(gang.sequence, host=host)
    assert state_of(play, 11) is BufferState.READY
    assert not contradictions(play.controller)
    play.controller.launches.validate()


def test_an_array_that_is_donated_twice_gives_its_memory_to_one_output():
    play = playing(device_memory=100)
    everywhere = on(*ALL)
    twice = Call(1, (0, 1), (everywhere, everywhere), ALL, donated=(0, 1))
    play.send(m.RegisterProgram(4, single("twice", (everywhere, everywhere), twice)))
    (gang,) = {each.sequence for each in runs(play.send(m.Launch(1, (), (11,), ())))}
    for host in ALL:
        play.done(gang, host=host)
    (alone,) = set(used(play))
    play.send(m.Launch(4, (11, 11), (12, 13), ()))
    assert set(used(play)) == {2 * alone}
    play.controller.launches.validate()


@pytest.mark.parametrize(
    ("is_apart", "gangs"),
    [(True, 3), (False, 1)],
    ids=["apart", "together"],
)
def test_a_call_on_fewer_islands_has_a_gang_on_each_unless_they_communicate(is_apart: bool, gangs: int):
    play = Play("3x1x1", joint_islands=4)
    play.send(m.RegisterFunction(1, "content", 901, (ALL,), runs_apart=True))
    name = play.controller.sessions[play.session].functions[1]
    for host in ALL:
        play.report(host, m.FeedsArrived(play.session, (901,)))
    for host in ALL:
        play.report(host, m.Compiled(name, OK, b"", 0.1, False, is_apart=is_apart))
    play.send(m.RegisterProgram(1, single("make", (), Call(1, (), (on(*ALL),), ALL))))
    assert len({each.sequence for each in runs(play.send(m.Launch(1, (), (11,), ())))}) == gangs


def test_each_island_counts_and_is_charged_for_its_part():
    play = playing()
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    for host in ALL:
        play.report(host, m.Done(((gang.sequence, 0, 1000),)))
    tallies, tenant = play.controller.launches.charges.by_island(), gang.node.tenant.name
    assert [tallies[island, tenant].device_ns for island in ALL] == [1000] * 3
    assert [sum(tallies[island, tenant].ran.counts) for island in ALL] == [1] * 3
    assert gang.run.launch.program.account.device_ns == 3000
    assert [span.island for span in play.controller.trace.spans()] == list(ALL)


def test_memory_is_taken_on_all_islands_and_kept_by_an_output_in_the_place_of_its_input():
    play = playing(device_memory=SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    assert used(play) == [SIZE] * 3
    assert len(runs(play.send(m.Launch(2, (11,), (12,), ())))) == 3, "it takes the memory of its argument"
    assert used(play) == [SIZE] * 3
    assert runs(play.send(m.Launch(1, (), (13,), ()))) == []
    for gang in in_flight(play):
        for host in ALL:
            play.done(gang.sequence, host=host)
    assert len(runs(play.send(m.Release((11, 12))))) == 3, "the memory of the last array is free on all islands"
    assert not contradictions(play.controller)
    check_dump(play)


def test_launches_that_wait_for_memory_are_retried_once_for_all_islands(monkeypatch):
    retried, retry = [], MemoryWaits.retry
    monkeypatch.setattr(MemoryWaits, "retry", lambda self, islands: retried.append(islands) or retry(self, islands))
    play = playing(device_memory=SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    assert runs(play.send(m.Launch(1, (), (12,), ()))) == []
    for host in ALL:
        play.done(gang.sequence, host=host)
    assert retried == [ALL], "when the gang has ended"
    assert len(runs(play.send(m.Release((11,))))) == 3
    assert retried == [ALL, {*ALL}], "when its array is released"


def test_an_output_takes_the_place_of_an_input_that_was_made_on_each_island_separately():
    play = playing(device_memory=SIZE)
    buffer = HostBuffer(0, (2,), None, None)
    play.send(m.RegisterProgram(4, single("put", (), HostToDevice((buffer,), (on(*ALL),)), feeds=1)))
    for host in ALL:
        play.report(host, m.FeedsArrived(play.session, (700,)))
    assert len({each.sequence for each in runs(play.send(m.Launch(4, (), (11,), (700,))))}) == 3
    assert used(play) == [SIZE] * 3
    assert len(runs(play.send(m.Launch(2, (11,), (12,), ())))) == 3, "it takes the memory of its argument"
    assert used(play) == [SIZE] * 3
    for gang in in_flight(play):
        for host in gang.hosts:
            play.done(gang.sequence, host=host)
    play.send(m.Release((11, 12)))
    assert used(play) == [0] * 3
    assert not contradictions(play.controller)


def test_memory_that_a_dropped_gang_has_taken_from_its_argument_is_that_of_the_argument_again():
    play = playing(device_memory=2 * SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    while runs(play.send(m.Launch(3, (), (100 + play.controller.scheduler.statistics(1).started,), ()))):
        pass
    play.send(m.Launch(2, (11,), (12,), ()))
    assert not contradictions(play.controller)
    play.close(play.session)
    play.outbox()
    for gang in in_flight(play):
        for host in gang.hosts:
            play.done(gang.sequence, host=host)
    assert used(play) == [0] * 3
    assert not contradictions(play.controller)


def test_a_joint_gang_starts_when_all_of_its_islands_can_take_it():
    play = playing()
    alone: list[m.Run] = []
    while len(sent := runs(play.send(m.Launch(3, (), (100 + len(alone),), ())))) == 1:
        alone += sent
    assert runs(play.send(m.Launch(1, (), (11,), ()))) == [], "island 1 is full"
    started: list[m.Run] = []
    for each in alone:
        started += runs(play.done(each.sequence, host=1))
    names = [each.results for each in started]
    assert names == [(100 + len(alone),), (11,), (11,), (11,)], "in the order of the launches"
    play.controller.launches.validate()


def test_the_loss_of_an_island_fails_the_gangs_on_it_and_no_others():
    play = playing()
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    play.done(gang.sequence, host=0)
    (alone,) = runs(play.send(m.Launch(3, (), (12,), ())))
    play.lose(2, "its connection broke")
    play.outbox()
    assert state_of(play, 11) is BufferState.FAILED
    assert gang.state is GangState.RUNNING, "on island 1"
    check_dump(play)
    play.done(gang.sequence, host=1)
    assert gang.state is GangState.FAILED
    play.done(alone.sequence, host=1)
    assert state_of(play, 12) is BufferState.READY
    assert not in_flight(play)
    assert not contradictions(play.controller)
    play.controller.launches.validate()


def told_to_forget(play: Play, handle: int) -> list[int]:
    """Return the hosts that are instructed to forget a buffer."""
    return [who for (_, who), each in play.sent() if isinstance(each, m.Free) and handle in each.handles]


def test_hosts_forget_their_parts_of_an_array_that_was_lost_with_another_island():
    play = playing(device_memory=SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    for host in ALL:
        play.done(gang.sequence, host=host)
    play.lose(2, "its connection broke")
    assert told_to_forget(play, 11) == [0, 1]
    assert len(runs(play.send(m.Launch(3, (), (12,), ())))) == 1, "it uses the freed memory"
    assert play.send(m.Release((11,))) == [], "the hosts have already forgotten it"
    assert used(play) == [0, SIZE, 0]


def test_hosts_forget_a_result_of_a_failed_launch_once_if_its_client_has_released_it():
    play = playing(device_memory=SIZE)
    play.proxy(play.session, m.Launch(1, (), (11,), (), wait=5))
    told = told_to_forget(play, 11)
    (gang,) = in_flight(play)
    for host in ALL:
        play.worker(host, m.Failed(gang.sequence, BROKEN))
    play.tick(100.0)
    play.tick(101.0)
    assert told + told_to_forget(play, 11) == list(ALL)


def losing_a_result(joint_islands: int) -> tuple[Play, int]:
    """A launch makes an array in the place of another one. Host 0 has made its part when the last island is lost.

    Return the sequence number of the gang that still runs on host 1.
    """
    play = playing(joint_islands=joint_islands, device_memory=SIZE)
    for program, arguments, result in ((1, (), 11), (2, (11,), 12)):
        sent = runs(play.send(m.Launch(program, arguments, (result,), ())))
        for host, run in enumerate(sent if program == 1 else sent[:1]):
            play.done(run.sequence, host=host)
    play.lose(2, "its connection broke")
    return play, sent[1].sequence


@pytest.mark.parametrize("joint_islands", [3, 4])
def test_memory_of_a_result_that_is_still_made_counts_until_its_launch_has_ended(joint_islands: int):
    play, running = losing_a_result(joint_islands)
    assert told_to_forget(play, 12) == []
    assert used(play)[:2] == [SIZE] * 2
    check_dump(play.controller)
    assert runs(play.send(m.Launch(3, (), (13,), ()))) == [], "it has no memory"
    play.worker(1, m.Failed(running, BROKEN))
    assert told_to_forget(play, 12) == [0, 1]
    assert used(play) == [0, SIZE, 0]
    assert [gang.run.launch.program.name for gang in in_flight(play)] == ["alone"]
    assert contradictions(play.controller) == []


def test_a_joint_gang_takes_one_block_for_a_value():
    play = playing()
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    assert len(play.controller.sessions[play.session].directory.entries[11].blocks) == 1
    play.send(m.Release((11,)))
    assert used(play) == [SIZE] * 3
    for host in ALL:
        play.done(gang.sequence, host=host)
    assert used(play) == [0] * 3
    check_dump(play)


def test_memory_that_was_divided_while_its_joint_gang_runs_is_freed_on_each_island():
    play = playing()
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    entry = play.controller.sessions[play.session].directory.entries[11]
    (whole,) = entry.blocks
    assert [part.requirement for part in entry.blocks.on((1,))] == [(((1, 0), SIZE),)]
    check_dump(play)
    assert contradictions(play.controller) == []
    play.send(m.Release((11,)))
    for host in ALL:
        play.done(gang.sequence, host=host)
    assert whole.parts
    assert used(play) == [0] * 3
    assert contradictions(play.controller) == []


def test_hosts_forget_their_parts_of_the_results_of_a_joint_gang_that_fails():
    play = playing(device_memory=SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    play.done(gang.sequence, host=0)
    play.report(1, m.Failed(gang.sequence, BROKEN))
    play.done(gang.sequence, host=2)
    assert told_to_forget(play, 11) == []
    for second in range(1, 4):  # until the loss of another host would be known
        play.tick(float(second))
    assert told_to_forget(play, 11) == list(ALL)
    assert state_of(play, 11) is BufferState.FAILED
    assert used(play) == [0] * 3


def test_a_launch_that_fails_before_it_starts_is_freed_nowhere():
    play = playing(device_memory=SIZE)
    play.send(m.Launch(1, (), (11,), ()))
    play.send(m.MakeError((12,), BROKEN))
    play.send(m.Launch(2, (12,), (13,), ()))
    assert state_of(play, 13) is BufferState.FAILED
    assert told_to_forget(play, 13) == []


def behind_an_ended_part(play: Play) -> None:
    """End a joint gang on island 1, where a later gang then runs. The joint gang still runs on the other islands."""
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    assert len(runs(play.send(m.Launch(3, (), (12,), ())))) == 1
    play.done(gang.sequence, host=1)


def test_a_joint_gang_does_not_run_on_an_island_where_its_part_has_ended():
    play = playing()
    behind_an_ended_part(play)
    play.send(m.Await(5, (12,)))
    play.lose(1, "its connection broke")
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert "(it had started there)" in awaited.status.message


def test_a_crash_of_an_island_is_not_charged_to_a_joint_gang_whose_part_has_ended():
    play = playing()
    behind_an_ended_part(play)
    alone = play.controller.sessions[play.session].functions[2]
    play.engine(m.WorkerEnded(1, play.controller.resources.hosts[1].incarnation, -11, "killed by a signal"))
    assert play.controller.quarantine.suspects | set(play.controller.quarantine.refused) == {alone}


def test_a_part_that_fails_fails_the_launch_and_the_gang_ends_with_the_others():
    play = playing()
    play.send(m.Launch(1, (), (11,), ()))
    (gang,) = in_flight(play)
    play.report(1, m.Failed(gang.sequence, BROKEN))
    play.done(gang.sequence, host=0)
    play.done(gang.sequence, host=2)
    for second in range(1, 4):  # until the loss of another host would be known
        play.tick(float(second))
    assert state_of(play, 11) is BufferState.FAILED
    assert gang.state is GangState.FAILED
    assert not in_flight(play)
    assert not contradictions(play.controller)
