"""A machine of NumPy arrays that runs plans like workers, with small clusters and arrays for tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from atoll.cluster.locations import DeviceLocation
from atoll.host_services.row_messages import packed, unpacked
from atoll.ir import plan as p
from atoll.ir.plan import Lowered
from atoll.ir.types import ArraySpec, Sharding, shard_boxes, shard_shape
from tests.ir.test_types import tilings

Placement = dict[int, DeviceLocation]


def cluster(islands: int, hosts: int, devices: int) -> Placement:
    """Return virtual devices in the order of the physical ones."""
    locations = [
        DeviceLocation(island, island * hosts + host, ordinal)
        for island in range(islands)
        for host in range(hosts)
        for ordinal in range(devices)
    ]
    return dict(enumerate(locations))


def slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


class Machine:
    """Hosts that store NumPy shards and run plans like workers. Feeds are in a dictionary.

    `functions` returns the types of the outputs of compiled functions, whose values `compute` makes. Donated values are
    overwritten, so that later uses are detected.
    """

    def __init__(self, placement: Placement, functions: Mapping[str, tuple[ArraySpec, ...]] | None = None) -> None:
        self.placement = placement
        self.functions = functions or {}
        self.stores: dict[int, dict[int, list[np.ndarray]]] = {s.host: {} for s in placement.values()}
        self.feeds: dict[tuple[int, int], np.ndarray] = {}  # contents from the client
        self.host_feeds: dict[tuple[int, int], np.ndarray] = {}
        self.to_client: dict[int, np.ndarray] = {}
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self.executed: list[tuple[int, p.Execute]] = []

    def load(self, value: int, spec: ArraySpec, shards: list[np.ndarray]) -> None:
        """Give each host its shards, in the order of the device list."""
        for device, shard in zip(spec.sharding.devices, shards, strict=True):
            self.stores[self.placement[device].host].setdefault(value, []).append(shard)

    def shards(self, value: int, spec: ArraySpec) -> list[np.ndarray]:
        """Return all shards of a value, in order. Fail unless each host has exactly its own shards."""
        left = {host: list(store.get(value, [])) for host, store in self.stores.items()}
        found = [left[self.placement[device].host].pop(0) for device in spec.sharding.devices]
        assert not any(left.values())
        return found

    def run(self, lowered: Lowered) -> None:
        """Run the plans of all hosts, continuing each as soon as its feeds have arrived.

        Fail unless all of them end.
        """
        waiting = {host: self._run_plan(host, plan) for host, plan in lowered.plans.items()}
        missing = {host: set(next(run, ())) for host, run in waiting.items()}
        moved = True
        while moved:
            moved = False
            for host, feeds in list(missing.items()):
                if all((host, feed) in self.host_feeds for feed in feeds):
                    moved = bool(feeds) or moved
                    missing[host] = set(next(waiting[host], ()))
                    if not missing[host]:
                        del missing[host]
        assert not missing, "plans wait for feeds that no host sends before them"
        assert self.sent == self.received, "each feed is sent once and used once"
        assert all(count == 1 for count in self.sent.values())
        assert all(0 <= feed < lowered.host_feeds for _, feed in self.sent)

    def _run_plan(self, host: int, plan: p.Plan) -> Iterator[set[int]]:
        """Run a plan, yielding the feeds that the next step waits for."""
        store = self.stores[host]
        values = {value: store[value] for value in plan.arguments}
        for segment in plan.segments:
            for step in segment.steps:
                if isinstance(step, p.Receive | p.ReceiveRows) and step.feeds:
                    yield set(step.feeds)
                self._step(host, step, values, set(segment.awaited))
            store.update((value, values[value]) for value in segment.results)
            for value in segment.drops:
                del values[value]
        assert not values, "each value is dropped once"

    def _step(self, host: int, step: p.Step, values: dict[int, Any], available: set[int]) -> None:
        match step:
            case p.Execute():
                self.executed.append((host, step))
                outputs = self.functions.get(step.function, ())
                for number, spec in enumerate(outputs, start=step.first_output):
                    here = [i for i, d in enumerate(spec.sharding.devices) if self.placement[d].host == host]
                    values[number] = [
                        compute(step.function, spec, i, [values[v][local] for v in step.inputs])
                        for local, i in enumerate(here)
                    ]
                if step.completion:
                    values[step.first_output + len(outputs)] = []
                for position in step.donated:
                    end(values[step.inputs[position]])
            case p.Put():
                shards = [np.zeros(0)] * len(step.array.devices)
                for piece in step.pieces:
                    content = self.feeds[host, piece.feed]
                    assert piece.feed in available
                    shards[piece.shard] = content if piece.box is None else content[slices(piece.box)]
                values[step.output] = shards
            case p.PutAll():
                content, start = self.feeds[host, step.feed], 0
                assert step.feed in available
                for output, array in zip(step.outputs, step.arrays, strict=True):
                    stop = start + math.prod(array.shape)
                    values[output] = [content[start:stop].reshape(array.shape)]
                    start = stop
            case p.Get():
                whole = np.full(step.shape, -1)
                for shard, box in zip(step.shards, step.boxes, strict=True):
                    whole[slices(box)] = values[step.input][shard]
                self.to_client[step.feed] = whole
                values[step.completion] = []
            case p.GetAll():
                found = [values[value][shard] for value, shard in zip(step.inputs, step.shards, strict=True)]
                self.to_client[step.feed] = np.concatenate([each.reshape(-1) for each in found])
                values[step.completion] = []
            case p.Move():
                for source, output in zip(step.inputs, step.outputs, strict=True):
                    values[output] = [shard.copy() for shard in values[source]]
                    if step.donate:
                        end(values[source])
            case p.Send():
                for piece in step.pieces:
                    shard = values[step.input][piece.shard]
                    assert all(0 <= a <= b <= n for (a, b), n in zip(piece.box, shard.shape, strict=True))
                    assert (piece.host, piece.feed) not in self.host_feeds
                    self.host_feeds[piece.host, piece.feed] = shard[slices(piece.box)].copy()
                    self.sent[piece.host, piece.feed] += 1
            case p.Receive():
                shards = [np.full(shape, -1) for shape in step.array.shard_shapes]
                covered = [np.zeros(shape, int) for shape in step.array.shard_shapes]
                expected = step.exchange.feeds_to(step.array.positions)
                for piece in step.pieces:
                    assert any(piece.feed in range(first, first + count) for first, count in expected)
                    shape = shards[piece.shard].shape
                    assert all(0 <= a <= b <= n for (a, b), n in zip(piece.box, shape, strict=True))
                    shards[piece.shard][slices(piece.box)] = self.host_feeds[host, piece.feed]
                    covered[piece.shard][slices(piece.box)] += 1
                    self.received[host, piece.feed] += 1
                assert all((each == 1).all() for each in covered), "each element comes once"
                values[step.output] = shards
            case p.SendRows():
                for exchange, to, feed in step.messages:
                    message = packed(step, exchange, to, [values[value] for value in step.inputs])
                    assert (to, feed) not in self.host_feeds
                    self.host_feeds[to, feed] = np.frombuffer(b"".join(message.views()), np.uint8)
                    self.sent[to, feed] += 1
            case p.ReceiveRows():
                expected = step.may_get()
                for feed in step.feeds:
                    assert any(feed in range(first, first + count) for first, count in expected)
                    self.received[host, feed] += 1
                shards, spans, _ = unpacked(step, [self.host_feeds[host, feed] for feed in step.feeds], used_memory)
                values[step.output] = shards
                if step.spans >= 0:
                    values[step.spans] = spans
            case p.Select():
                values[step.output] = [values[step.inputs[t.input]][t.shard] for t in step.takes]


def used_memory(nbytes: int, written: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return memory with arbitrary contents, like `ReceiveBufferPool.take_zeros`."""
    content = np.zeros(nbytes, np.uint8)
    for start, stop in written:
        assert 0 <= start <= stop <= nbytes
        content[start:stop] = 0xA5
    return content


