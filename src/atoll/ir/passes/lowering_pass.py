"""The interface of passes, which run between the construction of a module and its cut into plans.

A new pass is one file in `atoll.ir.passes` and one line of the table in its `__init__`. The docstring of a pass
specifies its input, its guarantees and its errors.
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
    """Rewrites programs in place. `placement` contains the location of each virtual device, which few passes use.

    A pass runs on the controller's thread: it does no I/O, reads no clock, and yields after each node. Its time depends
    on the number of nodes, not of shards. It raises StatusError, with INVALID_ARGUMENT or UNIMPLEMENTED, for a program
    that it does not support. The client gets that error.
    """

    placement: Mapping[int, DeviceLocation] = field(default_factory=dict)

    @abc.abstractmethod
    def steps(self, program: ProgramOp) -> Steps[None]:
        """Rewrite one program, one node per step."""

    def run(self, program: ProgramOp) -> None:
        """Run all steps on one program."""
        finish(self.steps(program))

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for program in op.body.block.ops:
            if isinstance(program, ProgramOp):
                self.run(program)
