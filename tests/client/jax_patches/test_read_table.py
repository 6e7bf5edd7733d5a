"""Tests of contents that hosts send to this process: each read ends with all of its bytes or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from atoll.client.jax_patches import read_table as module
from atoll.client.jax_patches.direct_reads import value_of
from atoll.client.jax_patches.read_table import ArrivingContents, ReadTable
from atoll.errors import Code, Status, details_of
from atoll.protocol.submission import Reading, decode, first_feed
from atoll.transfers.transfer_engine import nothing_to_release

CLIENT = object()


def devices(*numbers: int) -> list[Any]:
    return [SimpleNamespace(id=number, client=CLIENT) for number in numbers]


class Server:
    """Server that records the runs of its executables as (number of the reader, argument)."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.runs: list[tuple[int, Any]] = []
        self.fails = False
        self.on_run: Callable[[], object] = lambda: None

    def submit(self, client: Any, payload: bytes) -> Any:
        reading = decode(payload)
        assert isinstance(reading, Reading)
        self.readings.append(reading)
        return SimpleNamespace(execute_sharded=lambda arguments: self._run(reading.number, arguments))

    def _run(self, number: int, arguments: list[Any]) -> None:
        self.on_run()
        if self.fails:
            raise RuntimeError("no connection")
        self.runs.append((number, *arguments))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def table(server: Server) -> ReadTable:
    return ReadTable(server.submit)


def give(table: ReadTable, feed: int, content: bytes, more: bool = False) -> None:
    done: list[bool] = []
    table.take(feed, memoryview(content), more, lambda: done.append(True))
    assert done == [True]


def start(table: ReadTable, array: Any, devices: list[Any], nbytes: int) -> ArrivingContents:
    return table.start(array, devices, nbytes, table.losses)


def read(contents: ArrivingContents) -> bytes | None:
    found = contents.wait()
    return None if found is None else found.tobytes()


def test_reads_of_one_reader_have_consecutive_feeds(server: Server, table: ReadTable) -> None:
    first, second = (start(table, name, devices(0, 1), 3) for name in ("x", "y"))
    assert server.readings == [Reading((0, 1), 0)]
    assert server.runs == [(0, "x"), (0, "y")]
    give(table, first_feed(0) + 1, b"yyy")
    give(table, first_feed(0), b"xxx")
    assert (read(first), read(second)) == (b"xxx", b"yyy")


def test_other_devices_have_another_reader(server: Server, table: ReadTable) -> None:
    start(table, "x", devices(0), 1)
    contents = start(table, "y", devices(1), 1)
    give(table, first_feed(1), b"y")
    assert read(contents) == b"y"
    assert server.runs == [(0, "x"), (1, "y")]


def test_parts_are_joined(table: ReadTable) -> None:
    contents = start(table, "x", devices(0), 5)
    give(table, first_feed(0), b"ab", more=True)
    assert not contents.is_complete
    give(table, first_feed(0), b"cde")
    assert read(contents) == b"abcde"


@pytest.mark.parametrize("parts", [[b"ab"], [b"abcdef"], [b"abc", b"def"], [b""]])
def test_contents_of_another_size_are_none(table: ReadTable, parts: list[bytes]) -> None:
    contents = start(table, "x", devices(0), 5)
    for i, part in enumerate(parts):
        give(table, first_feed(0), part, more=i < len(parts) - 1)
    assert read(contents) is None


def test_contents_that_nobody_awaits_are_dropped(table: ReadTable) -> None:
    give(table, first_feed(9), b"late")


def test_a_failed_read_ends_without_contents(table: ReadTable) -> None:
    first, second = (start(table, name, devices(0), 1) for name in ("x", "y"))
    table.fail((first_feed(0),))
    assert read(first) is None
    give(table, first_feed(0) + 1, b"y")
    assert read(second) == b"y"


