"""The link between a worker and a Python process: messages and arrays arrive as they were sent, in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from atoll.errors import OK, FrameError, StatusError
from atoll.host_services.python.link import PythonLink, view
from atoll.protocol.messages import python as m

STRINGS = np.array(["a", "", "größer"], dtype=np.dtypes.StringDType())


@pytest.fixture
def ends() -> Iterator[tuple[PythonLink, PythonLink]]:
    ours, theirs = socket.socketpair()
    worker, process = PythonLink(ours, m.FromPython), PythonLink(theirs, m.ToPython)
    yield worker, process
    worker.close()
    process.close()


def received(link: PythonLink, count: int) -> list[Any]:
    """The first messages, and contents by their numbers."""
    found: list[Any] = []
    enough = threading.Event()

    def note(each: Any) -> None:
        found.append(each)
        if len(found) == count:
            enough.set()

    threading.Thread(target=link.receive, args=(note, lambda feed, x: note((feed, x))), daemon=True).start()
    assert enough.wait(10)
    return found


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


def test_contents_of_another_size_than_declared_are_refused():
    with pytest.raises(StatusError, match="host buffer of 8 bytes"):
        view(np.zeros(8, np.uint8), "float32", (3,))


def test_a_message_that_is_none_ends_the_link(ends):
    worker, process = ends
    process.send(m.Drop("a worker sends this, a process does not"))
    with pytest.raises(FrameError, match="not a message"):
        worker.receive(lambda message: None, lambda feed, contents: None)
