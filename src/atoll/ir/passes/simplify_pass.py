"""Simplification of programs: removes unnecessary nodes.

Invariant: results remain distinct values that are not arguments, and the program donates the same buffers as before.
Views share the memory of their array. Therefore arrays with views or donation are only merged if nothing else refers to
them.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from atoll.ir.program import Call, Node, Program, Rearrange, Route, Transfer, Unroute, specs_of
from atoll.ir.steps import Steps, collected, freed
from atoll.ir.types import ArraySpec, Replicated, Tiled


def simplify(program: Program) -> Steps[Program]:
    """Remove and merge nodes until nothing changes. Returns a program with the same results and at most as many nodes.

    - Dead nodes are removed: calls, transfers, routes and rearrangements whose results have no uses. Nodes that donate,
      and calls that have a completion, have no results or run Python are kept, like puts and gets.
    - Transfers to the same sharding, memory and layout are removed.
    - Equal transfers of one value are merged.
    - A to B to C becomes A to C if nothing else uses B. If the memory kind of B differs from those of A and C, the
      transfers are kept, because the user saves memory with them.

    Raises no errors.
    """
    graph = yield from _graph(program)
    yield from _drop_dead(graph)
    changed = True
    while changed:
        changed = False
        left: dict[_Op, set[int]] = {}  # outputs that joined transfers have replaced
        holders = _Holders(graph)
        for op in list(graph.ops):
            changed |= _join(graph, op, left, holders)
            yield
        for first, indices in left.items():
            graph.remove_outputs(first, indices)
            yield
        yield from freed(holders.known, holders.consumed, left)
        known: dict[tuple[int, ArraySpec, bool], int] = {}
        for op in list(graph.ops):
            changed |= _merge(graph, op, known, holders)
            yield
        yield from freed(holders.known, holders.consumed, known)
        if changed:
            yield from _drop_dead(graph)
    return (yield from _program(graph, program))


class _Op(msgspec.Struct, eq=False):
    """A node whose inputs can be replaced. Values have numbers that do not change when nodes are removed."""

    node: Node | None  # None for the return of the program
    inputs: list[int]
    outputs: list[int]


class _Graph:
    """A program whose nodes can be changed and removed."""

    def __init__(self, program: Program) -> None:
        self.types: list[ArraySpec | None] = list(program.arguments)
        self.makers: list[_Op | None] = [None] * len(self.types)
        self.uses: list[dict[_Op, int]] = [{} for _ in self.types]  # the number of uses of each value, by op
        self.ops: dict[_Op, None] = {}  # in order, without `end`
        self.end = _Op(None, [], [])

    def add(self, node: Node) -> None:
        first = len(self.types)
        self.types.extend(specs_of(node))
        op = _Op(node, [], list(range(first, len(self.types))))
        self.makers.extend([op] * len(op.outputs))
        self.uses.extend([{} for _ in op.outputs])
        self.ops[op] = None
        self.set_inputs(op, list(node.inputs))

    def set_inputs(self, op: _Op, inputs: list[int]) -> None:
        for value in op.inputs:
            self.uses[value].pop(op, None)
        for value in inputs:
            used = self.uses[value]
            used[op] = used.get(op, 0) + 1
        op.inputs = inputs

    def has_one_use(self, value: int) -> bool:
        used = self.uses[value]
        return len(used) == 1 and next(iter(used.values())) == 1

    def erase(self, op: _Op) -> None:
        """Remove an op whose outputs have no uses."""
        self.set_inputs(op, [])
        del self.ops[op]

    def remove_outputs(self, op: _Op, indices: set[int]) -> None:
        """Remove unused outputs of a transfer and their inputs."""
        assert isinstance(op.node, Transfer)
        left = [i for i in range(len(op.outputs)) if i not in indices]
        if not left:
            self.erase(op)
            return
        op.node = replace(op.node, outputs=tuple([op.node.outputs[i] for i in left]))
        op.outputs = [op.outputs[i] for i in left]
        self.set_inputs(op, [op.inputs[i] for i in left])

    def move_uses(self, old: int, new: int) -> dict[_Op, int]:
        """Count the uses of `old` as uses of `new`. Returns the ops in whose inputs the caller replaces `old`."""
        moved, self.uses[old] = self.uses[old], {}
        used = self.uses[new]
        for user, count in moved.items():
            used[user] = used.get(user, 0) + count
        return moved


def _graph(program: Program) -> Steps[_Graph]:
    graph = _Graph(program)
    for node in program.nodes:
        graph.add(node)
        yield
    graph.set_inputs(graph.end, list(program.results))
    return graph


def _program(graph: _Graph, original: Program) -> Steps[Program]:
    """Return the graph as a program, with its values numbered in order. The graph must not be used any more."""
    numbers = {value: value for value in range(len(original.arguments))}
    nodes: list[Node] = []
    for op in graph.ops:
        assert op.node is not None
        inputs = tuple([numbers[value] for value in op.inputs])
        nodes.append(op.node if inputs == op.node.inputs else replace(op.node, inputs=inputs))
        for value in op.outputs:
            numbers[value] = len(numbers)
        yield
    results = yield from collected(numbers[value] for value in graph.end.inputs)
    yield from freed(graph.ops, graph.uses, graph.makers, graph.types, numbers)
    return replace(original, nodes=tuple(nodes), results=tuple(results))


# ---- dead nodes


def _drop_dead(graph: _Graph) -> Steps[None]:
    for op in reversed(list(graph.ops)):
        unused = [i for i, value in enumerate(op.outputs) if not graph.uses[value]]
        if isinstance(op.node, Transfer) and not op.node.donate:
            if unused or not op.outputs:
                graph.remove_outputs(op, set(unused))
        elif len(unused) == len(op.outputs) and _is_pure(op.node):
            graph.erase(op)
        yield


def _is_pure(node: Node | None) -> bool:
    match node:
        case Call():
            return bool(node.outputs) and not node.completion and not node.donated and node.stream is None
        case Rearrange():
            return not node.donate
    return isinstance(node, Route | Unroute)


# ---- A to B to C


def _join(graph: _Graph, op: _Op, left: dict[_Op, set[int]], holders: _Holders) -> bool:
    """Replace a transfer by one that includes the transfers before it. Add their replaced outputs to `left`."""
    if not isinstance(op.node, Transfer):
        return False
    firsts: list[tuple[_Op, int]] = []  # the transfers before it, and the indices of their outputs
    flags: set[tuple[bool, bool]] = set()
    for value, target in zip(op.inputs, op.node.outputs, strict=True):
        first = graph.makers[value]
        if first is None or not isinstance(first.node, Transfer) or not graph.has_one_use(value):
            return False
        index = first.outputs.index(value)
        source = first.inputs[index]
        before, between = graph.types[source], graph.types[value]
        assert before is not None
        assert between is not None
        reshard = _composed(first.node, before, between, op.node, target)
        # The source is read later than before, so no other op may consume it in between.
        exclusive = _is_fresh(graph, source) and graph.has_one_use(source)
        lives_on = not _is_view(graph, source) and holders.of(source) <= {first}
        if reshard is None or not (exclusive or lives_on):
            return False
        firsts.append((first, index))
        flags.add((reshard, first.node.donate))
    if len(flags) != 1:
        return False
    ((reshard, donate),) = flags
    for first, index in firsts:
        left.setdefault(first, set()).add(index)
    op.node = replace(op.node, donate=donate, reshard=reshard)
    graph.set_inputs(op, [first.inputs[index] for first, index in firsts])
    return True


def _composed(first: Transfer, a: ArraySpec, b: ArraySpec, second: Transfer, c: ArraySpec) -> bool | None:
    """Return whether A to C is a reshard; None if one transfer cannot replace both."""
    if b.sharding.memory_kind not in (a.sharding.memory_kind, c.sharding.memory_kind):
        return None
    if not first.reshard and not second.reshard:
        return False
    if not all(isinstance(spec.sharding.tiling, Replicated | Tiled) for spec in (a, b, c)):
        return None
    if not first.reshard and a.sharding.tiling != b.sharding.tiling:
        return None  # shard i becomes shard i of another tiling, which changes the array's contents
    if not second.reshard and b.sharding.tiling != c.sharding.tiling:
        return None
    return True


# ---- one instead of two


def _merge(graph: _Graph, op: _Op, known: dict[tuple[int, ArraySpec, bool], int], holders: _Holders) -> bool:
    """Replace outputs of the transfer by the input if it has the same type, or by outputs of equal transfers."""
    node = op.node
    if not isinstance(node, Transfer) or node.donate:
        return False
    replaced: dict[int, int] = {}
    users: dict[_Op, int] = {}
    for value, result, spec in zip(op.inputs, op.outputs, node.outputs, strict=True):
        key = (value, spec, node.reshard)
        twin = value if graph.types[value] == spec else known.get(key)
        if twin is not None and _may_be_one(graph, twin, result, holders):
            holders.join(twin, result)
            users.update(graph.move_uses(result, twin))
            replaced[result] = twin
        else:
            known.setdefault(key, result)
    for user in users:
        user.inputs = [replaced.get(each, each) for each in user.inputs]
    return bool(replaced)


def _may_be_one(graph: _Graph, kept: int, gone: int, holders: _Holders) -> bool:
    """Return whether `kept` can replace `gone`, which has the same contents, without a visible effect."""
    maker = graph.makers[gone]
    assert maker is not None
    if not graph.uses[gone]:
        return False
    if _is_fresh(graph, kept) and graph.has_one_use(kept) and kept in maker.inputs:
        return True  # only the transfer uses it
    if _is_view(graph, kept) or holders.of(kept) or holders.of(gone):
        return False
    is_returned = graph.end in graph.uses[gone]
    return not is_returned or (_is_fresh(graph, kept) and graph.end not in graph.uses[kept])


def _is_view(graph: _Graph, value: int) -> bool:
    maker = graph.makers[value]
    return maker is not None and isinstance(maker.node, Rearrange)


def _is_fresh(graph: _Graph, value: int) -> bool:
    """Return whether the value has its own memory: it is neither an argument nor a view."""
    return graph.makers[value] is not None and not _is_view(graph, value)


class _Holders:
    """The ops that consume a value or make views of it, computed once per value: a value may have thousands of uses."""

    def __init__(self, graph: _Graph) -> None:
        self.known: dict[int, set[_Op]] = {}
        self.consumed: dict[_Op, set[int]] = {}  # by calls
        self._graph = graph

    def of(self, value: int) -> set[_Op]:
        found = self.known.get(value)
        if found is None:
            found = self.known[value] = {op for op in self._graph.uses[value] if self._holds(op, value)}
        return found

    def join(self, kept: int, gone: int) -> None:
        """Add the holders of `gone` to those of `kept`."""
        self.known[kept] = self.of(kept) | self.of(gone)

    def _holds(self, op: _Op, value: int) -> bool:
        match op.node:
            case Rearrange():
                return True
            case Transfer(donate=donate):
                return donate
            case Call(donated=donated) if donated:
                consumed = self.consumed.get(op)
                if consumed is None:
                    consumed = self.consumed[op] = {op.inputs[position] for position in donated}
                return value in consumed
        return False
