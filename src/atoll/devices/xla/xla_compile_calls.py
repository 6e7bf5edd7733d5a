"""Questions that XLA asks a program's client while it compiles the program.

`inspect_array_sharding`, `custom_partitioning` and registered transformations of HLO modules call the client's Python.
The custom calls contain keys of the client's process. This module replaces the keys that the client has announced:
by the address of a function of this process, or by a target and a number that this process has chosen. Invariant: XLA
follows no address that a client has sent, and gets no answer of a client that would make it end this process.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from atoll.decodable import decodable
from atoll.devices.compilers.compiler_messages import RenamedTarget
from atoll.devices.xla.client_callbacks import PARTITIONING, find
from atoll.errors import StatusError, invalid, unimplemented
from atoll.host_services.calls.client_calls import ClientError, wrapped
from atoll.protocol.callbacks import (
    COMPILE_CALL_ADVICE,
    INSPECT_SHARDING,
    TRANSFORMATION,
    CompileAnswer,
    CompileCall,
    Infer,
    Inspect,
    Partition,
    Propagate,
    Transform,
    Value,
)
from atoll.protocol.translation.xla_objects import sharding_from_bytes, sharding_to_bytes


class AskedClient(Protocol):
    """The client of a compilation, with the `keys` of the callables that it has announced."""

    @property
    def keys(self) -> tuple[bytes, ...]: ...

    def ask(self, key: bytes, request: bytes) -> bytes:
        """Call the callable of `key`, and return its answer. Blocks.

        Raises ClientError if the callable raises, and StatusError if there is no answer.
        """


_answers: msgspec.msgpack.Decoder[CompileAnswer] = msgspec.msgpack.Decoder(decodable(CompileAnswer))


class Questions:
    """The calls of one compilation.

    `ask` sends the key of a custom call and the bytes of a request to the client, and returns the answer's bytes.
    """

    def __init__(self, ask: Callable[[bytes, bytes], bytes]) -> None:
        self._ask = ask
        self._asked: Counter[bytes] = Counter()

    def ask(self, key: bytes, call: CompileCall) -> CompileAnswer:
        """Make a call and wait for the answer. Raise INVALID_ARGUMENT if the answer is invalid."""
        digest = hashlib.sha256(key + msgspec.msgpack.encode(call)).digest()
        self._asked[digest] += 1
        numbered = msgspec.structs.replace(call, occurrence=self._asked[digest])
        try:
            return _answers.decode(self._ask(key, msgspec.msgpack.encode(numbered)))
        except msgspec.MsgspecError as error:
            raise invalid(f"the answer of a callback of a compilation is invalid: {error}") from None


class CompileCalls:
    """The questions of one compilation for `devices` devices. It must exist until XLA has compiled the program.

    The programs in answers may also call `targets`.
    """

    def __init__(self, client: AskedClient | None, devices: int, targets: Sequence[RenamedTarget] = ()) -> None:
        self._targets = targets
        self._keys = client.keys if client is not None else ()
        self._devices = devices
        if client is not None:
            self._questions = Questions(client.ask)
        self._transformations = [key for key in self._keys if key.startswith(TRANSFORMATION)]
        self._mark = b""
        self._partitionings: list[bytes] = []
        self._inspections: list[Callable[[Any], None]] = []  # XLA only has their addresses
        self.error: Exception | None = None  # raised by a callback in which XLA does not accept errors
        self._number = next(_numbers)
        _compilations[self._number] = self

    def replace(self, operation: Any, target: str) -> None:
        """Make a custom call of a client call this object. Raises UNIMPLEMENTED for a key that was not announced."""
        config = operation.attributes.get("backend_config", None)
        key = bytes(config.value_bytes) if isinstance(config, ir.StringAttr) else b""
        if key not in self._keys:
            raise unimplemented(COMPILE_CALL_ADVICE)
        types = [[each.type for each in values] for values in (operation.operands, operation.results)]
        if not all(isinstance(each, ir.RankedTensorType) and each.has_static_shape for each in (*types[0], *types[1])):
            raise invalid(f"{target} only takes and returns arrays of static shapes")
        if target == INSPECT_SHARDING and (len(types[0]) != 1 or types[0] != types[1]):
            raise invalid(f"{target} takes one array and returns it, not {len(types[0])} arrays for {len(types[1])}")
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
        """Mark the module as this compilation's, if the client has announced transformations."""
        if self._transformations:
            self._mark = _mark(module)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A context in which XLA compiles the program. At its end, it raises the error of a failed question."""
        try:
            if self._transformations:
                with _transforming(self._transformations, self._questions, self._mark, self._keep):
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

    # ---- XLA's partitioner. XLA ends the process if `propagate` or `infer` raises, so they store errors in `error`.

    def propagate(self, position: int, sharding: Any, shape: Any) -> Any:
        """Return the result's sharding, given the sharding that the consumer of the result requests."""
        try:
            call = Propagate(_value(shape, sharding))
            wanted = self._result(self._questions.ask(self._partitionings[position], call), shape)
            return sharding if wanted is None else wanted
        except Exception as error:
            self._keep(error)
            return sharding

    def infer(self, position: int, shapes: Sequence[Any], shardings: Sequence[Any], shape: Any) -> Any:
        """Return the result's sharding, given the operands' shardings; None to leave it open."""
        try:
            operands = tuple(map(_value, shapes, shardings))
            return self._result(
                self._questions.ask(self._partitionings[position], Infer(operands, _value(shape))), shape
            )
        except Exception as error:
            self._keep(error)
            return None

    def _keep(self, error: Exception, of: str = "custom_partitioner: ") -> None:
        if self.error is None:  # JAX shows the same text if a partitioning itself raises
            self.error = RuntimeError(f"INTERNAL: {of}{error}") if isinstance(error, ClientError) else error

    def partition(
        self, position: int, shapes: Sequence[Any], shardings: Sequence[Any], shape: Any, sharding: Any
    ) -> tuple[bytes, list[Any], Any]:
        """Return the program of a device, with the shardings of its operands and its result."""
        try:
            if self.error is not None:
                raise self.error
            operands = tuple(map(_value, shapes, shardings))
            answer = self._questions.ask(self._partitionings[position], Partition(operands, _value(shape, sharding)))
            if len(answer.operands) != len(shapes):
                raise invalid(
                    f"a custom partitioning of {len(shapes)} operands has returned {len(answer.operands)} shardings"
                )
            given = self._result(answer, shape)
            if given is None:
                raise invalid("a custom partitioning has returned no sharding for its result")
            wanted = [self._sharding(each, of) for each, of in zip(answer.operands, shapes, strict=True)]
            parameters = [each.tile(of) for each, of in zip(wanted, shapes, strict=True)]
            program = _checked(answer.program, parameters, _tiles(given, shape), self._targets)
            return program, wanted, given
        except (ClientError, StatusError) as error:
            raise wrapped(error) from None

    def _result(self, answer: CompileAnswer, shape: Any) -> Any:
        return None if answer.result is None else self._sharding(answer.result, shape)

    def _sharding(self, proto: bytes, shape: Any) -> Any:
        """Parse a sharding. Raises INVALID_ARGUMENT if it does not fit `shape`: XLA would end this process."""
        # Imported late: few programs need protobuf here, and it would delay the start of each worker.
        from atoll.protocol.ifrt import xla_pb2
        from atoll.protocol.translation.codec import parse
        from atoll.protocol.translation.shardings import check_parts

        shapes = [tuple(each.dimensions()) for each in _elements(shape)]
        check_parts(parse(xla_pb2.OpSharding, proto), self._devices, shapes)
        return sharding_from_bytes(proto)


