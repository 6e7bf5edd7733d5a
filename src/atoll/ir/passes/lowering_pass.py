"""The seam for passes: what one between a built program and its cut has to be.

A new pass is one file in `atoll.ir.passes`, and one line of the table in its `__init__`. A pass says in its docstring
what it takes, what it guarantees and what it refuses.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from atoll.cluster.locations import DeviceLocation
from atoll.ir.dialect.ops import ProgramOp
from atoll.ir.steps import Steps, finish


@dataclass(frozen=True)
class LoweringPass(ModulePass, abc.ABC):
    """Rewrites programs in place. `placement` has the location of each virtual device; most passes do not look at it.

    Lowering is pure, and runs on the controller's thread: a pass does no I/O and reads no clock. Its time grows with
    the program's nodes, not with its shards, and it yields after each node. For a program that it refuses it raises
    StatusError, with INVALID_ARGUMENT or UNIMPLEMENTED; the client then gets that as the error of the program.
    """

    placement: Mapping[int, DeviceLocation] = field(default_factory=dict)

    @abc.abstractmethod
    def steps(self, program: ProgramOp) -> Steps[None]:
        """Rewrites one program, a node at a time."""

    def run(self, program: ProgramOp) -> None:
        """Rewrites one program, all at once."""
        finish(self.steps(program))

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in op.body.block.ops:
            if isinstance(program, ProgramOp):
                self.run(program)
