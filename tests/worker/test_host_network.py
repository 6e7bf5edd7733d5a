"""Tests of rows sent to other hosts: their order, and when the memory that was read is returned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from atoll.ir import plan as p
from atoll.ir.lowering import lower
from atoll.ir.program import Program, Route
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun
from atoll.worker.host_network import DataPortNetwork
from tests.ir.machine import cluster, steps_of


class Ready(np.ndarray):  # type: ignore[type-arg]
    """An array that is computed."""

    def is_ready(self) -> bool:
        return True


class Channel:
    """A channel to a host, which another thread may have taken. Notes what is sent while it is not reserved."""

    def __init__(self, is_free: bool = True) -> None:
        self.is_free = is_free
        self.is_reserved = False
        self.sent: list[bool] = []

    def try_reserve(self, nbytes: int) -> bool:
        self.is_reserved = self.is_free
        return self.is_free

    def release(self) -> None:
        assert self.is_reserved
        self.is_reserved = False

    def send_contents(self, session: int, feed: int, contents: Any) -> None:
        self.sent.append(self.is_reserved)


class Port:
    """Notes which host is sent to; what stays here comes into its inbox."""

    def __init__(self) -> None:
        self.hosts: list[int] = []
        self.inbox = self
        self.done: Any = None
        self.channels: dict[int, Channel] = {}

    def to_host_nowait(self, host: int) -> Any:
        return self.channels.get(host)

    def put(self, session: int, feed: int, content: Any, done: Any) -> None:
        self.hosts.append(0)
        self.done = done

    def to_host(self, host: int) -> Any:
        return SimpleNamespace(send_contents=lambda session, feed, contents: self.hosts.append(host))


def sent(rows: int, places: int = 0) -> tuple[Port, DispatchUnit, list[str]]:
    """A third of so many rows of 1 KiB, or of `places` in an order of them, are sent to each of three hosts, of which
    the first is their own.
    """
    array = ArraySpec("uint8", (rows, 1024), Sharding((0,)))
    order = ArraySpec("int32", (1, places), Sharding((0,)))
    sizes = ArraySpec("int32", (1, 3), Sharding((0,)))
    pairs = [
        ArraySpec(dtype, shape, Sharding((device,)))
        for device in range(3)
        for dtype, shape in (("uint8", (max(rows, places), 1024)), ("int32", (1, 2)))
    ]
    arguments = (array, sizes, order) if places else (array, sizes)
    count = len(arguments)
    node = Route(tuple(range(count)), tuple(pairs), 1)
    program = Program("f", arguments, (node,), tuple(range(count, count + 6)))
    (step,) = [s for s in steps_of(lower(program, cluster(3, 1, 1), {}).plans[0]) if isinstance(s, p.SendRows)]
    port, released = Port(), []
    backend: Any = SimpleNamespace(shards=lambda array: [array])
    unit = DispatchUnit(PlanRun(m.Run(7, 1, 1, (), (), ()), p.Plan("f", (), (), ())), 0, 1, 7, 0)
    taken = (places or rows) // 3
    given: Any = [
        each.view(Ready)
        for each in (np.zeros(array.shape, np.uint8), np.full((1, 3), taken, np.int32), np.zeros(order.shape, np.int32))
    ]
    DataPortNetwork(backend, port, 0).send_rows(step, unit, given[:count], lambda: released.append("released"))
    return port, unit, released


def test_what_goes_to_other_hosts_is_sent_before_what_stays() -> None:
    # Messages that may be large, and wait for memory, use separate threads.
    for rows, places, reads in ((9, 0, 1), (3072, 0, 3), (9, 200, 1), (200, 600, 3)):
        port, unit, _ = sent(rows, places)
        assert len(unit.reads) == reads
        for each in unit.reads:
            each.read()
        assert port.hosts == [1, 2, 0]


def test_rows_are_given_back_once_all_have_been_read_also_by_this_host() -> None:
    port, unit, released = sent(3072)
    for each in unit.reads:
        each.read()
    assert not released
    port.done()
    assert released == ["released"]
    (moved,) = unit.take_rows()
    assert moved == m.RowsMoved(7, 3 * (12 + 1024 * 1024))
    assert not unit.take_rows()


class Emptied(list[tuple[int, int]]):
    """Rows of which another thread takes the last after this one has seen that some are there."""

    def __bool__(self) -> bool:
        return True


def test_rows_that_another_thread_reports_meanwhile_fail_no_read() -> None:
    _, unit, _ = sent(9)
    unit.rows = Emptied()
    assert unit.take_rows() == ()


def test_small_rows_are_sent_at_once_on_channels_that_are_reserved_until_then() -> None:
    port, unit, _ = sent(9)
    (read,) = unit.reads
    assert not read.read_nowait(), "no channel is open"
    port.channels = {1: Channel(), 2: Channel(is_free=False)}
    assert not read.read_nowait(), "another thread sends to host 2"
    assert port.hosts == [] == port.channels[1].sent
    assert not port.channels[1].is_reserved, "a channel is not held while another one is not free"
    port.channels[2].is_free = True
    assert read.read_nowait()
    assert [each.sent for each in port.channels.values()] == [[True], [True]]
    assert not any(each.is_reserved for each in port.channels.values())
    assert port.hosts == [0]
