"""The last step of lowering: it cuts a placed program with explicit transfers into gangs, and one plan per host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from atoll.errors import invalid
from atoll.ir import plan as p
from atoll.ir.dialect.attributes import PlacedCompletionType, PlacedType
from atoll.ir.dialect.ops import (
    CallOp,
    GetOp,
    MoveOp,
    Node,
    ProgramOp,
    PutOp,
    RearrangeOp,
    ReceiveOp,
    ReceiveRowsOp,
    ReportOp,
    SendOp,
    SendRowsOp,
)
from atoll.ir.exchange import Exchange
from atoll.ir.geometry import Located
from atoll.ir.plan import Lowered, LoweredGang, LoweredValue
from atoll.ir.row_exchange import RowExchange
from atoll.ir.steps import Steps, collected, finish, freed
from atoll.ir.types import Box, Replicated


def cut(program: ProgramOp) -> Lowered:
    """Run all steps of `cut_in_steps`."""
    return finish(cut_in_steps(program))


def cut_in_steps(program: ProgramOp) -> Steps[Lowered]:
    """Return the gangs, plans and values of a program.

    Input: programs after `PlacePass` and `ExplicitTransfersPass`; raises INVALID_ARGUMENT for others. Guarantees: each
    node is one gang per island, and the ops of one transfer are one node. On a host, steps that wait for other hosts
    follow all other steps of their gang. The last segment of a host that uses or defines a value drops it, and so does
    the last gang of an island.
    """
    return _Cut(program).steps()


@dataclass
class _Work:
    """The part of a node on one host."""

    steps: list[p.Step] = field(default_factory=list)
    waiting: list[p.Step] = field(default_factory=list)  # steps that wait for other hosts
    uses: set[int] = field(default_factory=set)
    defines: set[int] = field(default_factory=set)
    awaited: dict[int, None] = field(default_factory=dict)

    def add(self, step: p.Step, uses: Iterable[int], defines: Iterable[int], feeds: Iterable[int] = ()) -> None:
        (self.waiting if isinstance(step, p.Receive | p.ReceiveRows) else self.steps).append(step)
        self.uses.update(uses)
        self.defines.update(defines)
        self.awaited.update(dict.fromkeys(feeds))


@dataclass
class _Node:
    islands: dict[int, list[int]]  # its hosts, by island
    function: str = ""
    colocated: bool = False
    works: dict[int, _Work] = field(default_factory=dict)  # by host

    def on(self, host: int) -> _Work:
        work = self.works.get(host)
        if work is None:
            work = self.works[host] = _Work()
        return work


class _Cut:
    def __init__(self, program: ProgramOp) -> None:
        self.program = program
        self.name = program.sym_name.data
        arguments = program.body.block.args
        self.arguments = len(arguments)
        self.numbers: dict[SSAValue, int] = {value: i for i, value in enumerate(arguments)}
        self.views: dict[int, frozenset[int]] = {}
        self.donated: set[int] = set()
        self.island_of: dict[int, int] = {}
        self.nodes: list[_Node] = []
        self.exchanges: dict[int, Exchange | RowExchange] = {}  # by their first feed

    def steps(self) -> Steps[Lowered]:
        transfer = -1
        for op in self.program.each():
            if not isinstance(op, Node):
                raise invalid(f"{self.name!r} cannot be cut: {op.name} is not a node of a program")
            for result in op.results:
                self.numbers[result] = len(self.numbers)
            of = op.of.data if isinstance(op, MoveOp | SendOp | ReceiveOp | SendRowsOp | ReceiveRowsOp) else -1
            if of < 0 or of != transfer:
                self.nodes.append(_Node({}))
            transfer = of
            self._node(op, self.nodes[-1])
            self.donated.update(
                number
                for index, number in enumerate(self._inputs(op))
                if number < self.arguments and op.consumes(index)
            )
            yield
        results = tuple((yield from collected(self.numbers[value] for value in self.program.returned().operands)))
        values = []
        for value, number in self.numbers.items():
            values.append(self._value(value, number))
            yield
        gangs, plans = yield from self._gangs(frozenset(results))
        host_feeds = sum(exchange.feeds for exchange in self.exchanges.values())
        return Lowered(gangs, plans, tuple(values), results, frozenset(self.donated), host_feeds)

    def _value(self, value: SSAValue, number: int) -> LoweredValue:
        if isinstance(value.type, PlacedCompletionType):
            return LoweredValue(value.type.data)
        located = _located(value)
        views = self.views.get(number)
        if views is not None:
            return LoweredValue(located.hosts, located.nbytes, (), views)
        return LoweredValue(located.hosts, located.nbytes, located.memory)

    def _inputs(self, op: Operation) -> tuple[int, ...]:
        return tuple([self.numbers[operand] for operand in op.operands])

    # ---- nodes

    def _node(self, op: Node, node: _Node) -> None:
        match op:
            case CallOp():
                self._call(op, node)
            case PutOp():
                self._put(op, node)
            case GetOp():
                self._get(op, node)
            case ReportOp():
                host, (value,) = self._known(op.input).locations[0].host, self._inputs(op)
                node.on(host).add(p.Report(value), (value,), ())
            case MoveOp():
                self._move(op, node)
            case SendOp():
                self._send(op, node)
            case ReceiveOp():
                self._receive(op, node)
            case SendRowsOp():
                self._send_rows(op, node)
            case ReceiveRowsOp():
                self._receive_rows(op, node)
            case RearrangeOp():
                self._rearrange(op, node)
            case _:
                raise invalid(f"{self.name!r} cannot be cut: {op.name} was not replaced by sends and receives")

    def _call(self, op: CallOp, node: _Node) -> None:
        if op.locations is None:
            raise invalid(f"{self.name!r} cannot be cut: its calls have no device locations")
        inputs = self._inputs(op)
        defines = tuple([self.numbers[result] for result in op.results])
        node.function = op.callee.data
        hosts = dict.fromkeys(location.host for location in op.locations.data)
        self.island_of.update((location.host, location.island) for location in op.locations.data)
        if op.stream is not None:
            node.colocated = True
            for host in hosts:
                node.on(host).add(*self._python(op, op.stream.data, host))
            return
        # A plan has a number for the first output also if a call has no results.
        first = defines[0] if defines else len(self.numbers)
        step = p.Execute(
            node.function,
            inputs,
            first,
            op.donated.data if op.donated is not None else (),
            op.preserved.data if op.preserved is not None else (),
            op.completes,
        )
        for host in hosts:
            node.on(host).add(step, inputs, defines)

    def _python(self, op: CallOp, stream: int, host: int) -> tuple[p.Python, list[int], list[int]]:
        """Return the step of a host, its inputs and its outputs: those with shards on the host."""
        arguments = [(i, self.numbers[each]) for i, each in enumerate(op.operands) if host in _located(each).hosts]
        results = [each for each in op.results if not isinstance(each.type, PlacedCompletionType)]
        given = [(i, each) for i, each in enumerate(results) if host in _located(each).hosts]
        step = p.Python(
            op.callee.data,
            stream,
            tuple(arguments),
            tuple((i, self.numbers[each], _located(each).on(host)) for i, each in given),
            self.numbers[op.results[-1]] if op.completes else -1,
        )
        defines = [self.numbers[each] for _, each in given]
        if op.completes:
            defines.append(step.completion)
        return step, [value for _, value in arguments], defines

    def _put(self, op: PutOp, node: _Node) -> None:
        located, (output,) = self._known(op.value), self._outputs(op)
        pieces: dict[int, list[p.HostPiece]] = {host: [] for host in located.hosts}
        for buffer in op.buffers.data:
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
            node.on(host).add(step, (), (output,), [piece.feed for piece in here])

    def _get(self, op: GetOp, node: _Node) -> None:
        located, (value,), (completion,) = self._known(op.input), self._inputs(op), self._outputs(op)
        assert isinstance(op.completion.type, PlacedCompletionType)
        (host,) = op.completion.type.data
        if isinstance(located.spec.sharding.tiling, Replicated):
            boxes: dict[Box, int] = {tuple((0, size) for size in located.spec.shape): 0}
        else:
            boxes = {box: origins[0] for box, origins in located.grid.origins.items()}
        step = p.Get(
            value,
            completion,
            op.feed.data,
            located.spec.shape,
            op.strides.data if op.strides is not None else None,
            tuple(located.shard_of[position] for position in boxes.values()),
            tuple(boxes),
        )
        node.on(host).add(step, (value,), (completion,))

    def _move(self, op: MoveOp, node: _Node) -> None:
        inputs, outputs = self._inputs(op), self._outputs(op)
        targets = [self._known(result) for result in op.results]
        for host in sorted({host for target in targets for host in target.hosts}):
            here = [i for i, target in enumerate(targets) if host in target.positions]
            uses, defines = tuple(inputs[i] for i in here), tuple(outputs[i] for i in here)
            arrays = tuple(targets[i].on(host) for i in here)
            node.on(host).add(p.Move(uses, defines, arrays, op.donate is not None), uses, defines)

    def _send(self, op: SendOp, node: _Node) -> None:
        source, (value,) = self._known(op.input), self._inputs(op)
        exchange = self._exchange(source, op.target.data, op)
        for host in exchange.senders:
            node.on(host).add(p.Send(value, source.positions[host], exchange), (value,), ())

    def _receive(self, op: ReceiveOp, node: _Node) -> None:
        target, (output,) = self._known(op.value), self._outputs(op)
        exchange = self._exchange(op.source.data, target, op)
        for host in target.hosts:
            node.on(host).add(p.Receive(output, target.on(host), exchange), (), (output,))

    def _send_rows(self, op: SendRowsOp, node: _Node) -> None:
        rows, numbers = self._known(op.rows), self._known(op.numbers)
        source = rows.in_order(None if op.order is None else self._known(op.order))
        uses = tuple(self.numbers[operand] for operand in op.operands)
        exchange = self._row_exchange(source, op.target.data, op, op.first.data)
        for host in exchange.senders:
            here = rows.positions[host]
            first_groups = tuple(numbers.boxes[position][0][0] for position in here)
            work, exchanges = node.on(host), [exchange]
            if work.steps and isinstance(last := work.steps[-1], p.SendRows) and p.uses(last) == uses:
                exchanges = [*last.exchanges, exchange]
                del work.steps[-1]
            work.add(p.SendRows(uses, here, first_groups, tuple(exchanges)), uses, ())

    def _receive_rows(self, op: ReceiveRowsOp, node: _Node) -> None:
        target, outputs = self._known(op.value), self._outputs(op)
        spans = None if op.spans is None else self._known(op.spans)
        exchanges: list[RowExchange] = []
        first = op.first.data
        for source in op.sources:
            exchanges.append(self._row_exchange(source.data, target, op, first))
            first += exchanges[-1].feeds
        for host in target.hosts:
            array, numbers = target.on(host), None if spans is None else spans.on(host)
            step = p.ReceiveRows(outputs[0], array, -1 if spans is None else outputs[1], numbers, tuple(exchanges))
            node.on(host).add(step, (), outputs)

    def _row_exchange(
        self, source: Located, target: Located, op: SendRowsOp | ReceiveRowsOp, first: int
    ) -> RowExchange:
        """Return the exchange, which senders and receivers share."""
        found = self.exchanges.get(first)
        if found is None:
            found = RowExchange(source.spread, target.spread, op.groups.data, op.destination.data, first)
            self.exchanges[first] = found
        assert isinstance(found, RowExchange)
        return found

    def _exchange(self, source: Located, target: Located, op: SendOp | ReceiveOp) -> Exchange:
        """Return the exchange, which a send and its receive share."""
        first = op.first.data
        if first not in self.exchanges:
            self.exchanges[first] = Exchange(source.spread, target.spread, op.reshard is not None, first)
        found = self.exchanges[first]
        assert isinstance(found, Exchange)
        return found

    def _rearrange(self, op: RearrangeOp, node: _Node) -> None:
        inputs = self._inputs(op)
        held = [self._known(operand) for operand in op.operands]
        bitcast = op.bitcast is not None
        for result, output, sources in zip(op.results, self._outputs(op), op.sources(), strict=True):
            located = self._known(result)
            for host, positions in located.positions.items():
                takes = tuple(
                    p.Take(which, held[which].shard_of[origin]) for which, origin in (sources[i] for i in positions)
                )
                step = p.Select(inputs, output, located.on(host), takes, bitcast)
                node.on(host).add(step, [inputs[take.input] for take in takes], (output,))
            if not bitcast:
                self.views[output] = frozenset(inputs[which] for which, _ in sources)

    def _outputs(self, op: Operation) -> list[int]:
        return [self.numbers[result] for result in op.results]

    def _known(self, value: SSAValue) -> Located:
        located = _located(value)
        self.island_of.update((location.host, location.island) for location in located.locations)
        return located

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
            hosts.setdefault(self.island_of[host], []).append(host)
        return [(island, tuple(hosts[island])) for island in sorted(hosts)]


def _located(value: SSAValue) -> Located:
    if not isinstance(value.type, PlacedType):
        raise invalid(f"a value of type {value.type} has no device locations")
    return value.type.data
