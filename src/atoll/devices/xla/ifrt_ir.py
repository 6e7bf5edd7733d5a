"""Reads IFRT IR programs: their outline, and the modules of their fragments.

MLIR can end the process for malformed bytecode, so this module is only used in compiler processes. IFRT IR is defined
in `xla/python/ifrt/ir/ifrt_ops.td` of openxla/xla. MLIR's Python bindings have no classes for it, so types are read
from their text form.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from jax._src.lib.mlir import ir

from atoll.devices.missing_modules import import_mpmd
from atoll.errors import StatusError, invalid, unimplemented
from atoll.host_services.calls.callback_operations import shard_type
from atoll.ir.outline import Fragment, Outline
from atoll.ir.program import Call, Node, Program, Transfer
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol.translation.shardings import tiling_of_param

_CONTROL = "!ifrt.control"
_ARRAY_TYPE = re.compile(
    r"!ifrt\.array<(?P<tensor>tensor<.*>), #ifrt\.(?P<sharding>.*), \[(?P<devices>[\d, ]*)\]"
    r'(?:, memory_kind = "(?P<kind>[^"]*)")?(?:, layout = "(?P<layout>[^"]*)")?>'
)
_PARAM = re.compile(
    r"sharding_param<(?P<counts>[\dx]*) ?to \[(?P<permutation>[\d, ]*)\] on (?P<sizes>[\dx]+)(?P<rest>.*)>"
)
# The passes that lower this module load the dialect into the context.
_EMPTY = 'module { func.func @main() attributes {topology = #mpmd.topology<<"m": <["x"=1]>>>} { return } }'
_DEFAULT_LAYOUTS = (None, "default", "auto")
_SUPPORTED = "the operations ifrt.Call, ifrt.CopyArrays and ifrt.Reshard are supported"


def read_outline(program: bytes) -> Outline:
    """Read a program. Call this in an MLIR context. Raise INVALID_ARGUMENT or UNIMPLEMENTED."""
    module = _parse(program)
    return _Reader(_main(module), ir.StringAttr(module.operation.attributes["sym_name"]).value).outline()


def read_fragment(program: bytes, name: str, mesh: str) -> bytes:
    """Return the module of a fragment as MLIR bytecode. Call this in an MLIR context. Raise INVALID_ARGUMENT."""
    for operation in _parse(program).body.operations:
        if operation.operation.name == "builtin.module" and _symbol(operation) == name:
            attributes = operation.operation.attributes
            attributes["sym_name"] = ir.StringAttr.get(f"{name}_mesh_{mesh}")
            if "sym_visibility" in attributes:
                del attributes["sym_visibility"]
            written = io.BytesIO()
            operation.operation.write_bytecode(written)
            return written.getvalue()
    raise invalid(f"the program has no fragment {name[:200]!r}")


def _parse(program: bytes) -> Any:
    import_mpmd().lower_to_ifrt(ir.Module.parse(_EMPTY))
    try:
        return ir.Module.parse(program)
    except (ir.MLIRError, ValueError) as error:
        raise invalid(f"cannot parse the IFRT IR program: {str(error)[:500]}") from None


def _main(module: Any) -> Any:
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and "ifrt.function" in operation.operation.attributes:
            return operation
    raise invalid("the IFRT IR program has no function with the attribute ifrt.function")


def _symbol(operation: Any) -> str:
    attributes = operation.operation.attributes
    return str(ir.StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else ""


class _Reader:
    """Reads one function. Values are numbered as in `ir.program`."""

    def __init__(self, main: Any, name: str) -> None:
        self._main = main
        self._name = name
        self._numbers: dict[Any, int] = {}
        self._specs: dict[str, ArraySpec] = {}
        self._of_value: list[ArraySpec] = []
        self._fragments: dict[Fragment, int] = {}
        self._nodes: list[Node] = []
        self._results: tuple[int, ...] = ()
        self._kept: set[int] = set()  # arguments that a run must not consume

    def outline(self) -> Outline:
        block = self._main.regions[0].blocks[0]
        attributes = self._main.operation.attributes
        marks = list(attributes["arg_attrs"]) if "arg_attrs" in attributes else [{}] * len(block.arguments)
        for argument in block.arguments:
            self._define(argument)
        arguments = tuple(self._of_value)
        donated = tuple(i for i, each in enumerate(marks) if "ifrt.donated" in each)
        self._kept = set(range(len(arguments))) - set(donated)
        for operation in block.operations:
            read = _OPERATIONS.get(operation.operation.name)
            if read is None:
                raise unimplemented(f"{operation.operation.name} is not supported in an IFRT IR program: {_SUPPORTED}")
            read(self, operation)
        program = Program(self._name, arguments, tuple(self._nodes), self._results)
        return Outline(program, tuple(self._fragments), donated)

    def call(self, operation: Any) -> None:
        attributes = operation.attributes
        path = ir.SymbolRefAttr(attributes["callee"]).value
        if len(path) != 2:
            raise unimplemented(f"ifrt.Call of {'::'.join(path)[:200]}: call the main function of a module")
        devices = tuple(map(int, re.findall(r"\d+", str(attributes["devices"]))))
        mesh = (
            ir.StringAttr(attributes["ifrt.mesh_name"]).value
            if "ifrt.mesh_name" in attributes
            else "_".join(map(str, devices))
        )
        fragment = Fragment(path[0], mesh, devices)
        number = self._fragments.setdefault(fragment, len(self._fragments))
        inputs = self._inputs(operation)
        donated = set(ir.DenseI32ArrayAttr(attributes["donated_input_indices"]))
        donated |= {ir.DenseI32ArrayAttr(pair)[0] for pair in ir.ArrayAttr(attributes["io_aliases"])}
        if not all(0 <= each < len(inputs) for each in donated):
            raise invalid(f"{path[0][:200]} donates inputs that it does not have")
        may = tuple(sorted(each for each in donated if inputs[each] not in self._kept))
        self._add(operation, lambda outputs: Call(number, inputs, outputs, devices, may))

    def transfer(self, operation: Any) -> None:
        inputs = self._inputs(operation)
        attributes = operation.attributes
        donate = "donated" in attributes and ir.BoolAttr(attributes["donated"]).value and self._kept.isdisjoint(inputs)
        self._add(operation, lambda outputs: Transfer(inputs, outputs, donate, reshard=True))

    def after(self, operation: Any) -> None:
        """Ignore the operation: devices run the nodes of a program in its order."""

    def finish(self, operation: Any) -> None:
        """Read the results. Copy an argument or a repeated result, because a program returns only new arrays."""
        count = len(self._main.regions[0].blocks[0].arguments)
        results: list[int] = []
        for value in self._inputs(operation):
            if value < count or value in results:
                spec = self._of_value[value]
                self._nodes.append(Transfer((value,), (spec,), reshard=True))
                value = len(self._of_value)
                self._of_value.append(spec)
            results.append(value)
        self._results = tuple(results)

    def _add(self, operation: Any, make: Callable[[tuple[ArraySpec, ...]], Node]) -> None:
        outputs = [self._define(each) for each in operation.results if str(each.type) != _CONTROL]
        self._nodes.append(make(tuple(outputs)))

    def _define(self, value: Any) -> ArraySpec:
        spec = self._spec(str(value.type))
        self._numbers[value] = len(self._of_value)
        self._of_value.append(spec)
        return spec

    def _inputs(self, operation: Any) -> tuple[int, ...]:
        arrays = [each for each in operation.operands if str(each.type) != _CONTROL]
        return tuple(self._numbers[each] for each in arrays)

    def _spec(self, text: str) -> ArraySpec:
        spec = self._specs.get(text)
        if spec is None:
            spec = self._specs[text] = _spec_of(text)
        return spec


_OPERATIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "ifrt.Call": _Reader.call,
    "ifrt.CopyArrays": _Reader.transfer,
    "ifrt.Reshard": _Reader.transfer,
    "ifrt.After": _Reader.after,
    "func.return": _Reader.finish,
}


def _spec_of(text: str) -> ArraySpec:
    """Read an array type."""
    found = _ARRAY_TYPE.fullmatch(text)
    if found is None:
        raise unimplemented(f"arrays of the type {text[:200]} are not supported")
    param = _PARAM.fullmatch(found["sharding"])
    if param is None or param["rest"]:
        raise unimplemented(f"arrays with the sharding #ifrt.{found['sharding'][:200]} are not supported")
    if found["layout"] not in _DEFAULT_LAYOUTS:
        raise unimplemented(f"arrays with the layout {found['layout'][:100]} are not supported in an IFRT IR program")
    try:
        dtype, shape = shard_type(ir.Type.parse(found["tensor"]))
    except StatusError:
        raise unimplemented(f"arrays of the type {found['tensor'][:100]} are not supported") from None
    devices = _numbers(found["devices"], ",")
    tiling = tiling_of_param(
        len(devices),
        shape,
        _numbers(param["counts"], "x"),
        _numbers(param["permutation"], ","),
        _numbers(param["sizes"], "x"),
    )
    return ArraySpec(dtype, shape, Sharding(devices, tiling, found["kind"] or ""))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(separator) if each)
