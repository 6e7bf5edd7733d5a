"""The last step of lowering: it cuts a placed program into gangs, and one plan per host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from atoll.errors import StatusError, invalid
from atoll.ir import plan as p
from atoll.ir.exchange import Exchange
from atoll.ir.geometry import Located, stays
from atoll.ir.node_types import shard_sources
from atoll.ir.place import PlacedProgram
from atoll.ir.plan import Lowered, LoweredGang, LoweredValue
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Node,
    Rearrange,
    Report,
    Route,
    Transfer,
    Unroute,
    consumes,
    output_count,
)
from atoll.ir.row_exchange import RowExchange
from atoll.ir.steps import Steps, collected, freed
from atoll.ir.types import Box, Replicated


def cut(placed: PlacedProgram, functions: Mapping[int, str]) -> Steps[Lowered]:
    """Return the gangs, plans and values of a program. `functions` contains the workers' names of its functions.

    Each node is one gang per island. Transfers and routes become explicit: a send and a receive for each array that
    leaves its host, and one move for all arrays whose shards stay on their hosts. On a host, steps that wait for other
    hosts follow all other steps of their gang. The last segment of a host that uses or defines a value drops it, and so
    does the last gang of an island.

    Raises UNIMPLEMENTED for resharding an array whose tiling does not determine its boxes, and for sending shards
    without a known shape.
    """
    started = _Cut(placed, functions)
    try:
        return (yield from started.steps())
    except StatusError:
        yield from freed(started.nodes)
        raise


class _Work(msgspec.Struct):
    """The part of a node on one host."""

    steps: list[p.Step] = msgspec.field(default_factory=list)
    waiting: list[p.Step] = msgspec.field(default_factory=list)  # steps that wait for other hosts
    uses: set[int] = msgspec.field(default_factory=set)
    defines: set[int] = msgspec.field(default_factory=set)
    awaited: dict[int, None] = msgspec.field(default_factory=dict)

    def add(self, step: p.Step, uses: Iterable[int], defines: Iterable[int], feeds: Iterable[int] = ()) -> None:
        (self.waiting if isinstance(step, p.Receive | p.ReceiveRows) else self.steps).append(step)
        self.uses.update(uses)
        self.defines.update(defines)
        self.awaited.update(dict.fromkeys(feeds))


class _Node(msgspec.Struct):
    """A node of the program, on all of its hosts."""

    function: str = ""
    colocated: bool = False
    works: dict[int, _Work] = msgspec.field(default_factory=dict)  # by host

    def on(self, host: int) -> _Work:
        work = self.works.get(host)
        if work is None:
            work = self.works[host] = _Work()
        return work


class _Cut:
    def __init__(self, placed: PlacedProgram, functions: Mapping[int, str]) -> None:
        self.placed = placed
        self.functions = functions
        self.name = placed.program.name
        self.arguments = len(placed.program.arguments)
        # Per value of the program, its number in the plans. It differs for transfers that move some arrays on their
        # hosts and send others: the moved ones come first.
        self.numbers = list(range(self.arguments))
        self.views: dict[int, frozenset[int]] = {}
        self.donated: set[int] = set()
        self.nodes: list[_Node] = []
        self.host_feeds = 0

    def steps(self) -> Steps[Lowered]:
        program = self.placed.program
        for node in program.nodes:
            first = len(self.numbers)
            outputs = range(first, first + output_count(node))
            self.numbers.extend(outputs)
            self.nodes.append(_Node())
            self._node(node, outputs, self.nodes[-1])
            self.donated.update(value for value in consumes(node) if value < self.arguments)
            yield
        results = tuple((yield from collected(self.numbers[value] for value in program.results)))
        values = [LoweredValue(())] * len(self.numbers)
        for value, number in enumerate(self.numbers):
            values[number] = self._value(value, number)
            yield
        gangs, plans = yield from self._gangs(frozenset(results))
        return Lowered(gangs, plans, tuple(values), results, frozenset(self.donated), self.host_feeds)

    def _value(self, value: int, number: int) -> LoweredValue:
        located = self.placed.values[value]
        if not isinstance(located, Located):
            return LoweredValue(located)
        views = self.views.get(number)
        if views is not None:
            return LoweredValue(located.hosts, located.nbytes, (), views)
        return LoweredValue(located.hosts, located.nbytes, located.memory)

    def _numbers(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple([self.numbers[value] for value in values])

    # ---- nodes

    def _node(self, node: Node, outputs: range, made: _Node) -> None:
        match node:
            case Call():
                self._call(node, outputs, made)
            case HostToDevice():
                self._put(node, outputs, made)
            case DeviceToHost():
                self._get(node, outputs, made)
            case Report():
                (source,), (value,) = self.placed.arrays(node.inputs), self._numbers(node.inputs)
                made.on(source.locations[0].host).add(p.Report(value), (value,), ())
            case Transfer():
                self._transfer(node, outputs, made)
            case Route():
                self._route(node, outputs, made)
            case Unroute():
                self._unroute(node, outputs, made)
            case Rearrange():
                self._rearrange(node, outputs, made)

    def _call(self, node: Call, outputs: range, made: _Node) -> None:
        inputs = self._numbers(node.inputs)
        made.function = self.functions[node.function]
        hosts = self.placed.hosts_of[node.devices]
        if node.stream is not None:
            made.colocated = True
            for host in hosts:
                made.on(host).add(*self._python(node, node.stream, outputs, made.function, host))
            return
        # A plan has a number for the first output also if a call has no results.
        step = p.Execute(made.function, inputs, outputs.start, node.donated, node.preserved, node.completion)
        for host in hosts:
            made.on(host).add(step, inputs, outputs)

    def _python(
        self, node: Call, stream: int, outputs: range, function: str, host: int
    ) -> tuple[p.Python, list[int], list[int]]:
        """Return the step of a host, its inputs and its outputs: those with shards on the host."""
        inputs = enumerate(zip(node.inputs, self.placed.arrays(node.inputs), strict=True))
        arguments = [(i, self.numbers[value]) for i, (value, array) in inputs if host in array.hosts]
        arrays = self.placed.arrays(outputs[: len(node.outputs)])
        given = [(i, outputs[i], array.on(host)) for i, array in enumerate(arrays) if host in array.hosts]
        completion = outputs[-1] if node.completion else -1
        step = p.Python(function, stream, tuple(arguments), tuple(given), completion)
        defines = [value for _, value, _ in given]
        if node.completion:
            defines.append(completion)
        return step, [value for _, value in arguments], defines

    def _put(self, node: HostToDevice, outputs: range, made: _Node) -> None:
        placed = self.placed.arrays(outputs)
        if len(outputs) > 1 and len(node.buffers) == 1:
            hosts = {located.hosts[0] for located in placed}
            if len(hosts) > 1:
                raise invalid(f"arrays of one host buffer must be on one host, but these are on {len(hosts)} hosts")
            (host,), feed = hosts, node.buffers[0].feed
            arrays = tuple(located.on(host) for located in placed)
            made.on(host).add(p.PutAll(tuple(outputs), arrays, feed), (), outputs, [feed])
            return
        buffers: list[list[HostBuffer]] = [[] for _ in outputs]
        for buffer in node.buffers:
            buffers[buffer.output].append(buffer)
        for output, located, own in zip(outputs, placed, buffers, strict=True):
            self._put_one(own, output, located, made)

    def _put_one(self, buffers: Iterable[HostBuffer], output: int, located: Located, made: _Node) -> None:
        pieces: dict[int, list[p.HostPiece]] = {host: [] for host in located.hosts}
        for buffer in buffers:
            whole = buffer.positions is None
            for position in buffer.positions if buffer.positions is not None else range(len(located.locations)):
                box = None
                if whole and any(
                    (start, stop) != (0, n)
                    for (start, stop), n in zip(located.boxes[position], located.spec.shape, strict=True)
                ):
                    box = located.boxes[position]
                if position < len(located.locations):
                    piece = p.HostPiece(located.shard_of[position], buffer.feed, buffer.shape, buffer.strides, box)
                    pieces[located.locations[position].host].append(piece)
        for host, here in pieces.items():
            here.sort(key=lambda piece: piece.shard)
            step = p.Put(output, located.on(host), tuple(here))
            made.on(host).add(step, (), (output,), [piece.feed for piece in here])

    def _get(self, node: DeviceToHost, outputs: range, made: _Node) -> None:
        (completion,) = outputs
        hosts = self.placed.values[completion]
        assert not isinstance(hosts, Located)
        if len(node.inputs) > 1 or node.positions:
            inputs, arrays = self._numbers(node.inputs), self.placed.arrays(node.inputs)
            if node.positions:
                shards = tuple([each.shard_of[i] for each, i in zip(arrays, node.positions, strict=True)])
            else:
                shards = tuple(map(_whole_shard, arrays))
            step = p.GetAll(inputs, completion, node.feed, shards)
            made.on(hosts[0]).add(step, tuple(dict.fromkeys(inputs)), (completion,))
            return
        (located,), (value,) = self.placed.arrays(node.inputs), self._numbers(node.inputs)
        if isinstance(located.spec.sharding.tiling, Replicated):
            boxes: dict[Box, int] = {tuple((0, size) for size in located.spec.shape): 0}
        else:
            boxes = {box: origins[0] for box, origins in located.grid.origins.items()}
        read = p.Get(
            value,
            completion,
            node.feed,
            located.spec.shape,
            node.strides,
            tuple(located.shard_of[position] for position in boxes.values()),
            tuple(boxes),
        )
        made.on(hosts[0]).add(read, (value,), (completion,))

    def _rearrange(self, node: Rearrange, outputs: range, made: _Node) -> None:
        inputs, held = self._numbers(node.inputs), self.placed.arrays(node.inputs)
        all_sources = shard_sources(node, [len(each.locations) for each in held])
        for located, output, sources in zip(self.placed.arrays(outputs), outputs, all_sources, strict=True):
            for host, positions in located.positions.items():
                takes = tuple(
                    p.Take(which, held[which].shard_of[origin]) for which, origin in (sources[i] for i in positions)
                )
                step = p.Select(inputs, output, located.on(host), takes, node.bitcast)
                made.on(host).add(step, [inputs[take.input] for take in takes], (output,))
            if not node.bitcast:
                self.views[output] = frozenset(inputs[which] for which, _ in sources)

    # ---- transfers

    def _transfer(self, node: Transfer, outputs: range, made: _Node) -> None:
        sources, targets = self.placed.arrays(node.inputs), self.placed.arrays(outputs)
        moved: list[int] = []
        sent: list[int] = []
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            (moved if stays(source, target, node.reshard) else sent).append(i)
        for number, i in enumerate([*moved, *sent], start=outputs.start):
            self.numbers[outputs[i]] = number
        exchanges = [self._exchange(sources[i], targets[i], node.reshard) for i in sent]
        for i, exchange in zip(sent, exchanges, strict=True):
            value = self.numbers[node.inputs[i]]
            for host in exchange.senders:
                made.on(host).add(p.Send(value, sources[i].positions[host], exchange), (value,), ())
        for host in sorted({host for i in moved for host in targets[i].hosts}):
            here = [i for i in moved if host in targets[i].positions]
            uses, defines = self._numbers(node.inputs[i] for i in here), self._numbers(outputs[i] for i in here)
            arrays = tuple(targets[i].on(host) for i in here)
            made.on(host).add(p.Move(uses, defines, arrays, node.donate), uses, defines)
        for i, exchange in zip(sent, exchanges, strict=True):
            output = self.numbers[outputs[i]]
            for host in targets[i].hosts:
                made.on(host).add(p.Receive(output, targets[i].on(host), exchange), (), (output,))

    def _exchange(self, source: Located, target: Located, reshard: bool) -> Exchange:
        if reshard:
            _ = source.boxes, target.boxes  # raises an error if a tiling does not determine its boxes
        exchange = Exchange(source.spread, target.spread, reshard, self.host_feeds)
        self.host_feeds += exchange.feeds
        return exchange

    # ---- routes of rows, also within a host, because the destinations of the rows are not known

    def _route(self, node: Route, outputs: range, made: _Node) -> None:
        rows, numbers, *order = self.placed.arrays(node.inputs)
        source, targets = rows.in_order(order[0] if order else None), self.placed.arrays(outputs)
        uses = self._numbers(node.inputs)
        exchanges = [
            self._row_exchange(source, block, node.groups, destination)
            for destination, block in enumerate(targets[::2])
        ]
        for exchange in exchanges:
            _send_rows(made, exchange, rows, numbers, uses)
        for exchange, i in zip(exchanges, range(0, len(outputs), 2), strict=True):
            block, spans = targets[i : i + 2]
            for host in block.hosts:
                step = p.ReceiveRows(outputs[i], block.on(host), outputs[i + 1], spans.on(host), (exchange,))
                made.on(host).add(step, (), outputs[i : i + 2])

    def _unroute(self, node: Unroute, outputs: range, made: _Node) -> None:
        inputs, uses, (rows,) = self.placed.arrays(node.inputs), self._numbers(node.inputs), self.placed.arrays(outputs)
        exchanges = [self._row_exchange(block, rows, node.groups, -1) for block in inputs[::2]]
        for exchange, i in zip(exchanges, range(0, len(inputs), 2), strict=True):
            block, spans = inputs[i : i + 2]
            _send_rows(made, exchange, block, spans, uses[i : i + 2])
        for host in rows.hosts:
            step = p.ReceiveRows(outputs.start, rows.on(host), -1, None, tuple(exchanges))
            made.on(host).add(step, (), outputs)

    def _row_exchange(self, source: Located, target: Located, groups: int, destination: int) -> RowExchange:
        exchange = RowExchange(source.spread, target.spread, groups, destination, self.host_feeds)
        self.host_feeds += exchange.feeds
        return exchange

    # ---- gangs and plans

    def _gangs(self, results: frozenset[int]) -> Steps[tuple[tuple[LoweredGang, ...], dict[int, p.Plan]]]:
        """Make one gang per node and island, and one segment per host. Goes backward, to find what each drops."""
        kept = {*range(self.arguments), *results}
        by_island: dict[int, set[int]] = {}  # the values that later gangs use or define
        by_host: dict[int, set[int]] = {}  # the values that later segments use or define
        segments: dict[int, list[p.Segment]] = {}
        used: dict[int, set[int]] = {}
        defined: dict[int, set[int]] = {}
        gangs: list[LoweredGang] = []
        islands = []
        for node in self.nodes:
            islands.append(self._islands(node))
            yield
        index = sum(map(len, islands))
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            collective = bool(node.function) and len(node.works) > 1 and not node.colocated
            for island, hosts in reversed(islands[number]):
                index -= 1
                gang_touches: set[int] = set()
                makes: set[int] = set()
                for host in hosts:
                    work = node.works[host]
                    touched = work.uses | work.defines
                    later = by_host.setdefault(host, set())
                    segment = p.Segment(
                        index,
                        (*work.steps, *work.waiting),
                        tuple(sorted(work.defines & results)),
                        tuple(sorted(touched - later)),
                        tuple(work.awaited),
                        collective,
                    )
                    segments.setdefault(host, []).append(segment)
                    later |= touched
                    used.setdefault(host, set()).update(work.uses)
                    defined.setdefault(host, set()).update(work.defines)
                    gang_touches |= touched
                    makes |= work.defines
                needed = by_island.get(island)
                if needed is None:
                    needed = by_island[island] = set(kept)
                drops = tuple(sorted(gang_touches - needed))
                needed |= gang_touches
                made = tuple(sorted(makes))
                gangs.append(LoweredGang(number, island, hosts, node.function, collective, made, drops, node.colocated))
                yield
        gangs.reverse()
        plans = {}
        for host in sorted(segments):
            arguments, made = tuple(sorted(used[host] - defined[host])), tuple(sorted(defined[host] & results))
            plans[host] = p.Plan(self.name, arguments, tuple(segments[host][::-1]), made)
            yield
        yield from freed(self.nodes, self.numbers, islands)
        return tuple(gangs), plans

    def _islands(self, node: _Node) -> list[tuple[int, tuple[int, ...]]]:
        hosts: dict[int, list[int]] = {}
        for host in sorted(node.works):
            hosts.setdefault(self.placed.island_of[host], []).append(host)
        return [(island, tuple(hosts[island])) for island in sorted(hosts)]


def _send_rows(node: _Node, exchange: RowExchange, rows: Located, numbers: Located, uses: tuple[int, ...]) -> None:
    """Add the steps that send the rows of an exchange. A host sends rows of the same inputs in one step."""
    for host in exchange.senders:
        here = rows.positions[host]
        first_groups = tuple(numbers.boxes[position][0][0] for position in here)
        work, exchanges = node.on(host), [exchange]
        if work.steps and isinstance(last := work.steps[-1], p.SendRows) and p.uses(last) == uses:
            exchanges = [*last.exchanges, exchange]
            del work.steps[-1]
        work.add(p.SendRows(uses, here, first_groups, tuple(exchanges)), uses, ())


def _whole_shard(located: Located) -> int:
    """Return the local shard that is the whole array, on the host that sends it to the client."""
    if not isinstance(located.spec.sharding.tiling, Replicated) and len(located.spec.sharding.devices) > 1:
        raise invalid("arrays that are read together must be whole on one device")
    return located.shard_of[0]
