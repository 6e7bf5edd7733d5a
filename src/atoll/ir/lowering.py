"""Lowering: a location-free program becomes one plan per host.

Pure: program and placement in, plans out. It makes every transfer explicit (`Send` and `Receive` with the exact boxes
that each destination shard needs, each once) and keeps what stays on one host inside that host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field

from atoll.errors import invalid, unimplemented
from atoll.ir import plan as p
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostToDevice,
    Program,
    Rearrange,
    Transfer,
    check,
    output_count,
)
from atoll.ir.types import (
    DTYPE_BITS,
    ArraySpec,
    Box,
    Opaque,
    Replicated,
    Shape,
    Sharding,
    nbytes,
    shard_boxes,
    shard_shape,
)


@dataclass(frozen=True)
class Seat:
    """Where a virtual device sits: an island, one of the cluster's hosts, and an ordinal among its devices."""

    island: int
    host: int
    ordinal: int


Placement = AbstractMapping[int, Seat]
Place = tuple[int, int]  # a host and an ordinal
Needs = tuple[tuple[Place, int], ...]  # bytes on devices


@dataclass(frozen=True)
class LoweredGang:
    """What one node does on one island, as one gang on these hosts."""

    node: int
    island: int
    hosts: tuple[int, ...]
    function: str = ""  # that it runs; "" where it runs none
    together: bool = False  # its hosts compute something together: on none of them it ends without the others
    makes: tuple[int, ...] = ()  # values, or their parts here
    drops: tuple[int, ...] = ()  # values between nodes that no later gang of this island uses


@dataclass(frozen=True)
class LoweredValue:
    """Where a value is, and the memory that it takes there. Views take none of their own."""

    hosts: tuple[int, ...]
    nbytes: int = 0  # over all devices
    needs: Needs = ()
    views: frozenset[int] = frozenset()  # the values whose memory it shares


@dataclass(frozen=True)
class Lowered:
    """A program's gangs, in order, and its plans, by host. `feeds` counts the program's own feeds and, after them,
    those between hosts.

    No two hosts wait for each other: what a leg receives was sent by a leg of an earlier gang, or by the same gang on
    hosts that send before they receive.
    """

    gangs: tuple[LoweredGang, ...]
    plans: dict[int, p.Plan]
    values: tuple[LoweredValue, ...]  # arguments first
    results: tuple[int, ...]  # values
    donated: frozenset[int]  # positions of arguments whose buffers the program consumes
    feeds: int


def lower(program: Program, placement: Placement, functions: AbstractMapping[int, str]) -> Lowered:
    """Cuts `program` into gangs and plans. `functions` gives the workers' names of the session's compiled functions."""
    check(program)
    return _Lowering(program, placement, functions).run()


@dataclass
class _Work:
    """What a node does on one host."""

    steps: list[p.Step] = field(default_factory=list)
    uses: set[int] = field(default_factory=set)
    defines: set[int] = field(default_factory=set)
    awaited: list[int] = field(default_factory=list)