def _elements(shape: Any) -> list[Any]:
    return list(shape.tuple_shapes()) if shape.is_tuple() else [shape]


def _tiles(sharding: Any, shape: Any) -> list[Any]:
    """Return the shapes of the parts of `shape`."""
    shardings = sharding.tuple_elements() if shape.is_tuple() else [sharding]
    return [each.tile(of) for each, of in zip(shardings, _elements(shape), strict=True)]


def _value(shape: Any, sharding: Any = None) -> Value:
    return Value(str(shape), None if sharding is None else sharding_to_bytes(sharding))


def _checked(
    program: bytes, parameters: Sequence[Any], results: Sequence[Any], targets: Sequence[RenamedTarget]
) -> bytes:
    """Check that `main` in a portable artifact has these types. Return the module as bytecode for XLA."""
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        module = _jax.mlir.deserialize_portable_artifact(program, context)
        find(program, module, 0, targets=targets)
        # Other operations, such as Shardy's meshes, may be beside the functions.
        functions = [each for each in module.body.operations if _is_main(each)]
        wanted = [[_type(each) for each in types] for types in (parameters, results)]
        for function in functions:
            found = [list(function.type.inputs), list(function.type.results)]
            if found != wanted:
                raise invalid(f"a custom partitioning computes {function.type}, not {wanted[0]} -> {wanted[1]}")
        if not functions:
            raise invalid("the program of a custom partitioning has no function main")
        return bytes(mlir.module_to_bytecode(module))


