"""Translates a program to a module in the dialect, op by op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec.structs import replace
from xdsl.dialects.builtin import IntAttr, ModuleOp, StringAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from atoll.errors import StatusError, invalid
from atoll.ir.dialect.attributes import ArrayType, CompletionType, HostBuffers, Mappings, Numbers, Strides
from atoll.ir.dialect.ops import (
    PRESENT,
    CallOp,
    GetOp,
    ProgramOp,
    PutOp,
    RearrangeOp,
    ReportOp,
    ReturnOp,
    RouteOp,
    TransferOp,
    UnrouteOp,
)
from atoll.ir.dismantling import dismantled
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostToDevice,
    Loop,
    Node,
    Program,
    Report,
    Route,
    Switch,
    Transfer,
    Unroute,
)
from atoll.ir.steps import Steps, finish
from atoll.ir.types import ArraySpec

COMPLETION = CompletionType()
# The arrays of one transfer op, for which a pass takes up to 10 ms.
MOST_ARRAYS = 500


def build(program: Program, functions: Mapping[int, str]) -> ModuleOp:
    """Run all steps of `build_in_steps`."""
    return finish(build_in_steps(program, functions))


def build_in_steps(program: Program, functions: Mapping[int, str]) -> Steps[ModuleOp]:
    """Return the module of a program that passed `check`, on virtual devices.

    Each node becomes one op, or several for a transfer of more than `MOST_ARRAYS` arrays. `functions` contains the
    names of functions; others are named by their number. Raises INVALID_ARGUMENT for a program that cannot run on any
    devices.
    """
    types: dict[ArraySpec, ArrayType] = {}

    def typed(spec: ArraySpec) -> ArrayType:
        found = types.get(spec)
        if found is None:
            found = types[spec] = ArrayType(spec)
        return found

    block = Block(arg_types=[typed(spec) for spec in program.arguments])
    values: list[SSAValue] = list(block.args)
    for node in (part for each in program.nodes for part in _parts(each)):
        outputs: list[Attribute] = [typed(spec) for spec in node.outputs]
        try:
            op = _op(node, [values[value] for value in node.inputs], outputs, functions)
            block.add_op(op)
            op.verify_()
        except (StatusError, VerifyException) as error:
            text = f"{program.name!r}: {error}" if isinstance(error, VerifyException) else error.status.message
            yield from dismantled(block)
            raise invalid(text) from None
        values.extend(op.results)
        yield
    block.add_op(ReturnOp.create(operands=[values[value] for value in program.results]))
    return ModuleOp([ProgramOp.of(program.name, program.feeds, Region(block))])


def _parts(node: Node) -> Iterable[Node]:
    """Split a node into equivalent nodes, each of which can be lowered in a short step."""
    if not isinstance(node, Transfer) or len(node.inputs) <= MOST_ARRAYS:
        return (node,)
    return (
        replace(node, inputs=node.inputs[start:stop], outputs=node.outputs[start:stop])
        for start, stop in pairwise((*range(0, len(node.inputs), MOST_ARRAYS), len(node.inputs)))
    )


def _op(
    node: Node,
    operands: list[SSAValue],
    types: list[Attribute],
    functions: Mapping[int, str],
) -> Operation:
    match node:
        case Call():
            if node.completion:
                types.append(COMPLETION)
            facts: dict[str, Attribute] = {
                "callee": StringAttr(functions.get(node.function, f"function_{node.function}")),
                "devices": Numbers(node.devices),
            }
            if node.donated:
                facts["donated"] = Numbers(node.donated)
            if node.preserved:
                facts["preserved"] = Numbers(node.preserved)
            if node.stream is not None:
                facts["stream"] = IntAttr(node.stream)
            return CallOp.create(operands=operands, result_types=types, properties=facts)
        case HostToDevice():
            return PutOp.create(result_types=types, properties={"buffers": HostBuffers(node.buffers)})
        case DeviceToHost():
            facts = {"feed": IntAttr(node.feed)}
            if node.strides is not None:
                facts["strides"] = Strides(node.strides)
            return GetOp.create(operands=operands, result_types=[COMPLETION], properties=facts)
        case Report():
            return ReportOp.create(operands=operands)
        case Switch() | Loop():
            raise invalid("control flow nodes must be split into launches before lowering")
        case Transfer():
            flags = [("donate", node.donate), ("reshard", node.reshard)]
            facts = {name: PRESENT for name, present in flags if present}
            return TransferOp.create(operands=operands, result_types=types, properties=facts)
        case Route() | Unroute():
            op = RouteOp if isinstance(node, Route) else UnrouteOp
            return op.create(operands=operands, result_types=types, properties={"groups": IntAttr(node.groups)})
    facts = {"mappings": Mappings(node.mappings)}
    flags = [("donate", node.donate), ("bitcast", node.bitcast)]
    facts.update((name, PRESENT) for name, present in flags if present)
    return RearrangeOp.create(operands=operands, result_types=types, properties=facts)
