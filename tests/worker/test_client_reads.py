"""Tests of reads without a launch, of arrays that are ready now or later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.host_services.calls.call_messages import ReadWanted
from atoll.ir import plan as p
from atoll.worker.client_reads import ClientReads
from atoll.worker.store import COMPUTED, Buffer, MemoryHolds
from tests.waiting import until

CONTENTS = np.arange(4, dtype=np.float32)


class LateArray:
    """An array that is computed when `computed` is set, with `error` if there is one."""

    def __init__(self, nbytes: int = CONTENTS.nbytes) -> None:
        self.nbytes = nbytes
        self.computed = threading.Event()
        self.error: Exception | None = None

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.computed.is_set()

    def block_until_ready(self) -> None:
        assert self.computed.wait(60)
        if self.error is not None:
            raise self.error

    def __array__(self, *arguments: Any, **named: Any) -> Any:
        return CONTENTS


class Host:
    """A host with one array, and the messages to its session's client."""

    def __init__(self, array: LateArray, has_threads: bool = True) -> None:
        self.sent: list[tuple[int, int, bytes]] = []
        self.not_sent: list[bool] = []
        self.has_threads = has_threads
        self.buffer = Buffer(array, 0, COMPUTED)
        self.reads = ClientReads(self, self, MemoryHolds(), print)  # type: ignore[arg-type]

    def shards(self, array: Any) -> list[Any]:
        return [array]

    def to_client(self, session: int) -> Host:
        return self

    def send(self, session: int, feed: int, contents: list[Any]) -> None:
        self.sent.append((session, feed, b"".join(bytes(part) for part in contents)))

    def start(self, work: Callable[[], None]) -> bool:
        if self.has_threads:
            threading.Thread(target=work).start()
        return self.has_threads

    def read(self, has_ended: bool = False) -> bool:
        return self.reads.send(
            5, ReadWanted(77, 1, has_ended=has_ended), self.buffer, self.start, lambda: self.not_sent.append(True)
        )


def test_an_array_is_sent_when_it_is_computed_and_not_donated_before() -> None:
    array = LateArray()
    host = Host(array)
    assert host.read()
    assert (host.sent, host.buffer.is_exclusive) == ([], False)
    array.computed.set()
    until(lambda: host.buffer.is_exclusive)
    assert (host.sent, host.not_sent) == ([(5, 77, CONTENTS.tobytes())], [])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the device has failed"),
        OSError("the client has left"),
        ValueError("the channel's memory is being closed"),
    ],
)
def test_an_array_that_fails_is_read_otherwise(error: Exception) -> None:
    array = LateArray()
    array.error = error
    host = Host(array)
    assert host.read()
    array.computed.set()
    until(lambda: host.buffer.is_exclusive)
    assert (host.sent, host.not_sent) == ([], [True])


def test_an_array_whose_run_may_fail_later_is_refused_until_the_run_has_ended() -> None:
    array = LateArray()
    host = Host(array)
    host.buffer.may_fail_late = True
    assert not host.read()
    assert host.buffer.is_exclusive
    assert host.read(has_ended=True)
    array.computed.set()
    until(lambda: host.buffer.is_exclusive)
    assert host.sent == [(5, 77, CONTENTS.tobytes())]


def test_an_array_is_refused_if_it_is_large_or_no_thread_is_left() -> None:
    refused = [Host(LateArray(1 << 20)), Host(LateArray(), has_threads=False)]
    assert [host.read() for host in refused] == [False, False]
    assert [host.buffer.is_exclusive for host in refused] == [True, True]


def test_several_shards_of_an_array_are_sent_together_and_protected_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(LateArray())
    monkeypatch.setattr(host, "shards", lambda array: [CONTENTS, CONTENTS * 2, CONTENTS * 3])
    run: Any = SimpleNamespace(session=5, feeds=(77,))
    values = {3: host.buffer}
    read = host.reads.read_all(p.GetAll((3, 3), 4, 0, (2, 0)), run, values)
    assert (host.sent, host.buffer.is_exclusive) == ([], False)
    channel: Any = SimpleNamespace(send_in_parts=lambda *sent: host.sent.append(sent))
    read.read(channel)  # type: ignore[call-arg]
    assert host.sent == [(5, 77, (CONTENTS * 3).tobytes() + CONTENTS.tobytes())]
    assert host.buffer.is_exclusive
    assert values.keys() == {3, 4}
