"""Lowering: a location-free program becomes gangs, and one plan for each host.

Pure: program and placement in, plans out. The stages are passes over the MLIR dialect of `atoll.ir.dialect`, as in the
paper (section 4.2). Each says in its own docstring what it takes, guarantees and refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import PassPipeline

from atoll.cluster.locations import Placement
from atoll.errors import invalid
from atoll.ir.build import build
from atoll.ir.dialect.ops import ProgramOp
from atoll.ir.lowered import Lowered, LoweredGang, LoweredValue
from atoll.ir.passes import PASSES
from atoll.ir.passes.cut import cut
from atoll.ir.passes.lowering_pass import LoweringPass
from atoll.ir.program import Call, Program, check

__all__ = ["Lowered", "LoweredGang", "LoweredValue", "lower", "pipeline"]

_PASSES: tuple[type[LoweringPass], ...] = tuple(map(resolve_name, PASSES))


def lower(program: Program, placement: Placement, functions: Mapping[int, str]) -> Lowered:
    """Cuts `program` into gangs and plans. `functions` gives the workers' names of the session's compiled functions.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED where the program cannot run.
    """
    check(program)
    module = build(program, functions)
    pipeline(placement).apply(Context(), module)
    for node in program.nodes:
        if isinstance(node, Call) and node.function not in functions:
            raise invalid(f"{program.name!r} calls function {node.function}, which is not registered")
    return cut(program_of(module))


def pipeline(placement: Placement) -> PassPipeline:
    """The passes between a built program and its cut."""
    return PassPipeline(tuple(each(placement) for each in _PASSES))


def program_of(module: ModuleOp) -> ProgramOp:
    program = module.body.block.first_op
    assert isinstance(program, ProgramOp)
    return program
