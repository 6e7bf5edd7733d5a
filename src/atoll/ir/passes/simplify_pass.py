"""Simplification of programs on virtual devices: removes unnecessary nodes.

Invariant: results remain distinct values that are not arguments, and the program donates the same buffers as before.
Views share the memory of their array. Therefore arrays with views or donation are only merged if nothing else refers to
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from atoll.ir.dialect.ops import (
    PRESENT,
    CallOp,
    Node,
    ProgramOp,
    RearrangeOp,
    ReturnOp,
    RouteOp,
    TransferOp,
    UnrouteOp,
    spec_of,
)
from atoll.ir.dismantling import erase, replace
from atoll.ir.passes.lowering_pass import LoweringPass
from atoll.ir.steps import Steps, freed
from atoll.ir.types import ArraySpec, Replicated, Tiled


@dataclass(frozen=True)
class SimplifyPass(LoweringPass):
    """Removes and merges nodes until nothing changes.

    Input: programs on virtual devices. Guarantees the same results from at most as many nodes:

    - Dead nodes are removed: calls, transfers, routes and rearrangements whose results have no uses. Nodes that donate,
      and calls that have a completion, have no results or run Python are kept, like puts and gets.
    - Transfers to the same sharding, memory and layout are removed.
    - Equal transfers of one value are merged.
    - A to B to C becomes A to C if nothing else uses B. If the memory kind of B differs from those of A and C, the
      transfers are kept, because the user saves memory with them.

    Raises no errors.
    """

    name = "atoll-simplify"

    def steps(self, program: ProgramOp) -> Steps[None]:
        return simplify(program)


def simplify(program: ProgramOp) -> Steps[None]:
    yield from _drop_dead(program)
    changed = True
    while changed:
        changed = False
        left: dict[TransferOp, list[int]] = {}  # results that joined transfers have replaced
        uses = _Uses()
        for op in program.each():
            changed |= isinstance(op, TransferOp) and _join(op, left, uses)
            yield
        for first, indices in left.items():
            _without(first, indices)
            yield
        yield from freed(uses.known, left)
        known: dict[tuple[SSAValue, Attribute, bool], SSAValue] = {}
        uses = _Uses()
        for op in program.each():
            changed |= isinstance(op, TransferOp) and _merge(op, known, uses)
            yield
        yield from freed(uses.known, known)
        if changed:
            yield from _drop_dead(program)


def _drop_dead(program: ProgramOp) -> Steps[None]:
    op = program.body.block.last_op
    while op is not None:
        before = op.prev_op
        if isinstance(op, TransferOp) and op.donate is None:
            unused = [i for i, result in enumerate(op.results) if result.first_use is None]
            if unused:
                _without(op, unused)
        elif _is_pure(op) and all(result.first_use is None for result in op.results):
            erase(op)
        op = before
        yield


def _is_pure(op: Operation) -> bool:
    if isinstance(op, CallOp):
        return bool(op.results) and not op.completes and op.donated is None and op.stream is None
    return isinstance(op, RouteOp | UnrouteOp) or (isinstance(op, RearrangeOp) and op.donate is None)


def _without(op: TransferOp, indices: list[int]) -> None:
    """Remove inputs and their unused results from a transfer."""
    removed = set(indices)
    left = [i for i in range(len(op.results)) if i not in removed]
    if not left:
        erase(op)
        return
    smaller = TransferOp.create(
        operands=[op.operands[i] for i in left],
        result_types=[op.results[i].type for i in left],
        properties=op.properties,
    )
    results: list[SSAValue | None] = [None] * len(op.results)
    for i, result in zip(left, smaller.results, strict=True):
        results[i] = result
    replace(op, smaller, results)


# ---- A to B to C


def _join(op: TransferOp, left: dict[TransferOp, list[int]], uses: _Uses) -> bool:
    """Replace a transfer by one that includes the transfers before it. Add their replaced results to `left`."""
    firsts: list[TransferOp] = []
    flags: set[tuple[bool, bool]] = set()
    for value, result in zip(op.operands, op.results, strict=True):
        first = value.owner
        if not isinstance(first, TransferOp) or not value.has_one_use():
            return False
        source = first.operands[_index(value)]
        reshard = _composed(first, spec_of(source), spec_of(value), op, spec_of(result))
        # The source is read later than before, so no other op may consume it in between.
        exclusive = _is_fresh(source) and source.has_one_use()
        lives_on = not isinstance(source.owner, RearrangeOp) and uses.holders(source) <= {first}
        if reshard is None or not (exclusive or lives_on):
            return False
        firsts.append(first)
        flags.add((reshard, first.donate is not None))
    if len(flags) != 1:
        return False
    ((reshard, donate),) = flags
    joined = TransferOp.create(
        operands=[f.operands[_index(value)] for f, value in zip(firsts, op.operands, strict=True)],
        result_types=op.result_types,
        properties={name: PRESENT for name, present in (("reshard", reshard), ("donate", donate)) if present},
    )
    middles = [_index(value) for value in op.operands]
    replace(op, joined)
    for first, index in zip(firsts, middles, strict=True):
        left.setdefault(first, []).append(index)
    return True


def _composed(first: TransferOp, a: ArraySpec, b: ArraySpec, second: TransferOp, c: ArraySpec) -> bool | None:
    """Return whether A to C is a reshard; None if one transfer cannot replace both."""
    if b.sharding.memory_kind not in (a.sharding.memory_kind, c.sharding.memory_kind):
        return None
    one, two = first.reshard is not None, second.reshard is not None
    if not one and not two:
        return False
    if not all(isinstance(spec.sharding.tiling, Replicated | Tiled) for spec in (a, b, c)):
        return None
    if not one and a.sharding.tiling != b.sharding.tiling:
        return None  # shard i becomes shard i of another tiling, which changes the array's contents
    if not two and b.sharding.tiling != c.sharding.tiling:
        return None
    return True


# ---- one instead of two


def _merge(op: TransferOp, known: dict[tuple[SSAValue, Attribute, bool], SSAValue], uses: _Uses) -> bool:
    """Replace results of the transfer by the value if it has the same type, or by results of equal transfers."""
    if op.donate is not None:
        return False
    reshard = op.reshard is not None
    gone = []
    for index, (value, result) in enumerate(zip(op.operands, op.results, strict=True)):
        key = (value, result.type, reshard)
        twin = value if value.type == result.type else known.get(key)
        if twin is not None and _may_be_one(twin, result, uses):
            uses.join(twin, result)
            result.replace_all_uses_with(twin)
            gone.append(index)
        else:
            known.setdefault(key, result)
    return bool(gone)


def _may_be_one(kept: SSAValue, gone: SSAValue, uses: _Uses) -> bool:
    """Return whether `kept` can replace `gone`, which has the same contents, without a visible effect."""
    if gone.first_use is None:
        return False
    if _is_fresh(kept) and kept.has_one_use() and isinstance(gone.owner, TransferOp) and kept in gone.owner.operands:
        return True  # only the transfer uses it
    if isinstance(kept.owner, RearrangeOp) or uses.holders(kept) or uses.holders(gone):
        return False
    return not uses.returned(gone) or (_is_fresh(kept) and not uses.returned(kept))


def _is_fresh(value: SSAValue) -> bool:
    """Return whether the value has its own memory: it is neither an argument nor a view."""
    return isinstance(value.owner, Operation) and not isinstance(value.owner, RearrangeOp)


class _Uses:
    """The uses of values, computed once per pass over the program: a value may have thousands."""

    def __init__(self) -> None:
        self.known: dict[SSAValue, tuple[set[Operation], bool]] = {}

    def holders(self, value: SSAValue) -> set[Operation]:
        """Return the ops that consume the value, or that make views of it."""
        return self._of(value)[0]

    def returned(self, value: SSAValue) -> bool:
        return self._of(value)[1]

    def join(self, kept: SSAValue, gone: SSAValue) -> None:
        """Add the uses of `gone` to those of `kept`."""
        (held, returned), (also_held, also_returned) = self._of(kept), self._of(gone)
        self.known[kept] = held | also_held, returned or also_returned

    def _of(self, value: SSAValue) -> tuple[set[Operation], bool]:
        found = self.known.get(value)
        if found is None:
            holders: set[Operation] = set()
            returned = False
            for use in value.uses:
                op = use.operation
                returned = returned or isinstance(op, ReturnOp)
                if isinstance(op, RearrangeOp) or (isinstance(op, Node) and op.consumes(use.index)):
                    holders.add(op)
            found = self.known[value] = holders, returned
        return found


def _index(value: SSAValue) -> int:
    """Return the index of a value among the results of its op."""
    assert isinstance(value, OpResult)
    return value.index
