"""Tests that the work and memory that a hostile session causes are bounded, and that its numbers do no harm."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.sessions import inboxes, proxy_requests, queries
from atoll.controller.validation import proxy_validation
from atoll.errors import Code, Status
from atoll.ir.program import HostBuffer, HostToDevice, Program, Report, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.launch import launch_checks
from atoll.protocol import messages as m
from atoll.state import buffer_directory
from atoll.state.buffer_states import BufferState
from tests.controller.dumps import check_dump, dumped
from tests.controller.play import BROKEN, Play, on, runs
from tests.controller.publishing_play import Trainer


def closing(messages: list[Any]) -> Status:
    (status,) = [each.status for each in messages if isinstance(each, m.Closing)]
    return status


@pytest.mark.parametrize("clock", [1 << 62, (1 << 64) - 1])
def test_a_clock_with_which_the_controller_cannot_calculate_ends_its_session(clock: int) -> None:
    for message in (m.Pong(0.0, clock), m.CallsRecorded(1, 0.0, clock, b"")):
        play = Play()
        play.operator(m.RecordRequest(5.0))
        replies = play.send(message)
        assert "clock" in closing(replies).message
        dumped(play.controller)


def test_a_wait_that_names_an_array_often_waits_for_it_once() -> None:
    play = Play()
    play.with_put(2)
    play.send(m.Launch(2, (), (10,), (1,)))
    play.send(m.Await(5, (10,) * m.MAX_HANDLES))
    directory = play.controller.sessions[play.session].directory
    assert directory.entries[10].waits == [5]
    assert directory.awaited == 1
    play.report(0, m.FeedsArrived(play.session, (1,)))
    (gang,) = play.controller.launches.in_flight
    assert [type(each) for each in play.done(gang)].count(m.Awaited) == 1
    assert directory.awaited == 0


def test_the_arrays_that_waits_wait_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_directory, "MAX_AWAITED", 3)
    play = Play()
    play.with_put(2)
    for handle in (10, 11):
        play.send(m.Launch(2, (), (handle,), (handle,)))
    play.send(m.Await(5, (10, 11)))
    (refused,) = play.send(m.Await(6, (10, 11)))
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    assert play.send(m.Await(7, (10,))) == []
    check_dump(play.controller)


def test_queries_without_a_reply_are_bounded_and_end_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_QUERY_BYTES", 250)
    monkeypatch.setattr(queries, "MAX_QUERIES", 4)
    play = Play()
    for query in range(2):
        (sent,) = play.send(m.Query(query, m.QueryKind.COST, 0, -1, bytes(100)))
        assert isinstance(sent, m.WorkerQuery)
    (refused,) = play.send(m.Query(2, m.QueryKind.COST, 0, -1, bytes(100)))
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    for query in range(3, 5):
        play.send(m.Query(query, m.QueryKind.COST, 0, -1, b""))
    (refused,) = play.send(m.Query(5, m.QueryKind.COST, 0, -1, b""))
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    play.report(0, m.WorkerAnswer(play.session, sent.query, Status(), b""))
    (sent,) = play.send(m.Query(2, m.QueryKind.COST, 0, -1, bytes(100)))
    assert isinstance(sent, m.WorkerQuery)
    check_dump(play.controller)
    play.close(play.session)
    play.flush()
    assert list(play.controller.parts()["queries"].pending()) == []
    play.report(0, m.WorkerAnswer(play.session, sent.query, Status(), b""))


def test_the_arrays_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_validation, "MAX_ARRAYS", 4)
    for message in (m.MakeError((20, 21), BROKEN), m.Launch(9, (), (20, 21), ())):
        play = Play()
        play.send(m.MakeError((10, 11, 12), BROKEN))
        assert closing(play.send(message)).code == Code.RESOURCE_EXHAUSTED


def test_the_texts_of_errors_that_a_client_makes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_requests, "MAX_ERROR_BYTES", 1500)
    play = Play()
    for handle in (10, 11):
        play.send(m.MakeError((handle,), Status(Code.INTERNAL, "x" * 800, {"a": bytes(100)})))
    entries = play.controller.sessions[play.session].directory.entries
    assert [len(entries[each].error.message) for each in (10, 11)] == [800, 300]
    assert entries[11].error.payloads == {}
    check_dump(play.controller)


def test_the_buffers_that_failed_launches_name_and_that_never_come_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_checks, "MAX_UNWANTED", 8)
    play = Play()
    buffers = tuple(HostBuffer(each, (2,), None, None, output=each) for each in range(3))
    play.send(m.RegisterProgram(2, single("put", (), HostToDevice(buffers, (on(0),) * 3), feeds=3)))
    for feed in (1, 4, 7):
        replies = play.send(m.Launch(2, (), (10 + feed,), (feed, feed + 1, feed + 2)))
        assert not any(isinstance(each, m.Closing) for each in replies), "the launch has too few results"
    play.report(0, m.FeedsArrived(play.session, (1,)))
    assert runs(play.send(m.Launch(2, (), (30, 31, 32), (20, 21, 22)))) == []
    for feed in (40, 44):
        replies = play.send(m.Launch(2, (), (10 + feed,), (feed, feed + 1, feed + 2)))
    assert closing(replies).code == Code.RESOURCE_EXHAUSTED


def test_a_source_that_arrives_after_the_release_of_its_function_is_dropped() -> None:
    play = Play("1x2x1")
    play.send(m.RegisterFunction(1, "content", 900, ((0, 1),)))
    play.report(0, m.FeedsArrived(play.session, (900,)))
    play.send(m.ReleaseFunction(1))
    assert play.report(1, m.FeedsArrived(play.session, (900,))) == [m.DropFeed(play.session, 900)]


def test_the_sources_of_dropped_functions_that_never_come_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_checks, "MAX_UNWANTED", 8)
    play = Play("1x2x1")
    for function in range(1, 4):
        play.send(m.RegisterFunction(function, f"content {function}", 900 + function, ((0, 1),)))
        play.send(m.Recompile(function, 920 + function))
        play.send(m.ReleaseFunction(function))
    (refused,) = play.send(m.RegisterFunction(5, "content 5", 905, ((0, 1),)))
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    assert not play.controller._compilation._awaiting
    check_dump(play.controller)


def test_a_published_array_is_the_one_that_had_the_handle_then() -> None:
    play = Trainer()
    view, _ = play.view()
    play.send(m.Publish(play.request(), "policy", 2, (view,), ("w",)))
    play.proxy(play.session, m.Release((view,)))
    play.proxy(play.session, m.Launch(5, (10,), (view,), ()))
    play.flush()
    entries = play.controller.sessions[play.session].directory.entries
    for gang in list(play.controller.launches.in_flight):
        play.done(gang)
    assert play.controller.published.names.pending == {}
    assert list(play.controller.published.names.versions()) == []
    assert view not in entries or entries[view].state is BufferState.READY


def test_a_second_request_with_the_number_of_one_that_waits_is_refused() -> None:
    play = Trainer()
    first = m.OpenVersion(7, "policy", seconds=5.0)
    assert play.answers(play.session, first) == []
    (second,) = play.answers(play.session, first)
    assert second.status.code == Code.INVALID_ARGUMENT
    play.controller.published.names.validate()
    play.close(play.session)
    play.flush()
    play.controller.published.names.validate()


def test_messages_with_long_lists_wait_for_flushes() -> None:
    play = Play()
    handles = (10,) * m.MAX_HANDLES
    long = (
        m.Await(5, handles),
        m.Launch(9, handles, (), ()),
        m.RegisterSwitch(9, 1, (1,) * 4096),
        m.FailureAcknowledged((0,), ((0, 1),) * 1024),
        m.HandlesReported(1, dict.fromkeys(range(1024), False)),
        m.AddSlice(1, m.SliceRequest(1)),
    )
    for message in long:
        play.proxy(play.session, message)
        assert play.controller.has_work, f"{type(message).__name__} waits"
        play.flush()


def test_launches_that_choose_among_many_branches_wait_for_flushes() -> None:
    play = Play()
    play.send(m.RegisterSwitch(9, 1, (1,) * 4096))
    play.proxy(play.session, m.Launch(9, (10,), (11,), ()))
    assert play.controller.has_work


def test_the_bytes_of_the_messages_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "MAX_WAITING_BYTES", 3 << 20)
    play = Play()
    play.controller.sessions[play.session].in_steps += 1  # as during the lowering of a large program
    for query in range(3):
        play.proxy(play.session, m.Query(query, m.QueryKind.COST, 0, -1, bytes(1 << 20)))
    assert closing(play.outbox()).code == Code.RESOURCE_EXHAUSTED


def test_the_bytes_of_messages_that_were_handled_do_not_count() -> None:
    play = Play()
    play.proxy(play.session, m.MakeError(tuple(range(100, 3000)), BROKEN))
    assert play.controller._inboxes._bytes[play.session] > 2900 * 40
    play.flush()
    assert play.controller._inboxes._bytes[play.session] == 0


def of_huge_arrays(count: int, elements: int = 1 << 48) -> Program:
    spec = ArraySpec("complex128", (elements,), Sharding((0,)))
    buffers = tuple(HostBuffer(0, spec.shape, None, None, output=each) for each in range(count))
    return single("put", (), HostToDevice(buffers, (spec,) * count), feeds=1)


def test_a_program_that_makes_more_bytes_than_can_be_counted_is_refused() -> None:
    play = Play(device_memory=100)
    play.send(m.RegisterProgram(7, of_huge_arrays(4200)))
    play.send(m.Launch(7, (), tuple(range(100, 4300)), (5,)))
    entries = play.controller.sessions[play.session].directory.entries
    assert "makes arrays of 18915" in entries[100].error.message
    play.report(0, m.FeedsArrived(play.session, (5,)))
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
    dumped(play.controller)


def test_launches_fail_once_the_arrays_of_their_session_are_larger_than_can_be_counted() -> None:
    play = Play(device_memory=100)
    play.send(m.RegisterProgram(7, of_huge_arrays(16)))
    entries = play.controller.sessions[play.session].directory.entries
    for first in range(100, 100 + 16 * 40, 16):
        play.send(m.Launch(7, (), tuple(range(first, first + 16)), (first,)))
        play.report(0, m.FeedsArrived(play.session, (first,)))
    errors = [entries[each].error for each in range(100, 100 + 16 * 40, 16)]
    assert errors[0] is None
    assert errors[-1].code == Code.RESOURCE_EXHAUSTED
    dumped(play.controller)
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
        play.flush()
    assert entries[100].error is not None, "no device has that much memory"
    dumped(play.controller)


def test_a_number_on_no_device_controls_nothing() -> None:
    play = Play()
    nowhere = ArraySpec("int32", (), Sharding(()))
    play.send(m.RegisterProgram(7, Program("report", (nowhere,), (Report((0,)),), ())))
    (problem,) = [each for each in play.controller.sessions[play.session].programs.values()]
    assert isinstance(problem, Status)
    assert "this one is on none" in problem.message
