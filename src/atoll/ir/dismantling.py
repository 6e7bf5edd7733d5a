"""Taking blocks apart, so that nothing in them refers to itself.

Ops, their results and the uses of these refer to one another. Only the garbage collector frees such a block, all at
once: for a large program that takes hundreds of milliseconds. An op that is taken apart is freed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from xdsl.ir import Block, Operation, SSAValue, SSAValues
from xdsl.rewriter import Rewriter

from atoll.ir.steps import Steps

# So many operands of an op are replaced faster one at a time.
_FEW = 16


def dismantled(block: Block, known: MutableMapping[SSAValue, Any] | None = None) -> Steps[None]:
    """Take a block apart, from its last op on. Nobody else uses it or the values that it defines any more.

    `known` is a table of these values, which would keep them: they are removed from it.
    """
    while (op := block.last_op) is not None:
        block.detach_op(op)
        op.drop_all_references()
        if known is not None:
            for result in op.results:
                known.pop(result, None)
        op.results = SSAValues()
        yield
    block._args = ()


def erase(op: Operation) -> None:
    """Take an op without uses out of its block, and apart."""
    Rewriter.erase_op(op)
    op.results = SSAValues()


def replace(op: Operation, new: Operation | list[Operation], results: Sequence[SSAValue | None] | None = None) -> None:
    """As `Rewriter.replace_op`, and take the old op apart."""
    if results is None:
        results = (new if isinstance(new, Operation) else new[-1]).results
    _substitute({old: value for old, value in zip(op.results, results, strict=True) if value is not None})
    Rewriter.replace_op(op, new, results)
    op.results = SSAValues()


def _substitute(values: Mapping[SSAValue, SSAValue]) -> None:
    """Use other values in the place of these.

    xDSL does so for one operand at a time, and copies all operands of the op that has it. That takes time in proportion
    to the square of the number of values where one op uses all of them.
    """
    changed = Counter(use.operation for value in values for use in value.uses)
    for user, count in changed.items():
        if count > _FEW:
            user.operands = [values.get(each, each) for each in user.operands]
