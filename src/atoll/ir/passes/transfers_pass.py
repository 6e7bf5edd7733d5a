"""Explicit transfers: sends and receives between hosts, and moves within hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import ArrayAttr, IntAttr
from xdsl.ir import Attribute, Operation, SSAValue

from atoll.ir.dialect.attributes import PlacedType
from atoll.ir.dialect.ops import (
    PRESENT,
    MoveOp,
    ProgramOp,
    ReceiveOp,
    ReceiveRowsOp,
    RouteOp,
    SendOp,
    SendRowsOp,
    TransferOp,
    UnrouteOp,
)
from atoll.ir.dismantling import replace
from atoll.ir.exchange import Exchange
from atoll.ir.geometry import Located, stays
from atoll.ir.passes.lowering_pass import LoweringPass
from atoll.ir.row_exchange import RowExchange
from atoll.ir.steps import Steps


@dataclass(frozen=True)
class ExplicitTransfersPass(LoweringPass):
    """Replaces transfers by sends, moves and receives.

    Input: placed programs. Guarantees: there are no `atoll.transfer` ops. Each is replaced by consecutive ops with the
    same number (`of`): a send per array that leaves its host, one move for all arrays whose shards stay on their hosts,
    and a receive per send. The feeds of a send are numbered from its `first`.

    In the same way, `atoll.route` and `atoll.unroute` become sends and receives of rows, also within a host, because
    the destinations of the rows are not known.

    Raises UNIMPLEMENTED for resharding an array whose tiling does not determine its boxes, and for sending shards
    without a known shape.
    """

    name = "atoll-explicit-transfers"

    def steps(self, program: ProgramOp) -> Steps[None]:
        feeds = number = 0
        for node in program.each():
            if isinstance(node, TransferOp):
                feeds = _replace(node, number, feeds)
                number += 1
            elif isinstance(node, RouteOp):
                feeds = _route(node, number, feeds)
                number += 1
            elif isinstance(node, UnrouteOp):
                feeds = _unroute(node, number, feeds)
                number += 1
            yield


def _replace(op: TransferOp, number: int, feeds: int) -> int:
    """Replace the op by sends, a move and receives. Return the next feed."""
    of: dict[str, Attribute] = {"of": IntAttr(number)}
    reshard = op.reshard is not None
    how: dict[str, Attribute] = {"reshard": PRESENT} if reshard else {}
    donate = {"donate": PRESENT} if op.donate is not None else {}
    sends: list[Operation] = []
    receives: list[Operation] = []
    moved: list[int] = []
    results: dict[int, SSAValue] = {}
    for index, (value, result) in enumerate(zip(op.operands, op.results, strict=True)):
        source, target = _located(value), _located(result)
        if stays(source, target, reshard):
            moved.append(index)
            continue
        if reshard:
            _ = source.boxes, target.boxes  # raises an error if a tiling does not determine its boxes
        first: dict[str, Attribute] = {"first": IntAttr(feeds), **how}
        feeds += Exchange(source.spread, target.spread, reshard, feeds).feeds
        sends.append(SendOp.create(operands=[value], properties={**of, **first, "target": result.type, **donate}))
        receive = ReceiveOp.create(result_types=[result.type], properties={**of, **first, "source": value.type})
        receives.append(receive)
        results[index] = receive.results[0]
    moves = list(_moves(op, moved, {**of, **donate}, results))
    replace(op, [*sends, *moves, *receives], [results[i] for i in range(len(op.results))])
    return feeds


def _route(op: RouteOp, number: int, feeds: int) -> int:
    """Replace the op by sends and receives. Return the next feed."""
    rows, _, *order = map(_located, op.operands)
    source = rows.in_order(order[0] if order else None)
    sends: list[Operation] = []
    receives: list[Operation] = []
    for destination, block in enumerate(op.results[::2]):
        facts = _row_facts(op, number, feeds, destination)
        feeds += RowExchange(source.spread, _located(block).spread, op.groups.data, destination, feeds).feeds
        sends.append(SendRowsOp.create(operands=op.operands, properties={**facts, "target": block.type}))
        types = [block.type, op.results[2 * destination + 1].type]
        sources = ArrayAttr([PlacedType(source)])
        receives.append(ReceiveRowsOp.create(result_types=types, properties={**facts, "sources": sources}))
    replace(op, [*sends, *receives], [result for each in receives for result in each.results])
    return feeds


def _unroute(op: UnrouteOp, number: int, feeds: int) -> int:
    """Replace the op by sends of its blocks and one receive. Return the next feed."""
    (rows,), blocks = op.results, op.operands[::2]
    facts = _row_facts(op, number, feeds, -1)
    sends: list[Operation] = []
    for block, spans in zip(blocks, op.operands[1::2], strict=True):
        properties = {**_row_facts(op, number, feeds, -1), "target": rows.type}
        feeds += RowExchange(_located(block).spread, _located(rows).spread, op.groups.data, -1, feeds).feeds
        sends.append(SendRowsOp.create(operands=[block, spans], properties=properties))
    sources = ArrayAttr([block.type for block in blocks])
    receive = ReceiveRowsOp.create(result_types=[rows.type], properties={**facts, "sources": sources})
    replace(op, [*sends, receive], receive.results)
    return feeds


def _row_facts(op: RouteOp | UnrouteOp, number: int, first: int, destination: int) -> dict[str, Attribute]:
    return {
        "of": IntAttr(number),
        "first": IntAttr(first),
        "groups": op.groups,
        "destination": IntAttr(destination),
    }


def _moves(
    op: TransferOp, indices: list[int], facts: dict[str, Attribute], results: dict[int, SSAValue]
) -> Iterator[Operation]:
    if not indices:
        return
    move = MoveOp.create(
        operands=[op.operands[i] for i in indices],
        result_types=[op.results[i].type for i in indices],
        properties=facts,
    )
    results.update(zip(indices, move.results, strict=True))
    yield move


def _located(value: SSAValue) -> Located:
    assert isinstance(value.type, PlacedType)
    return value.type.data
