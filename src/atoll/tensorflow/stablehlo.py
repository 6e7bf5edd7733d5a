"""Converts the HLO of tf2xla to StableHLO that every JAX backend accepts, and extracts its parameters and results.

StableHLO lacks a few operations of HLO. MLIR's importer leaves these in XLA's own dialect `mhlo`, which serialized
programs must not contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jax.core import ShapedArray
from jax.extend.mlir import hlo_to_stablehlo
from jax.interpreters import mlir
from jaxlib.mlir import ir

# Operations with one operand that CHLO, the dialect that JAX uses, defines under the same names.
_IN_CHLO = frozenset(f"mhlo.{name}" for name in ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh"))
_DTYPES = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "ui8": np.uint8,
    "ui16": np.uint16,
    "ui32": np.uint32,
    "ui64": np.uint64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
}


@dataclass(frozen=True)
class Module:
    """A module with the function `main`.

    Attributes:
      code: MLIR bytecode.
      parameters: The number of parameters.
      results: Types of the results; None for a result with a dynamic shape.
      aliases: Maps each result that is the new value of a parameter to that parameter.
      dynamic: The text of an operation with a dynamic shape; "" if all shapes are static.
    """

    code: bytes
    parameters: int
    results: tuple[ShapedArray | None, ...]
    aliases: dict[int, int]
    dynamic: str


def from_hlo(hlo: bytes) -> Module:
    """Convert a serialized HloModuleProto. Raise ValueError if StableHLO lacks some of its operations."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(hlo_to_stablehlo(hlo))
        ops = list(_operations(module))
        for op in ops:
            _translate(op)
        left = {op.name for op in _operations(module) if op.name.startswith("mhlo.")}
        if left:
            raise ValueError(f"StableHLO has no operation for {', '.join(sorted(left))}")
        main = ir.SymbolTable(module.operation)["main"]
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        aliases = _aliases(module)
        dynamic = (str(op)[:200] for op in _operations(module) for result in op.results if "?" in str(result.type))
        return Module(
            code=_code(module),
            parameters=len(kind.inputs),
            results=tuple(_aval(ir.RankedTensorType(each)) for each in kind.results),
            aliases=aliases,
            dynamic=next(dynamic, ""),
        )


def text(code: bytes) -> str:
    """Return the MLIR text of a module's bytecode."""
    with mlir.make_ir_context():
        return str(ir.Module.parse(code))


def _code(module: ir.Module) -> bytes:
    import io

    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def _operations(module: ir.Module) -> list[Any]:
    found = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _translate(op: Any) -> None:
    if op.name == "mhlo.copy":
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    elif op.name in _IN_CHLO:
        same = ir.Operation.create(
            op.name.replace("mhlo.", "chlo."),
            results=[op.results[0].type],
            operands=list(op.operands),
            loc=op.location,
            ip=ir.InsertionPoint(op),
        )
        op.results[0].replace_all_uses_with(same.results[0])
        op.erase()


def _aliases(module: ir.Module) -> dict[int, int]:
    attributes = module.operation.attributes
    if "mhlo.input_output_alias" not in attributes:
        return {}
    found = {}
    for entry in map(ir.DictAttr, ir.ArrayAttr(attributes["mhlo.input_output_alias"])):
        index = list(ir.DenseI64ArrayAttr(entry["output_index"])) or [0]  # empty for a single result
        found[index[0]] = ir.IntegerAttr(ir.DictAttr(entry["alias"])["parameter_number"]).value
    return found


def _aval(kind: ir.RankedTensorType) -> ShapedArray | None:
    if not kind.has_static_shape:
        return None
    return ShapedArray(tuple(kind.shape), np.dtype(_DTYPES[str(kind.element_type)]))
