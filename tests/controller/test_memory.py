"""Tests of memory: how the controller counts it, and which launches wait for it."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import OK, Code, Status
from atoll.ir.program import (
    Call,
    Mapping,
    Rearrange,
    single,
)
from atoll.launch.memory_waits import RELEASED_SECONDS
from atoll.protocol import messages as m
from tests.controller.play import BROKEN, Play, on, runs


def test_memory_goes_after_the_last_launch_that_uses_it():
    play = Play()
    play.with_call()
    play.array(10)
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.proxy(play.session, m.Release((10, 11)))
    run, free = play.outbox()
    assert isinstance(run, m.Run)
    assert free == m.Free(play.session, (10, 11))


def test_what_a_client_releases_with_a_launch_goes_after_it():
    play = Play()
    play.with_call()
    play.array(10)
    run, free = play.send(m.Launch(1, (10,), (11,), (), released=(10,)))
    assert isinstance(run, m.Run)
    assert free == m.Free(play.session, (10,))


def test_what_is_released_with_a_launch_that_cannot_be_goes_all_the_same():
    play = Play()
    play.array(10)
    assert m.Free(play.session, (10,)) in play.send(m.Launch(99, (10,), (11,), (), released=(10,)))


def test_the_results_of_a_launch_with_a_wait_are_awaited_and_then_released():
    play = Play()
    play.with_call()
    play.array(10)
    run, free = play.send(m.Launch(1, (10,), (11,), (), released=(10,), wait=5))
    assert isinstance(run, m.Run)
    assert free == m.Free(play.session, (11, 10))
    directory = play.controller.sessions[play.session].directory
    assert directory.waits.keys() == {5}
    assert m.Awaited(5, OK) in play.report(0, m.Done(((run.sequence, 0, 1),)))
    assert not directory.waits
    assert not directory.entries


def test_the_wait_of_a_launch_that_fails_has_the_error():
    play = Play()
    play.with_call()
    play.array(10)
    run, *_ = play.send(m.Launch(1, (10,), (11,), (), wait=5))
    sent = play.report(0, m.Failed(run.sequence, BROKEN))
    (awaited,) = [each for each in sent if isinstance(each, m.Awaited)]
    assert BROKEN.message in awaited.status.message
    assert play.controller.sessions[play.session].directory.entries.keys() == {10}


def test_the_wait_of_a_launch_that_cannot_be_is_answered_at_once():
    play = Play()
    sent = play.send(m.Launch(99, (10,), (11,), (), wait=5))
    (awaited,) = [each for each in sent if isinstance(each, m.Awaited)]
    assert awaited.wait == 5
    assert awaited.status.code == Code.NOT_FOUND
    assert not play.controller.sessions[play.session].directory.entries


def test_what_several_sessions_release_in_one_turn_is_one_message_to_a_host():
    play = Play()
    first, second = play.session, play.open(43).number
    for play.session, handle in ((first, 10), (second, 20)):
        play.array(handle)
    play.proxy(first, m.Release((10,)))
    play.proxy(second, m.Release((20,)))
    assert play.outbox() == [m.FreeMany((m.Free(first, (10,)), m.Free(second, (20,))))]


def test_memory_that_a_waiting_gang_needs_stays_until_it_starts():
    play = Play()
    play.with_call()
    play.array(10)
    play.send(m.Launch(2, (), (20,), (77,)))
    play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.Release((10,))) == []
    *_, free = play.report(0, m.FeedsArrived(play.session, (77,)))
    assert free == m.Free(play.session, (10,))


def test_a_deleted_array_goes_at_once_and_cannot_be_used():
    play = Play()
    play.with_call()
    play.array(10)
    assert play.send(m.Release((10,), delete=True)) == [m.Free(play.session, (10,), True)]
    play.send(m.Launch(1, (10,), (11,), ()))
    (awaited,) = play.send(m.Await(5, (11,)))
    assert "deleted" in awaited.status.message


def test_a_deleted_array_that_a_waiting_gang_needs_goes_when_that_has_started():
    play = Play()
    play.with_call()
    play.array(10)
    play.send(m.Launch(2, (), (20,), (77,)))
    play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.Release((10,), delete=True)) == []
    *_, free = play.report(0, m.FeedsArrived(play.session, (77,)))
    assert free == m.Free(play.session, (10,), True)


def test_a_released_programs_plan_stays_for_the_launches_before():
    play = Play()
    plan = play.with_call()
    play.array(10)
    play.send(m.Launch(2, (), (20,), (77,)))
    play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.ReleaseProgram(1)) == []
    *_, run, drop = play.report(0, m.FeedsArrived(play.session, (77,)))
    assert isinstance(run, m.Run)
    assert drop == m.DropPlan(plan)


# ---- memory of limited devices: arrays of `on` take 8 bytes


@pytest.mark.parametrize(("device_memory", "first"), [(20, m.Free), (1000, m.Run)])
def test_hosts_learn_what_goes_before_a_gang_only_where_it_may_not_fit_beside_that(device_memory: int, first: type):
    play = Play(device_memory=device_memory)
    play.with_call()
    play.array(10)
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.done(run.sequence)
    play.proxy(play.session, m.Release((10,)))
    play.proxy(play.session, m.Launch(1, (11,), (12,), ()))
    messages = play.outbox()
    assert {type(each) for each in messages} == {m.Free, m.Run}
    assert isinstance(messages[0], first)


def test_what_does_not_fit_waits_until_others_let_go():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.Launch(1, (10,), (12,), ())) == []
    play.done(first.sequence)
    free, second = play.send(m.Release((11,)))
    assert (free.handles, second.results) == ((11,), (12,))


def test_a_result_that_is_released_early_counts_until_its_gang_has_ended():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Release((11,)))
    assert play.send(m.Launch(1, (10,), (12,), ())) == []
    (second,) = runs(play.done(first.sequence))
    assert second.results == (12,)


def test_the_error_of_a_gang_that_is_larger_than_the_device_says_to_shard_it():
    play = Play(device_memory=4)
    play.with_put()
    play.report(0, m.FeedsArrived(play.session, (7,)))
    play.send(m.Launch(2, (), (10,), (7,)))
    play.send(m.Await(5, (10,)))
    play.tick(1.0)
    (awaited,) = [each for each in play.outbox() if isinstance(each, m.Awaited)]
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    assert ". The device is too small for this even without other arrays: shard the arrays" in awaited.status.message


def test_the_error_of_what_waits_for_memory_in_vain_says_who_holds_it():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), (), traceback_id=77))
    play.send(m.Launch(1, (10,), (12,), (), traceback_id=78))
    play.send(m.Await(5, (12,)))
    play.tick(100.0)
    play.tick(110.0)
    assert play.outbox() == [], "running work may still release memory"
    play.done(first.sequence)
    play.tick(111.0)
    assert play.outbox() == [m.CreditReturned(1)], "for the first launch; the session is now asked what it can release"
    play.tick(112.0, silent_sessions=(play.session,))
    assert play.outbox() == [], "the session has not answered"
    play.tick(113.0)
    (awaited, _) = play.outbox()
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    for part in (
        "device 0 of host 0",
        "f needs 8 B",
        "4 B of 20 B are free",
        "session 1 (script.py): 16 B",
        ". Delete",
    ):
        assert part in awaited.status.message
    report = msgspec.msgpack.decode(awaited.status.payloads[m.MEMORY_REPORT], type=m.MemoryReport)
    assert {(h.traceback_id, h.producer, h.ready, h.ready_bytes) for h in report.holders} == {
        (0, "put", 1, 8),
        (77, "f", 1, 8),
    }
    # The launches behind it continue.
    play.send(m.Release((11,)))
    assert len(runs(play.send(m.Launch(1, (10,), (13,), ())))) == 1


def test_a_launch_that_failed_while_it_waited_for_memory_does_not_wait_any_more():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    assert play.send(m.Launch(1, (10,), (12,), ())) == []
    memory = play.controller.launches.reservations
    assert memory.waits.is_waiting(play.session)
    (waiting,) = memory.waits.waiting.values()
    play.controller.launches.failing.fail(waiting.gang.run.launch, BROKEN)
    assert not memory.waits.is_waiting(play.session)


def test_what_waits_for_memory_that_was_freed_just_now_does_not_fail():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.done(first.sequence)
    assert play.send(m.Launch(1, (10,), (12,), ())) == []
    play.tick(100.0)
    play.proxy(play.session, m.Release((11,)))
    play.tick(102.0)
    (second,) = runs(play.outbox())
    assert second.results == (12,)


def test_what_waits_for_memory_waits_longer_while_some_is_released_in_steps_and_not_forever():
    play = Play(device_memory=20)
    play.with_call()
    play.array(10)
    (first,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.done(first.sequence)
    assert play.send(m.Launch(1, (10,), (12,), ())) == []
    other = play.open(43, "other.py").number
    play.proxy(other, m.MakeError(tuple(range(100, 1000)), BROKEN))
    play.flush()
    play.close(other)
    entry = play.controller.sessions[play.session].directory.entries[12]
    for seconds in range(1, int(RELEASED_SECONDS)):
        play.tick(float(seconds))
        assert play.controller.launches.remains.waiting
        assert entry.error is None
    for seconds in range(3):  # the session is asked what it can release
        play.tick(RELEASED_SECONDS + seconds)
    assert play.controller.launches.remains.waiting
    assert entry.error is not None
    assert entry.error.code == Code.RESOURCE_EXHAUSTED


def test_what_can_never_fit_is_refused_though_others_work():
    play = Play(device_memory=7)
    play.with_put()
    play.report(0, m.FeedsArrived(play.session, (77,)))
    assert play.send(m.Launch(2, (), (11,), (77,))) == []
    play.send(m.Await(5, (11,)))
    play.tick(100.0)
    (awaited,) = [x for x in play.outbox() if isinstance(x, m.Awaited)]
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED


def test_an_output_in_the_place_of_a_donated_input_needs_no_room():
    play = Play(device_memory=10)
    play.with_call(donated=(0,))
    play.array(10)
    assert len(runs(play.send(m.Launch(1, (10,), (11,), ())))) == 1
    assert len(runs(play.send(m.Launch(1, (11,), (12,), ())))) == 1
    assert play.controller.ledger.used[0, 0] == 8


def test_an_array_that_is_donated_twice_gives_its_memory_to_one_output():
    play = Play(device_memory=100)
    play.with_call()
    twice = Call(1, (0, 1), (on(0), on(0)), (0,), donated=(0, 1))
    play.send(m.RegisterProgram(5, single("f", (on(0), on(0)), twice)))
    play.array(10)
    (run,) = runs(play.send(m.Launch(5, (10, 10), (11, 12), ())))
    assert play.controller.ledger.used[0, 0] == 16
    play.report(0, m.Failed(run.sequence, Status(Code.INVALID_ARGUMENT, "argument 0 is donated")))
    play.send(m.Release((11, 12)))
    assert play.controller.ledger.used[0, 0] == 0


def test_views_of_an_array_share_its_memory_until_the_last_is_freed():
    play = Play(device_memory=10)
    play.array(10)
    view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.send(m.RegisterProgram(3, single("view", (on(0),), view)))
    (run,) = play.send(m.Launch(3, (10,), (11,), ()))
    play.done(run.sequence)
    play.send(m.Release((10,)))
    assert play.controller.ledger.used[0, 0] == 8
    play.send(m.Release((11,)))
    assert play.controller.ledger.used[0, 0] == 0


def test_a_question_about_memory_goes_to_the_worker_with_what_is_reserved():
    play = Play(device_memory=20)
    play.with_put()
    play.send(m.Launch(2, (), (20,), (77,)))
    play.report(0, m.FeedsArrived(play.session, (77,)))
    (query,) = play.send(m.Query(5, m.QueryKind.MEMORY, 0, -1, b"whatever"))
    ordinal, known = msgspec.msgpack.decode(query.payload, type=tuple[int, dict[str, int]])
    used = play.controller.ledger.used[0, 0]
    assert ordinal == 0
    assert used > 0
    assert known == {"bytes_in_use": used, "peak_bytes_in_use": used, "bytes_limit": 20}
    assert play.report(0, m.WorkerAnswer(play.session, query.query, OK, b"{}")) == [m.QueryReply(5, OK, b"{}")]
