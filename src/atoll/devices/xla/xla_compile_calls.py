"""What XLA asks a program's client while it compiles the program: shardings, and the parts of custom calls.

The custom calls that ask hold keys of the client's process. Those that the client has announced are replaced, in the
module that is compiled, by such as this process answers: for `inspect_array_sharding` the address of a function of this
process, for `custom_partitioning` a target and a number of its own. Invariant: XLA follows no address of a client's,
and is given nothing of a client's that it would end this process over.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from atoll.devices.xla.client_callbacks import PARTITIONING, find
from atoll.devices.xla.xla_transformations import mark, transforming
from atoll.errors import StatusError, invalid, unimplemented
from atoll.host_services.calls.client_calls import ClientError
from atoll.host_services.calls.client_compile_calls import Questions
from atoll.host_services.calls.client_errors import wrapped
from atoll.protocol.advice import COMPILE_CALL_ADVICE
from atoll.protocol.compile_calls import (
    INSPECT_SHARDING,
    TRANSFORMATION,
    CompileAnswer,
    Infer,
    Inspect,
    Partition,
    Propagate,
    Value,
)
from atoll.protocol.translation.xla_objects import sharding_from_bytes, sharding_to_bytes


class AskedClient(Protocol):
    """The client that a compilation asks: the `keys` that it has announced, and a way to call the callable of a key."""

    @property
    def keys(self) -> tuple[bytes, ...]: ...

    def ask(self, key: bytes, request: bytes) -> bytes:
        """Return the answer. Blocks. Raises ClientError if the callable raises, and StatusError without an answer."""


class CompileCalls:
    """Those of one compilation, over `devices` devices. Keep it until XLA has compiled."""

    def __init__(self, client: AskedClient | None, devices: int) -> None:
        self._keys = client.keys if client is not None else ()
        self._devices = devices
        if client is not None:
            self._questions = Questions(client.ask)
        self._transformations = [key for key in self._keys if key.startswith(TRANSFORMATION)]
        self._mark = b""
        self._partitionings: list[bytes] = []
        self._inspections: list[Callable[[Any], None]] = []  # XLA has their addresses
        self.error: Exception | None = None  # of a call where XLA takes none
        self._number = next(_numbers)
        _compilations[self._number] = self

    def replace(self, operation: Any, target: str) -> None:
        """Has a custom call of a client ask this object. Raises UNIMPLEMENTED for a key that was not announced."""
        config = operation.attributes.get("backend_config", None)
        key = bytes(config.value_bytes) if isinstance(config, ir.StringAttr) else b""
        if key not in self._keys:
            raise unimplemented(COMPILE_CALL_ADVICE)
        types = [[each.type for each in values] for values in (operation.operands, operation.results)]
        if not all(isinstance(each, ir.RankedTensorType) and each.has_static_shape for each in (*types[0], *types[1])):
            raise invalid(f"{target} of what is no array")
        if target == INSPECT_SHARDING and (len(types[0]) != 1 or types[0] != types[1]):
            raise invalid(f"{target} of {len(types[0])} arrays for {len(types[1])}")
        if target == INSPECT_SHARDING:
            inspect = self._inspecting(key)
            self._inspections.append(inspect)
            operation.attributes["backend_config"] = ir.StringAttr.get(xc.encode_inspect_sharding_callback(inspect))
            return
        self._partitionings.append(key)
        number = f"{self._number}:{len(self._partitionings) - 1}"
        operation.attributes["call_target_name"] = ir.StringAttr.get(PARTITIONING)
        operation.attributes["backend_config"] = ir.StringAttr.get(number)

    def mark(self, module: Any) -> None:
        """Makes the module known as this compilation's, where XLA asks for more than its custom calls."""
        if self._transformations:
            self._mark = mark(module)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While XLA compiles. Raises what has failed, and keeps what XLA has addresses of."""
        try:
            if self._transformations:
                with transforming(self._transformations, self._questions, self._mark, self._keep):
                    yield
            else:
                yield
        finally:
            if self.error is not None:
                raise self.error

    def _inspecting(self, key: bytes) -> Callable[[Any], None]:
        def inspect(sharding: Any) -> None:
            try:
                self._questions.ask(key, Inspect(sharding_to_bytes(sharding)))
            except (ClientError, StatusError) as error:
                raise wrapped(error) from None

        return inspect

    # ---- XLA's partitioner. XLA ends the process where `propagate` or `infer` raises: the error waits in `error`.

    def propagate(self, position: int, sharding: Any, shape: Any) -> Any:
        """The result's sharding for the one that its user wants."""
        try:
            call = Propagate(_value(shape, sharding))
            wanted = self._result(self._questions.ask(self._partitionings[position], call), shape)
            return sharding if wanted is None else wanted
        except Exception as error:
            self._keep(error)
            return sharding

    def infer(self, position: int, shapes: Sequence[Any], shardings: Sequence[Any], shape: Any) -> Any:
        """The result's sharding by the operands', or None."""
        try:
            operands = tuple(map(_value, shapes, shardings))
            return self._result(
                self._questions.ask(self._partitionings[position], Infer(operands, _value(shape))), shape
            )
        except Exception as error:
            self._keep(error)
            return None

    def _keep(self, error: Exception, of: str = "custom_partitioner: ") -> None:
        if self.error is None:  # the text is what JAX shows where a partitioning itself raises
            self.error = RuntimeError(f"INTERNAL: {of}{error}") if isinstance(error, ClientError) else error

    def partition(
        self, position: int, shapes: Sequence[Any], shardings: Sequence[Any], shape: Any, sharding: Any
    ) -> tuple[bytes, list[Any], Any]:
        """The program of a device, with the shardings of its operands and of its result."""
        try:
            if self.error is not None:
                raise self.error
            operands = tuple(map(_value, shapes, shardings))
            answer = self._questions.ask(self._partitionings[position], Partition(operands, _value(shape, sharding)))
            if len(answer.operands) != len(shapes):
                raise invalid(f"a partitioning of {len(shapes)} operands has shardings for {len(answer.operands)}")
            given = self._result(answer, shape)
            if given is None:
                raise invalid("a partitioning without a sharding of its result")
            wanted = [self._sharding(each, of) for each, of in zip(answer.operands, shapes, strict=True)]
            parameters = [each.tile(of) for each, of in zip(wanted, shapes, strict=True)]
            return _checked(answer.program, parameters, _tiles(given, shape)), wanted, given
        except (ClientError, StatusError) as error:
            raise wrapped(error) from None

    def _result(self, answer: CompileAnswer, shape: Any) -> Any:
        return None if answer.result is None else self._sharding(answer.result, shape)

    def _sharding(self, proto: bytes, shape: Any) -> Any:
        """Raises INVALID_ARGUMENT for one that does not fit: XLA would end this process over it."""
        # Few programs need protobuf here, and each worker would start later for it.
        from atoll.protocol.ifrt import xla_pb2
        from atoll.protocol.translation.codec import parse
        from atoll.protocol.translation.shardings import check_parts

        shapes = [tuple(each.dimensions()) for each in _elements(shape)]
        check_parts(parse(xla_pb2.OpSharding, proto), self._devices, shapes)
        return sharding_from_bytes(proto)


