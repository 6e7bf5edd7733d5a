"""Rows on their way to other hosts: in which order they are sent, and when what is read is given back."""

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


class Port:
    """Notes which host is sent to; what stays here comes into its inbox."""

    def __init__(self) -> None:
        self.hosts: list[int] = []
        self.inbox = self
        self.done: Any = None

    def put(self, session: int, feed: int, content: Any, done: Any) -> None:
        self.hosts.append(0)
        self.done = done

    def to_host(self, host: int) -> Any:
        return SimpleNamespace(send_contents=lambda session, feed, contents: self.hosts.append(host))


def sent(rows: int) -> tuple[Port, DispatchUnit, list[str]]:
    """Half of so many rows of 1 KiB are sent to each of three hosts, of which the first is their own."""
    array = ArraySpec("uint8", (rows, 1024), Sharding((0,)))
    sizes = ArraySpec("int32", (1, 3), Sharding((0,)))
    pairs = [
        ArraySpec(dtype, shape, Sharding((device,)))
        for device in range(3)
        for dtype, shape in (("uint8", (rows, 1024)), ("int32", (1, 2)))
    ]
    program = Program("f", (array, sizes), (Route((0, 1), tuple(pairs), 1),), tuple(range(2, 8)))
    (step,) = [s for s in steps_of(lower(program, cluster(3, 1, 1), {}).plans[0]) if isinstance(s, p.SendRows)]
    port, released = Port(), []
    backend: Any = SimpleNamespace(shards=lambda array: [array])
    unit = DispatchUnit(PlanRun(m.Run(7, 1, 1, (), (), ()), p.Plan("f", (), (), ())), 0, 1, 7, 0)
    given: Any = np.zeros(array.shape, np.uint8), np.full((1, 3), rows // 3, np.int32)
    DataPortNetwork(backend, port, 0).send_rows(step, unit, given, lambda: released.append("released"))
    return port, unit, released


def test_what_goes_to_other_hosts_is_sent_before_what_stays() -> None:
    for rows, reads in ((9, 1), (3072, 3)):  # large messages, which may wait for room, on threads of their own
        port, unit, _ = sent(rows)
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
