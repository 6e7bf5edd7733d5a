"""Tests of the state of a client's session, of holding the client back, and of the numbers of responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import StatusError
from atoll.ifrt.ifrt_session import (
    FIRST_MINTED_HANDLE,
    MAX_WAITING,
    OUT_OF_SEQUENCE,
    RESPONSE_SECONDS,
    ResponseStream,
)
from atoll.protocol import messages as m
from atoll.protocol.ifrt import session_pb2
from tests.ifrt.rig import Rig, on
from tests.session.fake_cluster import WINDOW


def launch(rig: Rig) -> None:
    rig.session.launch(1, (), ())


def test_a_full_window_holds_the_client_back_until_it_is_half_empty(rig: Rig):
    for _ in range(WINDOW - 1):
        launch(rig)
    assert not rig.paused
    launch(rig)
    launch(rig)  # a request may cause several launches
    assert rig.paused
    for returned in range(WINDOW // 2 + 1):
        assert rig.paused, returned
        rig.receive(m.CreditReturned(1))
    assert not rig.paused


def test_a_quiesced_session_holds_the_client_back(rig: Rig):
    rig.receive(m.Quiesce(1))
    assert rig.paused
    rig.receive(m.Migrated(1, ()))
    assert not rig.paused


@pytest.mark.parametrize("window_first", [False, True])
def test_a_client_goes_on_when_neither_the_window_nor_a_migration_holds_it_back(rig: Rig, window_first: bool):
    ends = [m.CreditReturned(WINDOW), m.Migrated(1, ())]
    for _ in range(WINDOW):
        launch(rig)
    rig.receive(m.Quiesce(1))
    rig.receive(ends[not window_first])
    assert rig.paused
    rig.receive(ends[window_first])
    assert not rig.paused


@pytest.mark.parametrize(
    ("given", "count", "text"),
    [
        ([1], 2, "1 handle for 2"),
        ([1, 1], 2, "2 handles for 2"),
        ([0], 1, "0 is not a valid handle"),
        ([FIRST_MINTED_HANDLE], 1, "is not a valid handle"),
    ],
)
def test_handles_that_a_client_cannot_choose_are_refused(rig: Rig, given, count, text):
    with pytest.raises(StatusError, match=text):
        rig.session.handles(given, count)


def test_a_client_that_chooses_no_handles_gets_fresh_ones(rig: Rig):
    assert rig.session.handles([], 2) == [FIRST_MINTED_HANDLE, FIRST_MINTED_HANDLE + 1]


def test_a_future_is_asked_about_once(rig: Rig):
    handle = rig.session.add_future()
    rig.session.take_future(handle)
    with pytest.raises(StatusError, match="unknown future"):
        rig.session.take_future(handle)


# ---- numbers of responses, which must have no gaps


class Client:
    """Model of how jaxlib's client handles the numbers of responses, if it releases each of them at once.

    It never releases the response to Init, nor responses to requests of its batcher.
    """

    def __init__(self) -> None:
        self.stacks: list[int] = []  # responses that it keeps
        self.done: set[int] = set()
        self.next = 0
        self.ended: dict[int, list[int]] = {}

    def request(self, stack: int) -> None:
        if stack:
            self.stacks.append(stack)

    def response(self, response: Any, batched: bool = False) -> None:
        kind, number = response.WhichOneof("kind"), response.meta.seq_num
        if batched or kind is None:
            return
        assert number not in self.ended or number == OUT_OF_SEQUENCE
        self.ended[number] = list(response.meta.destroyed_user_context_ids)
        if kind == "init":
            return
        self.done.add(number)
        while self.next in self.done:
            for stack in self.ended.pop(self.next):
                self.stacks.remove(stack)
            self.next += 1


def stream() -> tuple[ResponseStream, list[Any]]:
    sent: list[Any] = []
    return ResponseStream(lambda data: sent.append(session_pb2.Response.FromString(data)), lambda number: None), sent


def test_the_sequence_has_no_gap_whatever_is_sent_beside_it():
    responses, sent = stream()
    for i in range(6):
        send = responses.send if i % 2 else responses.send_out_of_sequence
        send(session_pb2.Response(), 0)
    assert [each.meta.seq_num for each in sent] == [OUT_OF_SEQUENCE, 0, OUT_OF_SEQUENCE, 1, OUT_OF_SEQUENCE, 2]


def test_stacks_that_end_out_of_sequence_are_named_by_the_next_of_the_sequence():
    responses, sent = stream()
    responses.send_out_of_sequence(session_pb2.Response(), 5)
    responses.ended_contexts.append(6)
    responses.send(session_pb2.Response(), 7)
    responses.send(session_pb2.Response(), 0)
    assert [sorted(each.meta.destroyed_user_context_ids) for each in sent] == [[], [5, 6, 7], []]


class Waiting:
    """Stream whose responses may wait. `timers` contains its active timers."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.timers: list[Callable[[], None]] = []

        def later(seconds: float, call: Callable[[], None]) -> None:
            assert seconds == RESPONSE_SECONDS
            self.timers.append(call)

        self.responses = ResponseStream(self._write, lambda number: None, later)

    def _write(self, data: bytes) -> None:
        self.sent.append(session_pb2.Response.FromString(data).meta.seq_num)

    def send(self, may_wait: bool) -> None:
        self.responses.send(session_pb2.Response(), 0, may_wait)


def test_responses_that_may_wait_are_written_before_the_next_one():
    stream = Waiting()
    stream.send(may_wait=True)
    stream.send(may_wait=True)
    assert stream.sent == []
    stream.send(may_wait=False)
    assert stream.sent == [0, 1, 2]
    stream.send(may_wait=True)
    stream.responses.send_out_of_sequence(session_pb2.Response(), 0)
    assert stream.sent == [0, 1, 2, 3, OUT_OF_SEQUENCE]


def test_responses_that_may_wait_are_written_when_the_time_is_over():
    stream = Waiting()
    for end in (2, 4):
        stream.send(may_wait=True)
        stream.send(may_wait=True)
        (timer,) = stream.timers
        stream.timers.clear()
        timer()
        assert stream.sent == list(range(end))


def test_few_responses_wait():
    stream = Waiting()
    for _ in range(MAX_WAITING):
        stream.send(may_wait=True)
    assert stream.sent == list(range(MAX_WAITING))


def test_a_client_keeps_no_more_stacks_than_its_arrays_have(rig: Rig):
    """Run a loop that makes, deletes, and destructs arrays. Each request has a different stack."""
    client = Client()
    client.request(0)
    client.response(rig.ask("init", stack=0))
    rig.make(1, on(0))
    for i in range(2, 50):
        client.request(i)
        client.response(rig.ask("copy_arrays", arrays=[i - 1], device_ids=[i % 4], results=[i], stack=i))
        deletion = rig.ask("delete_array", arrays=[i - 1], stack=0)
        client.response(deletion, batched=True)
        future = deletion.delete_array.deletion_future_handle
        client.response(rig.ask("check_future", future=future, stack=0), batched=True)
        client.response(rig.ask("destruct_array", arrays=[i - 1], stack=0), batched=True)
        # The stacks of the array and of the previous one, which the next response releases.
        assert len(client.stacks) <= 2
    assert not rig.session.deletions
