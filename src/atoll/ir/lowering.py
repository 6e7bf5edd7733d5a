"""Lowering of a program on virtual devices to gangs, and one plan per host. Pure.

The stages are passes over the MLIR dialect of `atoll.ir.dialect`, as in section 4.2 of the paper. The docstring of each
pass specifies its input, its guarantees and its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import PassPipeline

from atoll.cluster.locations import Placement
from atoll.errors import StatusError, invalid
from atoll.ir.build_module import build_in_steps
from atoll.ir.dialect.ops import ProgramOp
from atoll.ir.dismantling import dismantled
from atoll.ir.passes import PASSES
from atoll.ir.passes.cut_pass import cut_in_steps
from atoll.ir.passes.lowering_pass import LoweringPass
from atoll.ir.plan import Lowered
from atoll.ir.program import Call, Program, check_node, check_results
from atoll.ir.steps import Steps, finish

_PASSES: tuple[type[LoweringPass], ...] = tuple(map(resolve_name, PASSES))


def lower(program: Program, placement: Placement, functions: Mapping[int, str]) -> Lowered:
    """Run all steps of `lower_in_steps`."""
    return finish(lower_in_steps(program, placement, functions))


def lower_in_steps(program: Program, placement: Placement, functions: Mapping[int, str]) -> Steps[Lowered]:
    """Lower `program` to gangs and plans. `functions` contains the workers' names of the session's functions.

    Raises INVALID_ARGUMENT or UNIMPLEMENTED if the program cannot run.
    """
    defined = len(program.arguments)
    for node in program.nodes:
        defined = check_node(program.name, node, defined, program.feeds)
        yield
    check_results(program, defined)
    module = yield from build_in_steps(program, functions)
    lowered = program_of(module)
    try:
        for each in _PASSES:
            yield from each(placement).steps(lowered)
        for node in program.nodes:
            if isinstance(node, Call) and node.function not in functions:
                raise invalid(f"{program.name!r} calls function {node.function}, which is not registered")
        cut = yield from cut_in_steps(lowered)
    except StatusError:
        yield from _dismantled(module)
        raise
    yield from _dismantled(module)
    return cut


def _dismantled(module: ModuleOp) -> Steps[None]:
    """Dismantle a module, so that the garbage collector does not have to free it."""
    yield from dismantled(program_of(module).body.block)
    module.drop_all_references()


def pipeline(placement: Placement) -> PassPipeline:
    """Return the passes between `build_module.build` and the cut into plans."""
    return PassPipeline(tuple(each(placement) for each in _PASSES))


def program_of(module: ModuleOp) -> ProgramOp:
    program = module.body.block.first_op
    assert isinstance(program, ProgramOp)
    return program
