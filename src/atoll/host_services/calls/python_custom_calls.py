"""Custom calls that run Python while their program runs: which callable, and what it returns. JAX is needed here."""

from __future__ import annotations

from functools import cache
from typing import Any

from atoll.errors import invalid
from atoll.ir.types import DTYPE_BITS, ShardType
from atoll.transfers.dtypes import numpy_dtype

# It gives its callable XLA's buffers, to read and to write, where others take and return arrays.
BUFFER_CALLBACK = "xla_buffer_python_cpu_callback"


def callback_index(operation: Any) -> int:
    """Which of its program's callables it calls. Raises INVALID_ARGUMENT where it does not say."""
    from jax._src.lib.mlir import ir

    attributes = operation.attributes
    given = [attributes[name] for name in ("mhlo.backend_config", "backend_config") if name in attributes]
    given = [each for each in given if not (isinstance(each, ir.StringAttr) and not each.value)]
    if len(given) != 1 or not isinstance(given[0], ir.DictAttr) or "index" not in given[0]:
        raise invalid("the program has a callback without one index")
    return int(ir.IntegerAttr(given[0]["index"]).value)


def result_types(operation: Any) -> tuple[ShardType, ...]:
    """Raises INVALID_ARGUMENT for what no callable returns."""
    return tuple(shard_type(result.type) for result in operation.results)


def aliases(operation: Any) -> dict[int, int]:
    """The arguments in whose memory results are, by the results' positions."""
    from jax._src.lib.mlir.dialects import hlo

    attributes = operation.attributes
    listed = attributes["output_operand_aliases"] if "output_operand_aliases" in attributes else ()  # noqa: SIM401
    found = [hlo.OutputOperandAlias(each) for each in listed]
    return {(*each.output_tuple_indices, 0)[0]: each.operand_index for each in found}


def shard_type(kind: Any) -> ShardType:
    """Raises INVALID_ARGUMENT for what no callable takes or returns."""
    from jax._src.lib.mlir import ir

    if str(kind) == "!stablehlo.token":
        return "token", ()
    if isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and str(kind.element_type) in _dtypes():
        return _dtypes()[str(kind.element_type)], tuple(kind.shape)
    raise invalid(f"a callback cannot take or return {str(kind)[:100]}")


@cache
def _dtypes() -> dict[str, str]:
    """The IR's names for dtypes, by MLIR's."""
    from jax._src.interpreters import mlir

    names: dict[str, str] = {}
    with mlir.make_ir_context():
        for name in ("bool", *DTYPE_BITS):  # which is i1, as int1 is
            if name in ("token", "opaque", "string"):
                continue
            try:
                names.setdefault(str(mlir.dtype_to_ir_type(numpy_dtype(name))), name)
            except TypeError:  # a dtype that JAX has not
                continue
    return names
