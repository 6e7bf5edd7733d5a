"""Tests of calls into a client's Python: their messages, and that each of them ends."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.errors import MAX_TEXT, Code, FrameError, StatusError
from atoll.host_services.calls.call_messages import (
    ArrayType,
    Call,
    Raised,
    ReadWanted,
    Released,
    Retained,
    Returned,
    Unread,
    decode,
    decode_answer,
    encode,
    first_call,
    host_of,
    is_call,
    is_notice,
)
from atoll.host_services.calls.client_calls import Calls, ClientError, Reply
from atoll.protocol.number_ranges import LOOP_HANDLES, SCRIPT_FEEDS
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import Piece
from tests.transfers.ends import SECONDS, Ends, Receiver
from tests.waiting import until

FLOATS = ArrayType("float32", (3,), 12)
SESSION = 7


class Client:
    """Client that replies to each call on a channel with `answer(call, arrays)`, the contents of a piece."""

    def __init__(self, channel: DataChannel, answer: Any) -> None:
        self.channel = channel
        self.seen: list[Any] = []
        self.answer = answer
        threading.Thread(target=lambda: channel.receive(self._take), daemon=True).start()

    def _take(self, piece: Piece, content: Any, done: Any) -> None:
        message, offsets = decode(content)
        self.seen.append(message)
        contents = None if is_notice(piece.feed) else self.answer(message, contents_of(message, offsets, content))
        done()
        if contents is not None:
            self.channel.send(SESSION, piece.feed, contents)


def contents_of(message: Any, offsets: list[int], content: Any) -> list[bytes]:
    return [bytes(content[offset : offset + each.nbytes]) for each, offset in zip(message.arrays, offsets, strict=True)]


def calls_over(ends: Ends) -> Calls:
    """Return a host's calls over one end of a channel, with the thread that receives replies."""
    calls = Calls(lambda session: ends[0], 0, lambda *_: False)
    threading.Thread(
        target=lambda: ends[0].receive(
            lambda piece, content, done: calls.answered(SESSION, piece.feed, bytes(content), done)
        ),
        daemon=True,
    ).start()
    return calls


def call(calls: Calls, callback: int = 4) -> Reply:
    return calls.call(SESSION, callback, (FLOATS,), [np.arange(3, dtype=np.float32).view(np.uint8)])


def test_the_arrays_of_a_message_come_back_each_aligned():
    arrays = [np.arange(5, dtype=np.int8), np.empty(0, np.int8), np.arange(7, dtype=np.int8)]
    types = tuple(ArrayType("int8", each.shape, each.nbytes) for each in arrays)
    content = b"".join(bytes(part) for part in encode(Call(9, types), arrays))
    message, offsets = decode(content)
    assert message == Call(9, types)
    assert contents_of(message, offsets, content) == [each.tobytes() for each in arrays]
    assert all(offset % 64 == 0 for offset, each in zip(offsets, arrays, strict=True) if each.nbytes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        b"\xff\xff\xff\xff",
        b"\1\0\0\0\xc1",
        b"".join(encode(Returned((ArrayType("int8", (4,), 4),)))),
        b"".join(encode(Returned((ArrayType("int8", (4,), -4),)))),
        b"".join(encode(Returned((ArrayType("int8", (-4,), 4),)), [b"1234"])),
        b"".join(encode(Returned((ArrayType("int8", (1 << 40, 1 << 40), 4),)), [b"1234"])),
    ],
)
def test_what_nobody_has_encoded_is_refused(content: bytes):
    with pytest.raises(FrameError):
        decode(content)


def test_an_array_of_a_million_dimensions_is_refused():
    content = b"".join(map(bytes, encode(Returned((ArrayType("float32", (1 << 62,) * 1_000_000, 4),)))))
    with pytest.raises(FrameError, match="length <= 64"):
        decode(content + bytes(64))


def test_an_answer_of_many_arrays_is_refused_before_it_is_decoded():
    content = b"".join(map(bytes, encode(Returned((ArrayType("", (), 0),) * 70_000))))
    assert len(decode_answer(b"".join(map(bytes, encode(Returned((ArrayType("", (), 0),) * 60_000)))))[1]) == 60_000
    with pytest.raises(FrameError, match="length <= 65536"):
        decode_answer(content)