def test_all_reads_end_when_the_client_is_closed(server: Server, table: ReadTable) -> None:
    waiting = start(table, "x", devices(0), 1)
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(read(waiting)))
    thread.start()
    table.clear()
    thread.join(10)
    assert found == [None]
    start(table, "x", devices(0), 1)
    assert [each.number for each in server.readings] == [0, 1], "the executable belonged to the closed client"


def test_a_run_that_fails_is_the_last_of_its_reader(server: Server, table: ReadTable) -> None:
    start(table, "x", devices(0), 1)
    server.fails = True
    with pytest.raises(RuntimeError, match="no connection"):
        start(table, "y", devices(0), 1)
    server.fails = False
    contents = start(table, "z", devices(0), 1)
    give(table, first_feed(1), b"z")
    assert read(contents) == b"z"


def test_after_an_interrupt_before_a_run_another_reader_is_used(server: Server, table: ReadTable) -> None:
    class Interrupted(dict[int, Any]):
        def __setitem__(self, key: int, value: Any) -> None:
            raise KeyboardInterrupt

    start(table, "x", devices(0), 1)
    table._arriving = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        start(table, "y", devices(0), 1)
    table._arriving = {}
    contents = start(table, "z", devices(0), 1)
    assert server.runs == [(0, "x"), (1, "z")]
    give(table, first_feed(1), b"z")
    assert read(contents) == b"z"


def test_a_run_fails_with_its_error_although_all_reads_end_meanwhile(server: Server, table: ReadTable) -> None:
    server.on_run, server.fails = lambda: table.fail(()), True
    with pytest.raises(RuntimeError, match="no connection"):
        start(table, None, devices(0), 4)
    assert len(table) == 0


def test_a_read_that_began_while_all_reads_ended_is_not_kept(table: ReadTable) -> None:
    losses = table.losses
    table.fail(())
    contents = table.start("x", devices(0), 1, losses)
    assert read(contents) is None
    assert len(table) == 0


def test_a_failed_read_raises_its_error(table: ReadTable) -> None:
    contents = start(table, "x", devices(0), 1)
    table.fail((first_feed(0),), Status(int(Code.DATA_LOSS), "host 1 is gone [atoll: link, host 1]"))
    table.fail(())
    with pytest.raises(jax.errors.JaxRuntimeError, match="DATA_LOSS: host 1 is gone") as caught:
        value_of(SimpleNamespace(), contents)
    assert details_of(caught.value).hosts == (1,)


def test_a_forked_child_does_not_wait(monkeypatch: pytest.MonkeyPatch, table: ReadTable) -> None:
    contents = start(table, "x", devices(0), 1)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert read(contents) is None


def test_contents_are_not_shared_with_the_channel(table: ReadTable) -> None:
    contents = start(table, "x", devices(0), 2)
    block = bytearray(b"ab")
    table.take(first_feed(0), memoryview(block), False, lambda: None)
    block[:] = b"zz"
    found = contents.wait()
    assert found is not None
    np.testing.assert_array_equal(found, [97, 98])


def test_memory_that_nobody_else_uses_becomes_the_arrays(table: ReadTable) -> None:
    contents = start(table, "x", devices(0), 2)
    arrived = np.frombuffer(b"ab", np.uint8)
    table.take(first_feed(0), arrived, False, nothing_to_release)
    found = contents.wait()
    assert found is not None
    assert np.shares_memory(found, arrived)


class ReadByAnotherThread:
    """An array whose mark is removed by another thread after this thread has seen it."""

    dtype, shape = np.dtype(np.uint8), (2,)

    def __init__(self, contents: ArrivingContents) -> None:
        self._contents = contents

    def __getattr__(self, name: str) -> Any:
        return self._contents


def test_threads_can_read_an_array_at_the_same_time() -> None:
    contents = ArrivingContents(2)
    contents.take(b"ab", more=False)
    assert value_of(ReadByAnotherThread(contents), contents).tobytes() == b"ab"