def _elements(shape: Any) -> list[Any]:
    return list(shape.tuple_shapes()) if shape.is_tuple() else [shape]


def _tiles(sharding: Any, shape: Any) -> list[Any]:
    """The shapes of the parts."""
    shardings = sharding.tuple_elements() if shape.is_tuple() else [sharding]
    return [each.tile(of) for each, of in zip(shardings, _elements(shape), strict=True)]


def _value(shape: Any, sharding: Any = None) -> Value:
    return Value(str(shape), None if sharding is None else sharding_to_bytes(sharding))


def _checked(program: bytes, parameters: Sequence[Any], results: Sequence[Any]) -> bytes:
    """A portable artifact whose function has these types, as XLA reads it: XLA puts it in place of the custom call."""
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        module = _jax.mlir.deserialize_portable_artifact(program, context)
        find(program, module, 0)
        functions = [each for each in module.body.operations if each.name.value == "main"]
        wanted = [[_type(each) for each in types] for types in (parameters, results)]
        for function in functions:
            found = [list(function.type.inputs), list(function.type.results)]
            if found != wanted:
                raise invalid(f"a custom partitioning computes {function.type}, not {wanted[0]} -> {wanted[1]}")
        if not functions:
            raise invalid("a custom partitioning without a function main")
        return bytes(mlir.module_to_bytecode(module))


def _type(shape: Any) -> Any:
    return ir.RankedTensorType.get(shape.dimensions(), mlir.dtype_to_ir_type(shape.numpy_dtype()))


# ---- XLA's side: it finds a compilation by its number

_compilations: weakref.WeakValueDictionary[int, CompileCalls] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _find(config: bytes) -> tuple[CompileCalls, int]:
    number, _, position = config.partition(b":")
    return _compilations[int(number)], int(position)


def _propagate(sharding: Any, shape: Any, config: bytes) -> Any:
    calls, position = _find(config)
    return calls.propagate(position, sharding, shape)


def _partition(shapes: Any, shardings: Any, shape: Any, sharding: Any, config: bytes) -> Any:
    calls, position = _find(config)
    return calls.partition(position, shapes, shardings, shape, sharding)


def _infer(shapes: Any, shardings: Any, shape: Any, config: bytes) -> Any:
    calls, position = _find(config)
    return calls.infer(position, shapes, shardings, shape)


def register() -> None:
    """Has XLA ask. XLA keeps the first of each target, and JAX has registered its own for its target."""
    xc.register_custom_call_partitioner(
        PARTITIONING, _propagate, _partition, _infer, can_side_effecting_have_replicated_sharding=True
    )