def compute(function: str, spec: ArraySpec, position: int, inputs: list[np.ndarray]) -> np.ndarray:
    """Return outputs that depend on each position's shards."""
    number = sum(ord(letter) for letter in function) + 31 * position
    number += sum(
        (i + 2) * int((shard * (1 + np.arange(shard.size)).reshape(shard.shape)).sum() % 9973)
        for i, shard in enumerate(inputs)
    )
    shape = shard_shape(spec.sharding, spec.shape, position)
    return number % 9973 + np.arange(math.prod(shape)).reshape(shape)


def end(shards: list[np.ndarray]) -> None:
    for shard in shards:
        shard[...] = -999


def steps_of(plan: p.Plan) -> list[p.Step]:
    return [step for segment in plan.segments for step in segment.steps]


def contents(spec: ArraySpec, array: np.ndarray) -> list[np.ndarray]:
    return [array[slices(box)] for box in shard_boxes(spec.sharding, spec.shape)]


def counting(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Generate a small cluster whose virtual devices are mapped to its physical ones in any order."""
    locations = cluster(draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4)))
    return dict(zip(locations, draw(st.permutations(list(locations.values()))), strict=True))


@st.composite
def specs(draw: st.DrawFn, placement: Placement, shape: tuple[int, ...]) -> ArraySpec:
    chosen = draw(st.permutations(sorted(placement)))
    devices = tuple(chosen[: draw(st.integers(1, min(8, len(chosen))))])
    return ArraySpec("int64", shape, Sharding(devices, draw(tilings(len(devices), len(shape)))))


# These shapes also cause empty shards (a dimension of 0, or more tiles than rows).
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