class _Lowering:
    def __init__(
        self, program: Program, placement: Placement, functions: AbstractMapping[int, str]
    ) -> None:
        self.program = program
        self.placement = placement
        self.functions = functions
        self.island_of = {seat.host: seat.island for seat in placement.values()}
        self.nodes: list[dict[int, _Work]] = []  # by host
        self.feeds = program.feeds
        self.specs: list[ArraySpec | None] = list(program.arguments)
        self.holders: list[tuple[int, ...]] = [self._hosts_of(s.sharding) for s in program.arguments]
        self.donated: set[int] = set()
        self.views: dict[int, frozenset[int]] = {}
        self.fetched_from = -1  # the host of the last DeviceToHost

    def run(self) -> Lowered:
        for node in self.program.nodes:
            first = len(self.specs)
            self.nodes.append({})
            match node:
                case Call():
                    self._call(node, first)
                case HostToDevice():
                    self._put(node, first)
                case DeviceToHost():
                    self._get(node, first)
                case Transfer():
                    self._transfer(node, first)
                case Rearrange():
                    self._rearrange(node, first)
            self.specs.extend(node.outputs)
            self.holders.extend(self._hosts_of(s.sharding) for s in node.outputs)
            if len(self.specs) < first + output_count(node):  # the node's completion
                self.specs.append(None)
                self.holders.append(
                    self._hosts_of(Sharding(node.devices)) if isinstance(node, Call) else (self.fetched_from,)
                )
        gangs = self._gangs()
        return Lowered(
            tuple(gangs),
            {host: self._plan(host, gangs) for host in sorted({host for gang in gangs for host in gang.hosts})},
            tuple(
                LoweredValue(holders, nbytes(spec), () if value in self.views else self._needs(value), views)
                for value, (spec, holders) in enumerate(zip(self.specs, self.holders, strict=True))
                for views in [self.views.get(value, frozenset())]
            ),
            self.program.results,
            frozenset(self.donated),
            self.feeds,
        )

    def _needs(self, value: int) -> Needs:
        """The bytes of a value on each of its devices."""
        spec = self.specs[value]
        if spec is None or isinstance(spec.sharding.tiling, Opaque):
            return ()
        sums: dict[Place, int] = {}
        for position, device in enumerate(spec.sharding.devices):
            seat = self._seat(device)
            elements = math.prod(shard_shape(spec.sharding, spec.shape, position))
            place = (seat.host, seat.ordinal)
            sums[place] = sums.get(place, 0) + elements * DTYPE_BITS[spec.dtype] // 8
        return tuple(sums.items())

    def _gangs(self) -> list[LoweredGang]:
        """One for each node and island. What a gang drops is found from behind."""
        kept = {*range(len(self.program.arguments)), *self.program.results}
        needed: dict[int, set[int]] = {}  # by island
        gangs = []
        for number in reversed(range(len(self.nodes))):
            node, works = self.program.nodes[number], self.nodes[number]
            islands: dict[int, list[int]] = {}
            for host in sorted(works):
                islands.setdefault(self.island_of[host], []).append(host)
            for island, hosts in sorted(islands.items(), reverse=True):
                later = needed.setdefault(island, set(kept))
                touched = set[int]().union(*(works[host].uses | works[host].defines for host in hosts))
                gangs.append(
                    LoweredGang(
                        number,
                        island,
                        tuple(hosts),
                        self.functions[node.function] if isinstance(node, Call) else "",
                        isinstance(node, Call) and len(hosts) > 1,
                        tuple(sorted(set[int]().union(*(works[host].defines for host in hosts)))),
                        tuple(sorted(touched - later)),
                    )
                )
                later |= touched
        gangs.reverse()
        return gangs

    def _plan(self, host: int, gangs: list[LoweredGang]) -> p.Plan:
        """The host's legs, one for each gang that it is part of."""
        legs: list[p.Leg] = []
        later: set[int] = set()
        used: set[int] = set()
        defined: set[int] = set()
        results = set(self.program.results)
        for number, gang in reversed(list(enumerate(gangs))):
            if host not in gang.hosts:
                continue
            work = self.nodes[gang.node][host]
            touched = work.uses | work.defines
            legs.append(
                p.Leg(
                    number,
                    tuple(work.steps),
                    tuple(sorted(work.defines & results)),
                    tuple(sorted(touched - later)),
                    tuple(work.awaited),
                    gang.together,
                )
            )
            later |= touched
            used |= work.uses
            defined |= work.defines
        return p.Plan(
            self.program.name, tuple(sorted(used - defined)), tuple(reversed(legs)), tuple(sorted(defined & results))
        )

    # ---- nodes

    def _call(self, node: Call, first: int) -> None:
        islands = {self._seat(device).island for device in node.devices}
        if len(islands) != 1:
            raise invalid(
                f"{self.program.name!r} runs one compiled function over devices of {len(islands)} islands; "
                "a mesh must lie inside one island (jax.Device.slice_index tells which), and arrays move "
                "between islands with jax.device_put"
            )
        if node.function not in self.functions:
            raise invalid(f"{self.program.name!r} calls function {node.function}, which is not registered")
        step = p.Execute(
            self.functions[node.function], node.inputs, first, node.donated, node.preserved, node.completion
        )
        defines = tuple(range(first, first + output_count(node)))
        hosts = self._hosts_of(Sharding(node.devices))
        for host in hosts:
            self._add(host, step, node.inputs, defines)
        self._consume(node.inputs[i] for i in node.donated)

    def _put(self, node: HostToDevice, first: int) -> None:
        spec = node.outputs[0]
        for host in self._hosts_of(spec.sharding):
            local = self._local(spec, host)
            pieces: list[p.HostPiece] = []
            for buffer in node.buffers:
                whole = buffer.positions is None
                boxes = shard_boxes(spec.sharding, spec.shape) if whole else ()
                for shard, position in enumerate(local.positions):
                    if whole:
                        box = boxes[position]
                        full = all(start == 0 and stop == n for (start, stop), n in zip(box, spec.shape, strict=True))
                        part = None if full else box
                    elif position in (buffer.positions or ()):
                        part = None
                    else:
                        continue
                    pieces.append(p.HostPiece(shard, buffer.feed, buffer.shape, buffer.strides, part))
            if sorted(piece.shard for piece in pieces) != list(range(len(local.devices))):
                raise invalid(f"{self.program.name!r}: the host buffers do not fill each shard exactly once")
            pieces.sort(key=lambda piece: piece.shard)
            feeds = tuple(piece.feed for piece in pieces)
            self._add(host, p.Put(first, local, tuple(pieces)), (), (first,), feeds)

    def _get(self, node: DeviceToHost, first: int) -> None:
        (value,) = node.inputs
        spec = self._spec(value)
        if isinstance(spec.sharding.tiling, Replicated):
            seat = self._seat(spec.sharding.devices[0])
            whole = tuple((0, size) for size in spec.shape)
            shard = self._local(spec, seat.host).positions.index(0)
            step = p.Get(value, first, node.feed, spec.shape, node.strides, (shard,), (whole,))
            self._add(seat.host, step, (value,), (first,))
            self.fetched_from = seat.host
            return
        hosts = self._hosts_of(spec.sharding)
        if len(hosts) != 1:
            raise unimplemented("an array over several hosts is fetched shard by shard (jax.device_get does so)")
        boxes = shard_boxes(spec.sharding, spec.shape)
        first_of = {box: position for position, box in reversed(list(enumerate(boxes)))}
        local = self._local(spec, hosts[0])
        shards = tuple(local.positions.index(position) for position in first_of.values())
        step = p.Get(value, first, node.feed, spec.shape, node.strides, shards, tuple(first_of))
        self._add(hosts[0], step, (value,), (first,))
        self.fetched_from = hosts[0]

    def _transfer(self, node: Transfer, first: int) -> None:
        kept: list[tuple[int, int, ArraySpec]] = []
        for index, (value, target) in enumerate(zip(node.inputs, node.outputs, strict=True)):
            source = self._spec(value)
            if source.shape != target.shape or source.dtype != target.dtype:
                raise invalid(f"a transfer cannot change {source.dtype}{source.shape} to {target.dtype}{target.shape}")
            before, after = len(source.sharding.devices), len(target.sharding.devices)
            if not node.reshard and before != after:
                raise invalid(f"an array on {before} devices cannot be copied shard by shard to {after}")
            if not node.reshard and self._stays(source.sharding, target.sharding):
                kept.append((value, first + index, target))
            else:
                self._send(value, source, first + index, target, node.reshard)
        for host in sorted({h for _, _, target in kept for h in self._hosts_of(target.sharding)}):
            here = [(v, o, t) for v, o, t in kept if host in self._hosts_of(t.sharding)]
            self._add(
                host,
                p.Move(
                    tuple(v for v, _, _ in here),
                    tuple(o for _, o, _ in here),
                    tuple(self._local(t, host) for _, _, t in here),
                    node.donate,
                ),
                tuple(v for v, _, _ in here),
                tuple(o for _, o, _ in here),
            )
        if node.donate:
            self._consume(node.inputs)

    def _stays(self, source: Sharding, target: Sharding) -> bool:
        """True where each shard's new device is on the host of the old one."""
        return all(
            self._seat(a).host == self._seat(b).host
            for a, b in zip(source.devices, target.devices, strict=True)
        )

    def _send(self, value: int, source: ArraySpec, output: int, target: ArraySpec, reshard: bool) -> None:
        sends: dict[int, list[p.SendPiece]] = {}
        receives: dict[int, list[p.ReceivePiece]] = {}
        for position in range(len(target.sharding.devices)):
            seat = self._seat(target.sharding.devices[position])
            local = self._local(target, seat.host)
            shard = local.positions.index(position)
            receives.setdefault(seat.host, [])
            for origin, from_box, to_box in self._parts(source, target, position, reshard):
                holder = self._seat(source.sharding.devices[origin]).host
                from_shard = self._local(source, holder).positions.index(origin)
                feed = self.feeds
                self.feeds += 1
                sends.setdefault(holder, []).append(p.SendPiece(from_shard, from_box, seat.host, feed))
                receives[seat.host].append(p.ReceivePiece(shard, to_box, feed))
        for host, outgoing in sorted(sends.items()):
            self._add(host, p.Send(value, tuple(outgoing)), (value,), ())
        for host, incoming in sorted(receives.items()):
            feeds = tuple(piece.feed for piece in incoming)
            self._add(host, p.Receive(output, self._local(target, host), tuple(incoming)), (), (output,), feeds)

    def _parts(
        self, source: ArraySpec, target: ArraySpec, position: int, reshard: bool
    ) -> list[tuple[int, Box, Box]]:
        """What shard `position` of the target is made of: (source position, box there, box here)."""
        if not reshard:
            shape = shard_shape(source.sharding, source.shape, position)
            whole = tuple((0, size) for size in shape)
            return [(position, whole, whole)]
        wanted = shard_boxes(target.sharding, target.shape)[position]
        parts = []
        seen: dict[Box, list[int]] = {}
        for origin, box in enumerate(shard_boxes(source.sharding, source.shape)):
            seen.setdefault(box, []).append(origin)
        host = self._seat(target.sharding.devices[position]).host
        for box, origins in seen.items():
            common = _intersection(box, wanted)
            if common is None:
                continue
            near = [o for o in origins if self._seat(source.sharding.devices[o]).host == host]
            choices = near or origins  # replicas share the load
            origin = choices[position % len(choices)]
            parts.append((origin, _relative(common, box), _relative(common, wanted)))
        return parts

    def _rearrange(self, node: Rearrange, first: int) -> None:
        sources: list[dict[int, tuple[int, int]]] = [{} for _ in node.outputs]
        for mapping in node.mappings:
            taken = range(*mapping.source)
            given = range(*mapping.target)
            if len(taken) != len(given):
                raise invalid("a mapping takes as many shards as it gives")
            limit = len(self._spec(node.inputs[mapping.input]).sharding.devices)
            for source, target in zip(taken, given, strict=True):
                if not 0 <= source < limit or target in sources[mapping.output]:
                    raise invalid("a mapping names a shard that is not there, or gives one twice")
                sources[mapping.output][target] = (mapping.input, source)
        for index, spec in enumerate(node.outputs):
            if sorted(sources[index]) != list(range(len(spec.sharding.devices))):
                raise invalid("the mappings do not fill each output's shards exactly once")
            for host in self._hosts_of(spec.sharding):
                local = self._local(spec, host)
                takes = []
                for position in local.positions:
                    which, origin = sources[index][position]
                    value = node.inputs[which]
                    held = self._spec(value)
                    if self.placement[held.sharding.devices[origin]] != self._seat(spec.sharding.devices[position]):
                        raise invalid("rearranging shards cannot move them to another device")
                    takes.append(p.Take(which, self._local(held, host).positions.index(origin)))
                inputs = tuple(node.inputs)
                used = tuple(node.inputs[take.input] for take in takes)
                step = p.Select(inputs, first + index, local, tuple(takes), node.bitcast)
                self._add(host, step, used, (first + index,))
            if not node.bitcast:
                self.views[first + index] = frozenset(node.inputs[which] for which, _ in sources[index].values())
        if node.donate:
            self._consume(node.inputs)

    # ---- small things

    def _add(
        self, host: int, step: p.Step, uses: tuple[int, ...], defines: tuple[int, ...], feeds: tuple[int, ...] = ()
    ) -> None:
        """Appends a step to what the node does on the host. Steps that wait for feeds come after all others."""
        work = self.nodes[-1].setdefault(host, _Work())
        waits = isinstance(step, p.Receive)
        place = len(work.steps) if waits else sum(not isinstance(other, p.Receive) for other in work.steps)
        work.steps.insert(place, step)
        work.uses.update(uses)
        work.defines.update(defines)
        work.awaited.extend(feed for feed in feeds if feed not in work.awaited)

    def _consume(self, values: object) -> None:
        self.donated.update(v for v in values if v < len(self.program.arguments))  # type: ignore[attr-defined]

    def _spec(self, value: int) -> ArraySpec:
        spec = self.specs[value]
        if spec is None:
            raise invalid("a call's completion is no array")
        return spec

    def _seat(self, device: int) -> Seat:
        seat = self.placement.get(device)
        if seat is None:
            raise invalid(f"{self.program.name!r} names device {device}, which this session does not have")
        return seat

    def _hosts_of(self, sharding: Sharding) -> tuple[int, ...]:
        return tuple(sorted({self._seat(device).host for device in sharding.devices}))

    def _local(self, spec: ArraySpec, host: int) -> p.LocalArray:
        positions = tuple(
            i for i, device in enumerate(spec.sharding.devices) if self._seat(device).host == host
        )
        shapes: tuple[Shape, ...] = tuple(shard_shape(spec.sharding, spec.shape, i) for i in positions)
        return p.LocalArray(
            spec.dtype,
            spec.shape,
            shapes,
            tuple(self._seat(spec.sharding.devices[i]).ordinal for i in positions),
            positions,
            spec.sharding.memory_kind,
            spec.layout,
        )


def _intersection(a: Box, b: Box) -> Box | None:
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def _relative(box: Box, origin: Box) -> Box:
    return tuple((a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True))