def _is_main(operation: Any) -> bool:
    return bool(operation.operation.name == "func.func" and operation.attributes["sym_name"].value == "main")


def _type(shape: Any) -> Any:
    return ir.RankedTensorType.get(shape.dimensions(), mlir.dtype_to_ir_type(shape.numpy_dtype()))


# ---- callbacks of XLA's partitioner, which find a compilation by its number

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
    """Register the partitioner with XLA. Its target differs from JAX's, because XLA keeps the first partitioner."""
    xc.register_custom_call_partitioner(
        PARTITIONING, _propagate, _partition, _infer, can_side_effecting_have_replicated_sharding=True
    )


# ---- transformations of HLO modules, which a client has registered with JAX (`jax.extend.xla`)

# XLA calls everything that its process has registered, for all modules that it compiles, on its own threads. Therefore
# a transformation is only registered while its client's program is compiled, and skips modules without a mark. Its
# result must have the type of the original module, because the worker relies on that type.

_STAGES = (0, 1)  # JAX's PipelineStage
_ATTRIBUTES = "mhlo.frontend_attributes"  # XLA copies them to its modules


def _mark(module: Any) -> bytes:
    """Mark the module. Return bytes that only its HLO form contains."""
    text = secrets.token_hex(16)
    attributes = module.operation.attributes
    before = attributes.get(_ATTRIBUTES, ())
    marked = {each.name: each.attr for each in before} | {"atoll_compilation": ir.StringAttr.get(text)}
    attributes[_ATTRIBUTES] = ir.DictAttr.get(marked)
    return text.encode()


@contextmanager
def _transforming(
    keys: Sequence[bytes], questions: Questions, marked: bytes, keep: Callable[[Exception, str], None]
) -> Iterator[None]:
    """Register the transformations for the program that is `marked`. `keep` gets their errors instead of XLA."""

    def transform(key: bytes, module: bytes) -> bytes | None:
        if marked not in module:
            return None
        try:
            changed = questions.ask(key, Transform(module)).program
            return _check_transformed(changed, module) if changed else None
        except Exception as error:
            keep(error, "")
            return None

    from jaxlib import _xla

    with ExitStack() as stack:
        for key in keys:
            stage, name = _parsed(key)
            own = f"{name} {marked.decode()}"
            _xla.register_xla_transform(own, stage, partial(transform, key))
            stack.callback(_xla.clear_xla_transform, own, stage)
        yield


def _parsed(key: bytes) -> tuple[int, str]:
    _, stage, name = [*key.decode(errors="replace").split(":", 2), "", ""][:3]
    if stage not in map(str, _STAGES):
        raise invalid(f"{key[:100]!r} is not the key of a transformation")
    return int(stage), name


def _check_transformed(changed: bytes, module: bytes) -> bytes:
    shapes = [str(xc.XlaComputation(each).program_shape()) for each in (module, changed)]
    if shapes[0] != shapes[1]:
        raise invalid(f"a transformation has changed the type of a module from {shapes[0]} to {shapes[1]}")
    return changed
