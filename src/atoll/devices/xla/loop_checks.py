"""Inserts a check into each loop of a program that may take long, so that a worker can stop it: see `stops`.

A check costs 0.2 us per iteration, and XLA cannot compile a loop with a check as one unit. Therefore a loop gets no
check if its number of iterations is constant and its work is small. Work counts as unbounded if this module cannot
estimate it.
"""

from __future__ import annotations

import math
from typing import Any

from jax._src.lib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from atoll.devices.xla.stops import TARGET
from atoll.errors import invalid

# Loops up to this work, in computed elements, get no check. It takes well below one second.
MAX_WORK = 1e9
_MAX_DEPTH = 50  # of regions and calls
_FFI = 4  # API version of custom calls
# Operations whose work is not proportional to their elements, or that wait for other devices.
_UNBOUNDED = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("custom_call", "cholesky", "triangular_solve", "reduce_window", "select_and_scatter", "convolution"),
        *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute", "collective_broadcast"),
        *("send", "recv", "infeed", "outfeed"),
    )
)
_FACTORS = {"stablehlo.fft": 64, "stablehlo.sort": 64}
_WITH_REGIONS = frozenset(
    f"stablehlo.{name}" for name in ("case", "if", "reduce", "map", "scatter", "sort", "while", "optimization_barrier")
)


def insert_checks(module: Any, devices: int) -> int:
    """Insert checks into the module's loops. Return their number.

    The module must be in the current MLIR context. In a program for several `devices`, checks have no side effect,
    because XLA cannot partition calls with side effects. XLA may move such a check out of a loop with a constant
    condition.

    Raises StatusError if the module already contains checks: a client has written their arguments.
    """
    loops: list[Any] = []
    targets: set[str] = set()
    work = _Work(module)

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.while":
            loops.append(operation)
        elif operation.name == "stablehlo.custom_call":
            targets.add(operation.attributes["call_target_name"].value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if TARGET in targets:
        raise invalid(f"a program cannot call {TARGET}")
    checked = [loop for loop in loops if work.of_loop(loop) > MAX_WORK]
    for loop in checked:
        _insert(loop, devices)
    return len(checked)


def _insert(loop: Any, devices: int) -> None:
    end = list(loop.regions[0].blocks[0].operations)[-1]
    condition = end.operands[0]
    with ir.InsertionPoint(end), loop.location:
        int32 = ir.IntegerType.get_signless(32)
        check = stablehlo.CustomCallOp(
            [condition.type],
            [condition],
            TARGET,
            has_side_effect=devices == 1,
            api_version=ir.IntegerAttr.get(int32, _FFI),
            backend_config=ir.DictAttr.get({"devices": ir.IntegerAttr.get(int32, devices)}),
            output_operand_aliases=ir.ArrayAttr.get([stablehlo.OutputOperandAlias.get([], 0, [])]),
        )
    end.operands[0] = check.results[0]


class _Work:
    """Upper bounds of the number of elements that operations compute."""

    def __init__(self, module: Any) -> None:
        self._functions = {
            each.attributes["sym_name"].value: each.operation
            for each in module.body.operations
            if each.operation.name == "func.func"
        }
        self._known: dict[Any, float] = {}

    def of_loop(self, loop: Any, depth: int = 0) -> float:
        """Return the work of all iterations; infinity if their number is not known."""
        if loop not in self._known:
            self._known[loop] = math.inf  # in case the loop is in a recursive function
            iterations = _iterations(loop)
            if iterations is not None:
                self._known[loop] = iterations * sum(self._of_region(region, depth) for region in loop.regions)
        return self._known[loop]

    def _of_region(self, region: Any, depth: int) -> float:
        if depth > _MAX_DEPTH:
            return math.inf
        return sum(self._of(each.operation, depth) for block in region.blocks for each in block.operations)

    def _of(self, operation: Any, depth: int) -> float:
        name = operation.name
        if name == "stablehlo.while":
            return self.of_loop(operation, depth + 1)
        if name == "func.call":
            return self._of_function(operation.attributes["callee"].value, depth)
        if name in _UNBOUNDED or (len(operation.regions) and name not in _WITH_REGIONS):
            return math.inf
        sizes = [_elements(each.type) for each in (*operation.operands, *operation.results)]
        if name == "stablehlo.dot_general":
            return 1 + math.sqrt(math.prod(sizes))  # sizes m k, k n and m n: m k n multiplications
        inner = sum(self._of_region(region, depth + 1) for region in operation.regions)
        return (1 + max(sizes, default=0)) * _FACTORS.get(name, 1) * max(1, inner)

    def _of_function(self, name: str, depth: int) -> float:
        function = self._functions.get(name)
        if function is None:
            return math.inf
        if function not in self._known:
            self._known[function] = math.inf  # in case it calls itself
            self._known[function] = sum(self._of_region(region, depth + 1) for region in function.regions)
        return self._known[function]


def _elements(kind: Any) -> float:
    if not isinstance(kind, ir.RankedTensorType):
        return 1.0
    shape = ir.RankedTensorType(kind)
    return float(math.prod(shape.shape)) if shape.has_static_shape else math.inf


def _iterations(loop: Any) -> int | None:
    """Return the iterations of a loop that counts up between two constants, as JAX's do; None for other loops."""
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = _made_by(list(condition.operations)[-1].operands[0], "stablehlo.compare")
    if compared is None or "LT" not in str(compared.attributes["comparison_direction"]):
        return None
    counter, limit = compared.operands[0], _constant(compared.operands[1])
    if not isinstance(counter, ir.BlockArgument) or counter.owner != condition or limit is None:
        return None
    position = ir.BlockArgument(counter).arg_number
    start = _constant(loop.operands[position])
    added = _made_by(list(body.operations)[-1].operands[position], "stablehlo.add")
    if start is None or added is None or added.operands[0] != body.arguments[position]:
        return None
    step = _constant(added.operands[1])
    if step is None or step <= 0 or limit + step >= 2**31:  # the counter may overflow
        return None
    return max(0, math.ceil((limit - start) / step))


def _made_by(value: Any, name: str) -> Any:
    """Return the operation of this name whose only result is `value`; None if there is no such operation."""
    if not isinstance(value, ir.OpResult) or value.owner.name != name or len(value.owner.results) != 1:
        return None
    return value.owner


def _constant(value: Any) -> int | None:
    """Return the value of a 32-bit or 64-bit integer constant; None for anything else."""
    made = _made_by(value, "stablehlo.constant")
    if made is None or str(value.type) not in ("tensor<i32>", "tensor<i64>"):
        return None
    return int(ir.DenseIntElementsAttr(made.attributes["value"])[0])
