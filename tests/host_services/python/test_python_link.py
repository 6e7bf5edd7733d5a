"""Tests of the link between a worker and a Python process: messages and arrays arrive unchanged and in order."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from atoll.errors import OK, FrameError, StatusError
from atoll.host_services.python.python_link import MAX_MESSAGE_BYTES, PythonLink, view
from atoll.protocol.messages import python_messages as m

STRINGS = np.array(["a", "", "größer"], dtype=np.dtypes.StringDType())


@pytest.fixture
def ends() -> Iterator[tuple[PythonLink, PythonLink]]:
    ours, theirs = socket.socketpair()
    worker, process = PythonLink(ours, m.FromPython), PythonLink(theirs, m.ToPython)
    yield worker, process
    worker.close()
    process.close()


def received(link: PythonLink, count: int) -> list[Any]:
    """Return the first messages, and the contents by number."""
    found: list[Any] = []
    enough = threading.Event()

    def note(each: Any) -> None:
        found.append(each)
        if len(found) == count:
            enough.set()

    threading.Thread(target=link.receive, args=(note, lambda feed, x: note((feed, x))), daemon=True).start()
    assert enough.wait(10)
    return found


def read(link: PythonLink) -> None:
    """Read everything until the link ends."""
    threading.Thread(target=link.receive, args=(lambda each: None, lambda feed, x: None), daemon=True).start()


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.arange(1 << 20), np.zeros((0, 3)), np.array(7), STRINGS], ids=str
)
def test_arrays_of_all_sizes_arrive_before_the_message_that_follows(ends, array):
    worker, process = ends
    process.send_array(5, array)
    process.send(m.Returned(1, OK, ((5,),)))
    (feed, contents), message = received(worker, 2)
    assert (feed, message) == (5, m.Returned(1, OK, ((5,),)))
    dtype = "string" if array.dtype.kind == "T" else array.dtype.name
    np.testing.assert_array_equal(view(contents, dtype, array.shape), array)


def test_what_was_received_does_not_change_when_the_sender_writes_to_it_again(ends):
    worker, process = ends
    array = np.zeros(1 << 20)
    process.send_array(1, array)
    ((_, contents),) = received(worker, 1)
    array[:] = 1
    process.send_array(2, array)
    assert view(contents, "float64", array.shape).sum() == 0


def test_contents_in_place_keep_their_memory_until_nobody_refers_to_it(ends):
    worker, process = ends
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=process.receive, args=(None, lambda feed, x: arrived.put((feed, x))), daemon=True).start()
    read(worker)  # the returned array
    for number in range(3):
        worker.send_array(number, np.full(1 << 17, number, np.int64), in_place=True)
    held = [arrived.get(timeout=10) for _ in range(3)]
    assert len({contents.ctypes.data for _, contents in held}) == 3
    view_of_view = held[0][1].view(np.int64)[1:][:5]
    addresses = {contents.ctypes.data for _, contents in held[1:]}
    held.clear()
    for number in range(3, 9):  # in released blocks that have been returned
        worker.send_array(number, np.full(1 << 17, number, np.int64), in_place=True)
        addresses.add(arrived.get(timeout=10)[1].ctypes.data)
    assert view_of_view.tolist() == [0] * 5
    assert view_of_view.ctypes.data - 8 not in addresses


def test_a_worker_copies_what_its_process_calls_in_place(ends):
    worker, process = ends
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    receive = threading.Thread(
        target=worker.receive, args=(None, lambda feed, contents: arrived.put(contents), 1 << 30), daemon=True
    )
    receive.start()
    read(process)
    process.send_array(1, np.zeros(1 << 20, np.uint8), in_place=True)
    assert arrived.get(timeout=10).flags.writeable  # shared memory is mapped for reading only


def test_contents_of_another_size_than_declared_are_refused():
    with pytest.raises(StatusError, match=r"must have .* bytes, got 8"):
        view(np.zeros(8, np.uint8), "float32", (3,))


def test_a_message_that_is_none_ends_the_link(ends):
    worker, process = ends
    process.send(m.Drop("a worker sends this, a process does not"))
    with pytest.raises(FrameError, match="not a message"):
        worker.receive(lambda message: None, lambda feed, contents: None)


def test_a_message_has_a_lower_limit_than_contents(ends):
    """The worker would decode it for as long as it has objects, while its other threads wait."""
    worker, process = ends
    read(process)
    contents: list[int] = []

    def send() -> None:
        process.send_array(1, np.zeros(MAX_MESSAGE_BYTES + 1, np.uint8))
        process.send(m.Returned(1, OK, ((),) * MAX_MESSAGE_BYTES))

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(FrameError, match=f"more than {MAX_MESSAGE_BYTES}"):
        worker.receive(lambda message: None, lambda feed, content: contents.append(content.nbytes), 1 << 30)
    assert contents == [MAX_MESSAGE_BYTES + 1]
