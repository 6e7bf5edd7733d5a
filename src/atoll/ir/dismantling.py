"""Removes the reference cycles in xDSL blocks, so that ops are freed one by one.

Ops, their results and the uses of the results refer to one another. Otherwise, the garbage collector would free a whole
block at once, which takes hundreds of milliseconds for a large program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from xdsl.ir import Block, Operation, SSAValue, SSAValues
from xdsl.rewriter import Rewriter

from atoll.ir.steps import Steps

# Up to this number, an op's operands are replaced faster one at a time.
_FEW = 16


def dismantled(block: Block, known: MutableMapping[SSAValue, Any] | None = None) -> Steps[None]:
    """Dismantle a block from its last op to its first. The block and its values must not be used any more.

    Its values are also removed from the table `known`.
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
    """Remove an op without uses from its block, and dismantle it."""
    Rewriter.erase_op(op)
    op.results = SSAValues()


def replace(op: Operation, new: Operation | list[Operation], results: Sequence[SSAValue | None] | None = None) -> None:
    """Replace an op like `Rewriter.replace_op`, and dismantle the old op."""
    if results is None:
        results = (new if isinstance(new, Operation) else new[-1]).results
    _substitute({old: value for old, value in zip(op.results, results, strict=True) if value is not None})
    Rewriter.replace_op(op, new, results)
    op.results = SSAValues()


def _substitute(values: Mapping[SSAValue, SSAValue]) -> None:
    """Replace values in ops that use many of them.

    xDSL replaces one operand at a time, and copies all operands of the op each time. That takes quadratic time if one
    op uses all of the values.
    """
    changed = Counter(use.operation for value in values for use in value.uses)
    for user, count in changed.items():
        if count > _FEW:
            user.operands = [values.get(each, each) for each in user.operands]
