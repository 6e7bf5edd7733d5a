"""Arrays that are sent together: in how many messages, when one is not computed yet, and when one fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.errors import StatusError
from atoll.ir import plan as p
from atoll.ir.lowering import lower
from atoll.ir.program import Program, Transfer
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.transfers.piece_contents import Grouped
from atoll.transfers.transfer_engine import Contents
from atoll.worker import grouped_sends
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun
from atoll.worker.grouped_sends import SMALL_BYTES
from atoll.worker.host_network import DataPortNetwork
from atoll.worker.plan_executor import received_together
from tests.ir.machine import cluster, steps_of

RUN = m.Run(7, 5, 1, (), (), (), host_feeds=1 << 48)


class Array:
    """An array on two devices of one host, which may not be computed yet."""

    def __init__(self, elements: int, log: list[str], name: str = "a", is_ready: bool = True) -> None:
        self.shards = [Shard(self, np.full(elements // 2, i, np.uint8)) for i in range(2)]
        self.nbytes = elements
        self.name, self.log, self.ready, self.error = name, log, is_ready, ""

    def is_ready(self) -> bool:
        return self.ready

    def released(self) -> None:
        self.log.append(f"released {self.name}")


class Shard:
    """A shard whose contents are read as those of a device are."""

    def __init__(self, array: Array, content: np.ndarray) -> None:
        self._array, self._content = array, content
        self.dtype, self.shape = content.dtype, content.shape

    def block_until_ready(self) -> None:
        self._array.log.append(f"waited for {self._array.name}")

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        if self._array.error:
            raise RuntimeError(self._array.error)
        if not self._array.ready:
            self.block_until_ready()
        return self._content


class Channel:
    """A channel that notes what is sent, and whether it was reserved for so many bytes."""

    def __init__(self, log: list[str], is_free: bool = True) -> None:
        self._log, self.is_free = log, is_free
        self.sent: list[tuple[int, Contents]] = []

    def try_reserve(self, nbytes: int) -> bool:
        self._log.append(f"reserved {nbytes}")
        return self.is_free

    def release(self) -> None:
        self._log.append("released")

    def send_contents(self, session: int, feed: int, contents: Contents) -> None:
        self._log.append(f"sent {len(contents.group) or 1}")
        self.sent.append((feed, contents))


class Host:
    """A host that sends arrays from its two devices to those of another one, in a plan with a step per array."""

    def __init__(self, elements: Sequence[int]) -> None:
        self.log: list[str] = []
        self.channel = Channel(self.log)
        port: Any = SimpleNamespace(
            inbox=None, to_host=lambda host: self.channel, to_host_nowait=lambda host: self.channel
        )
        backend: Any = SimpleNamespace(shards=lambda array: array.shards)
        self.network = DataPortNetwork(backend, port, 0)
        source, target = (Sharding(devices, Tiled((2,), (0, 1))) for devices in ((0, 1), (2, 3)))
        specs = [tuple(ArraySpec("uint8", (each,), sharding) for each in elements) for sharding in (source, target)]
        count = len(elements)
        program = Program("f", specs[0], (Transfer(tuple(range(count)), specs[1]),), tuple(range(count, 2 * count)))
        lowered = lower(program, cluster(2, 1, 2), {})
        self.steps = [step for step in steps_of(lowered.plans[0]) if isinstance(step, p.Send)]
        self.receives = steps_of(lowered.plans[1])
        self.unit = DispatchUnit(PlanRun(RUN, p.Plan("f", (), (), ())), 0, 1, 7, 0)
        self.arrays = [Array(each, self.log, str(i)) for i, each in enumerate(elements)]

    def send(self) -> None:
        for step, array in zip(self.steps, self.arrays, strict=True):
            self.network.send(step, self.unit, array, array.released)  # type: ignore[arg-type]

    def read(self) -> None:
        for each in self.unit.reads:
            each.read()

    @property
    def sizes(self) -> list[int]:
        """The number of feeds in each message."""
        return [len(contents.group) or 1 for _, contents in self.channel.sent]

    def feeds(self) -> Mapping[int, bytes]:
        """Return what was sent, by feed."""
        found = {}
        for feed, contents in self.channel.sent:
            whole, start = b"".join(contents.views()), 0
            for number, nbytes in contents.group or ((feed, contents.nbytes),):
                found[number] = whole[start : start + nbytes]
                start += -(-nbytes // 64) * 64
        return found


def test_small_and_medium_arrays_go_in_one_message_per_host_and_large_ones_by_themselves() -> None:
    large = 2 * grouped_sends.MAX_GROUPED_PIECE
    host = Host([100, 20_000, large + 2, 8, 8])
    host.send()
    assert len(host.unit.reads) == 3
    host.read()
    assert host.sizes == [4, 1, 1, 4]
    expected = {RUN.host_feeds + piece.feed: piece for step in host.steps for piece in step.pieces}
    assert host.feeds().keys() == expected.keys()
    for feed, sent in host.feeds().items():
        assert set(sent) == {expected[feed].shard}


def test_a_message_is_bounded_in_bytes_and_in_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_sends, "GROUP_BYTES", 1000)
    monkeypatch.setattr(grouped_sends, "GROUP_PIECES", 8)
    host = Host([400, 400, 400, 1200, *[2] * 7])
    host.send()
    host.read()
    assert host.sizes == [4, 2, 1, 1, 8, 6]
    assert all(contents.nbytes <= 1000 for _, contents in host.channel.sent)


def test_an_array_that_is_not_computed_does_not_delay_those_before_it() -> None:
    host = Host([10, 10, 10])
    host.arrays[1].ready = False
    host.send()
    host.read()
    assert host.sizes == [2, 4]
    first = host.log.index("sent 2")
    assert host.log.index("released 0") < host.log.index("waited for 1")
    assert first < host.log.index("waited for 1") < host.log.index("sent 4")


def test_an_array_that_failed_does_not_keep_others_from_being_sent() -> None:
    host = Host([10, 10, 10])
    host.arrays[1].error = "it was divided by zero"
    host.send()
    with pytest.raises(RuntimeError, match="divided by zero"):
        host.read()
    assert host.sizes == [4]
    assert sorted(each for each in host.log if "released" in each) == ["released 0", "released 1", "released 2"]


def test_arrays_are_released_after_they_were_sent_also_if_the_host_cannot_be_reached() -> None:
    host = Host([10, 10])

    def fail(session: int, feed: int, contents: Contents) -> None:
        assert not any("released" in each for each in host.log)
        raise OSError("it is gone")

    host.channel.send_contents = fail  # type: ignore[method-assign]
    host.send()
    with pytest.raises(Exception, match="cannot reach host 1"):
        host.read()
    assert sorted(host.log) == ["released 0", "released 1"]


def test_contents_that_could_not_be_sent_are_freed_without_a_collection() -> None:
    host = Host([10, 10])

    def fail(session: int, feed: int, contents: Contents) -> None:
        raise OSError("it is gone")

    host.channel.send_contents = fail  # type: ignore[method-assign]
    host.send()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(StatusError):
            host.read()
        assert [each for each in gc.get_objects() if isinstance(each, Grouped)] == []
    finally:
        gc.enable()


def test_a_few_small_arrays_are_sent_at_once_on_a_reserved_channel() -> None:
    host = Host([10, 20])
    host.send()
    (read,) = host.unit.reads
    host.arrays[1].ready = False
    assert not read.read_nowait()
    host.arrays[1].ready = True
    host.channel.is_free = False
    assert not read.read_nowait()
    host.channel.is_free = True
    assert read.read_nowait()
    assert host.log == ["reserved 414", "reserved 414", "sent 4", "released 1", "released 0", "released"]
    many = Host([SMALL_BYTES // 2] * 3)
    many.send()
    (read,) = many.unit.reads
    assert not read.read_nowait()


def test_pieces_for_this_host_need_no_channel() -> None:
    host, kept = Host([10, 20]), list[tuple[int, bytes]]()
    inbox: Any = SimpleNamespace(put=lambda session, feed, content: kept.append((feed, bytes(content))))
    port: Any = SimpleNamespace(inbox=inbox, to_host_nowait=lambda number: None)
    backend: Any = SimpleNamespace(shards=lambda array: array.shards)
    host.network = DataPortNetwork(backend, port, 1)
    host.send()
    (read,) = host.unit.reads
    assert read.read_nowait()
    assert [content for _, content in kept] == [bytes(5), b"\1" * 5, bytes(10), b"\1" * 10]


def test_groups_of_a_unit_that_was_started_take_no_more_arrays() -> None:
    host = Host([10, 10])
    host.network.send(host.steps[0], host.unit, host.arrays[0], host.arrays[0].released)  # type: ignore[arg-type]
    started, host.unit.reads = host.unit.reads, []
    host.network.send(host.steps[1], host.unit, host.arrays[1], host.arrays[1].released)  # type: ignore[arg-type]
    assert len(started) == len(host.unit.reads) == 1
    assert started[0].group is not host.unit.reads[0].group


def test_small_arrays_are_awaited_together_and_large_ones_by_themselves() -> None:
    host = Host([1000, 1000, 20 << 20, 1000, 6 << 20, 4 << 20])
    assert [len(received_together(host.receives, first)) for first in range(6)] == [2, 1, 1, 2, 1, 1]


def test_contents_of_one_feed_are_not_a_group() -> None:
    host = Host([10])
    host.steps = host.steps[:1]
    host.send()
    host.read()
    ((_, contents),) = host.channel.sent
    assert isinstance(contents, Grouped)  # two shards
