"""Tests of small arrays in slots: which arrays use slots, and the state after an error."""

from __future__ import annotations

import _thread
import functools
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.jax_patches.numbered_runs import MIN_WRITTEN
from atoll.client.jax_patches.small_write_table import SmallWriteTable
from atoll.ir.types import Replicated, Tiled
from atoll.protocol.submission import PutArray, SmallWriting, decode, first_feed
from atoll.transfers.shared_slots import SLOTS, SharedSlots, SlotWriter

CLIENT = object()
DEVICES = [SimpleNamespace(id=number, client=CLIENT) for number in (4, 5)]
X = np.arange(6, dtype=np.int16).reshape(2, 3)
COLUMNS = Tiled((1, 2), (0, 1))


class Server:
    """Server that takes the contents of each run."""

    def __init__(self) -> None:
        self.slots = SharedSlots()
        self.writings: list[SmallWriting] = []
        self.taken: list[bytes | None] = []
        self.error: BaseException | None = None
        self.is_slow = False  # whether it ignores all runs
        self._runs: dict[int, int] = {}

    def submit(self, client: Any, payload: bytes) -> Any:
        writing = decode(payload)
        assert isinstance(writing, SmallWriting)
        self.writings.append(writing)
        return SimpleNamespace(execute_sharded=lambda arguments: self._run(writing.number))

    def _run(self, number: int) -> str:
        if self.error is not None:
            raise self.error
        run = self._runs.get(number, 0)
        self._runs[number] = run + 1
        if not self.is_slow:
            self.taken.append(self.slots.take(first_feed(number) + run, 6))
        return "results"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def table(server: Server) -> SmallWriteTable:
    table = SmallWriteTable(server.submit)
    table.open(SlotWriter(server.slots.descriptor))
    return table


def test_arrays_of_a_type_that_is_written_often_are_made_of_contents_in_slots(
    server: Server, table: SmallWriteTable
) -> None:
    found = [table.start(X[0] + i, DEVICES[:1]) for i in range(MIN_WRITTEN + 2)]
    assert found == [None] * MIN_WRITTEN + ["results"] * 2
    assert server.writings == [SmallWriting((4,), 0, PutArray("int16", (3,)), Replicated())]
    assert server.taken == [(X[0] + i).tobytes() for i in (MIN_WRITTEN, MIN_WRITTEN + 1)]


def test_each_type_and_each_sharding_has_an_executable(server: Server, table: SmallWriteTable) -> None:
    for _ in range(MIN_WRITTEN + 1):
        table.start(np.float32(3), DEVICES)
        table.start(np.float32(3), DEVICES[1:])
        table.start(X.T, DEVICES)
        table.start(X.T, DEVICES, COLUMNS)
    assert [(each.devices, each.array, each.tiling) for each in server.writings] == [
        ((4, 5), PutArray("float32", ()), Replicated()),
        ((5,), PutArray("float32", ()), Replicated()),
        ((4, 5), PutArray("int16", (3, 2)), Replicated()),
        ((4, 5), PutArray("int16", (3, 2)), COLUMNS),
    ]


def test_without_slots_jax_makes_the_arrays(server: Server, table: SmallWriteTable) -> None:
    table.close()
    assert not table.is_open
    assert [table.start(X, DEVICES) for _ in range(MIN_WRITTEN + 1)] == [None] * (MIN_WRITTEN + 1)
    assert not server.writings


def test_while_no_slot_is_free_jax_makes_the_arrays(server: Server, table: SmallWriteTable) -> None:
    server.is_slow = True
    for _ in range(MIN_WRITTEN + SLOTS):
        table.start(X, DEVICES)
    assert table.start(X, DEVICES) is None
    assert server.slots.take(first_feed(0), 12) == X.tobytes()
    assert table.start(X, DEVICES) == "results"


@pytest.mark.parametrize("error", [RuntimeError("no connection"), KeyboardInterrupt()])
def test_contents_of_a_run_that_was_not_sent_leave_their_slot(
    server: Server, table: SmallWriteTable, error: BaseException
) -> None:
    for _ in range(MIN_WRITTEN + 1):
        table.start(X[0], DEVICES)
    server.error = error
    with pytest.raises(type(error)):
        table.start(X[1], DEVICES)
    assert server.slots.take(first_feed(0) + 1, 6) is None
    server.error = None
    assert table.start(X[1], DEVICES) == "results"
    assert [each.number for each in server.writings] == [0, 1], "the server may have counted the run"
    assert server.taken[-1] == X[1].tobytes()


def test_contents_of_a_run_that_was_sent_when_the_user_interrupts_the_script_stay(
    server: Server,
) -> None:
    # Python handles the signal after the C code that sends the run has returned.
    send = functools.partial(next, map(_thread.interrupt_main, [signal.SIGINT]))
    table = SmallWriteTable(lambda client, payload: SimpleNamespace(execute_sharded=send))
    table.open(SlotWriter(server.slots.descriptor))
    for _ in range(MIN_WRITTEN):
        table.start(X[0], DEVICES)
    with pytest.raises(KeyboardInterrupt):
        table.start(X[0], DEVICES)
    assert server.slots.take(first_feed(0), 6) == X[0].tobytes()
    table.start(X[1], DEVICES)
    assert server.slots.take(first_feed(0) + 1, 6) == X[1].tobytes(), "the server has counted the first run"


def test_types_beyond_the_most_executables_replace_no_other_type(server: Server, table: SmallWriteTable) -> None:
    for size in range(1, 300):
        for _ in range(MIN_WRITTEN + 1):
            table.start(np.zeros(1, f"S{size}"), DEVICES[:1])
    made = len(server.writings)
    assert made == 256
    assert table.start(np.zeros(1, "S1"), DEVICES[:1]) == "results"
    assert table.start(np.zeros(1, "S299"), DEVICES[:1]) is None
    assert len(server.writings) == made