@pytest.mark.parametrize("notice", [Unread((1,) * 10), Released((1,) * 10), Call(1, ())])
def test_only_the_result_of_a_call_or_its_error_is_an_answer(notice: Any):
    with pytest.raises(FrameError):
        decode_answer(b"".join(map(bytes, encode(notice))))


def test_the_number_of_a_call_says_whose_it_is():
    assert not is_call((1 << 48) + 5)
    for host in (0, 1, 4095):
        assert is_notice(first_call(host))
        assert not is_notice(first_call(host) + 1)
        assert host_of(first_call(host) + 12345) == host


def test_a_host_that_cannot_send_an_array_says_so(ends: Ends):
    read: list[tuple[int, int, int]] = []
    feed = SCRIPT_FEEDS.start

    def read_array(session: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        handle = wanted.handle
        read.append((session, wanted.feed, handle))
        if handle == 3:
            raise StatusError(Code.NOT_FOUND, "array 3 is not on this host")
        if handle == 4:
            raise ValueError("the channel's memory is being closed")
        return handle == 1

    calls = Calls(lambda session: ends[0], 4, read_array)
    receiver = Receiver(ends[1])
    released: list[int] = []
    for handle in (1, 2, 3, 4):
        notice = b"".join(encode(ReadWanted(feed + handle, handle)))
        calls.answered(SESSION, first_call(4), notice, lambda handle=handle: released.append(handle))
    assert (read, released) == ([(SESSION, feed + handle, handle) for handle in (1, 2, 3, 4)], [1, 2, 3, 4])
    answers = [(number, decode(content)[0]) for _, number, content in receiver.wait(3)]
    assert answers == [(first_call(4), Unread((feed + handle,))) for handle in (2, 3, 4)]


@pytest.mark.parametrize(
    "notice",
    [
        encode(ReadWanted(SCRIPT_FEEDS.stop, 1)),  # a feed that is not for the client's process
        encode(ReadWanted(SCRIPT_FEEDS.start, LOOP_HANDLES.start)),  # a handle that no client chooses
        [b"no message"],
        [*encode(ReadWanted(SCRIPT_FEEDS.start, 1)), bytes(4096)],
    ],
)
def test_an_invalid_request_for_an_array_is_dropped(ends: Ends, notice: list[bytes]):
    read: list[tuple[int, ...]] = []
    calls = Calls(lambda session: ends[0], 4, lambda *each: not read.append(each))
    released: list[bool] = []
    calls.answered(SESSION, first_call(4), b"".join(notice), lambda: released.append(True))
    assert (read, released) == ([], [True])


def test_a_call_returns_what_the_client_answers(ends: Ends):
    client = Client(ends[1], lambda message, arrays: encode(Returned((FLOATS,)), arrays))
    reply = call(calls_over(ends))
    assert reply.types == (FLOATS,)
    assert bytes(reply.content[reply.offsets[0] :]) == np.arange(3, dtype=np.float32).tobytes()
    assert client.seen == [Call(4, (FLOATS,))]


def test_a_call_fails_if_its_answer_is_announced_to_be_larger_than_its_results(ends: Ends):
    most, awaited = (1 << 20) + 12, []

    def take(piece: Piece, content: Any, done: Any) -> None:
        done()
        awaited.extend(calls.awaits(SESSION, piece.feed, nbytes) for nbytes in (most, most + 1, most))

    threading.Thread(target=lambda: ends[1].receive(take), daemon=True).start()
    calls = calls_over(ends)
    with pytest.raises(StatusError, match=f"has {most + 1} bytes, and the results have at most 12") as caught:
        calls.call(SESSION, 4, (FLOATS,), [np.arange(3, dtype=np.float32).view(np.uint8)], limit=12)
    assert caught.value.status.code == Code.INVALID_ARGUMENT
    until(lambda: len(awaited) == 3)
    assert awaited == [True, False, False]


def test_calls_are_answered_in_any_order(ends: Ends):
    feeds: list[int] = []

    def take(piece: Piece, content: Any, done: Any) -> None:
        feeds.append(piece.feed)
        done()
        if len(feeds) == 2:
            for feed in reversed(feeds):
                ends[1].send(SESSION, feed, encode(Returned(())))

    threading.Thread(target=lambda: ends[1].receive(take), daemon=True).start()
    calls = calls_over(ends)
    threads = [threading.Thread(target=call, args=(calls,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_what_a_callable_raises_is_raised_here(ends: Ends):
    Client(ends[1], lambda message, arrays: encode(Raised("ValueError: mine")))
    with pytest.raises(ClientError, match="ValueError: mine"):
        call(calls_over(ends))


def test_a_call_that_failed_keeps_nothing_of_who_has_called(ends: Ends):
    Client(ends[1], lambda message, arrays: encode(Raised("ValueError: mine")))
    calls, array = calls_over(ends), np.ones(3, np.float32)
    kept = weakref.ref(array)
    gc.disable()
    try:
        with contextlib.suppress(ClientError):
            calls.call(SESSION, 1, (FLOATS,), [array])
        del array
        assert kept() is None
    finally:
        gc.enable()


def test_of_a_traceback_its_end_is_kept_and_no_mark_of_a_worker(ends: Ends):
    Client(ends[1], lambda message, arrays: encode(Raised("x" * (1 << 20) + "\x02\x03\x04ValueError: mine")))
    with pytest.raises(ClientError) as caught:
        call(calls_over(ends))
    assert str(caught.value).endswith("xValueError: mine")
    assert len(str(caught.value)) < MAX_TEXT


def test_calls_of_a_host_that_was_started_anew_have_other_numbers(ends: Ends):
    seen = []
    for _ in range(2):
        calls = Calls(lambda session: ends[0], 0, lambda *_: False)
        seen.append(next(calls._serial))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("wrong", [[b"nonsense"], encode(Call(1, ()))])
def test_an_answer_that_is_none_fails_its_call_alone(ends: Ends, wrong: Any):
    client = Client(ends[1], lambda message, arrays: wrong)
    calls = calls_over(ends)
    with pytest.raises(StatusError) as caught:
        call(calls)
    assert caught.value.status.code == Code.INVALID_ARGUMENT
    client.answer = lambda message, arrays: encode(Returned(()))
    assert call(calls).types == ()


def test_calls_fail_with_their_channel(ends: Ends):
    calls = calls_over(ends)
    Client(ends[1], lambda message, arrays: calls.fail(SESSION))
    with pytest.raises(StatusError, match="has no answer") as caught:
        call(calls)
    assert caught.value.status.code == Code.CANCELLED


def test_a_call_after_the_end_of_its_channel_fails(ends: Ends):
    calls = Calls(lambda session: ends[0], 0, lambda *_: False)
    ends[0].shut_down()
    with pytest.raises(StatusError, match="CANCELLED"):
        call(calls)


def test_answers_that_nobody_awaits_are_dropped_and_their_memory_is_given_back():
    calls = Calls(lambda session: None, 0, lambda *_: False)  # type: ignore[arg-type, return-value]
    given_back: list[int] = []
    calls.answered(SESSION, first_call(0) + 77, b"".join(encode(Returned(()))), lambda: given_back.append(1))
    assert given_back == [1]


def test_the_session_learns_which_callables_a_host_may_call(unix_ends: Ends):
    receiver = Receiver(unix_ends[1])
    calls = Calls(lambda session: unix_ends[0], 3, lambda *_: False)
    calls.retain(SESSION, (4, 5))
    calls.retain(SESSION, (4, 5))  # by the same function in another client
    calls.release(SESSION, (4, 5))
    calls.release(SESSION, (4, 5))
    pieces = receiver.wait(2)
    calls.close()
    assert [feed for _, feed, _ in pieces] == [first_call(3)] * 2
    assert [decode(content)[0] for _, _, content in pieces] == [Retained((4, 5)), Released((4, 5))]
