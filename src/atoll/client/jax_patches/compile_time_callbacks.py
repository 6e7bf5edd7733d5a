"""Lets XLA call the user's Python while it compiles: `custom_partitioning`, `jax.debug.inspect_array_sharding`.

JAX puts a key into the program, which stands for something of this process: the address of a function, or the number of
an object. A worker has neither. So what each key stands for is kept in the table of callables, and the keys go along
with their numbers in an option of the compile request, which the proxy takes out again. The program is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from atoll.client.jax_patches.host_callbacks import TABLE
from atoll.client.jax_patches.module_transformations import transformations
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import invalid
from atoll.host_services.calls import client_compile_calls
from atoll.host_services.calls.client_compile_calls import CompilingThread, Decide, answering
from atoll.protocol.compile_calls import (
    CUSTOM_PARTITIONING,
    INSPECT_SHARDING,
    CompileAnswer,
    CompileCall,
    Infer,
    Inspect,
    Propagate,
    Transform,
    Value,
)
from atoll.protocol.compile_options import COMPILE_CALLS_OPTION
from atoll.protocol.translation.xla_objects import portable_artifact, sharding_from_bytes, sharding_to_bytes

# What is shown a sharding, by what stands for it in programs. JAX keeps it as long as these.
_inspections: WeakValueDictionary[bytes, Any] = WeakValueDictionary()
# JAX's functions that answer XLA, by their names.
_rules: dict[str, Callable[..., Any]] = {}


def _recording(encode: Callable[..., bytes]) -> Callable[..., bytes]:
    def encode_inspect_sharding_callback(callback: Any) -> bytes:
        key = encode(callback)
        _inspections[key] = callback
        return key

    return encode_inspect_sharding_callback


def _known(rule: Callable[..., Any]) -> Callable[..., Any]:
    _rules[rule.__name__] = rule
    return lambda *arguments: rule(*arguments)


def _serving(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client.jax_internals import leave_out_of_tracebacks

    for file in (__file__, str(client_compile_calls.__file__)):
        leave_out_of_tracebacks(file)

    def backend_compile_and_load(
        backend: Any, module: Any, devices: Any, options: Any, *others: Any, **named: Any
    ) -> Any:
        decisions = _decisions(module) | transformations(backend.platform) if is_atoll(backend) else {}
        if not decisions:
            return compile_and_load(backend, module, devices, options, *others, **named)
        thread = CompilingThread()
        numbers = TABLE.add(backend, [answering(thread, decide) for decide in decisions.values()])
        try:
            with _announced(options, numbers[0], tuple(decisions)):
                return thread.compile(lambda: compile_and_load(backend, module, devices, options, *others, **named))
        except BaseException:
            TABLE.remove(numbers)
            raise

    return backend_compile_and_load


@contextmanager
def _announced(options: Any, first: int, keys: Sequence[bytes]) -> Iterator[None]:
    before = list(options.env_option_overrides)
    text = f"{first}:{','.join(key.hex() for key in keys)}"
    options.env_option_overrides = [*before, (COMPILE_CALLS_OPTION, text)]
    try:
        yield
    finally:
        options.env_option_overrides = before


def _decisions(module: Any) -> dict[bytes, Decide]:
    """What the program's custom calls call, by their keys."""
    from jax._src import custom_partitioning
    from jax._src.lib.mlir import ir

    partitionings = custom_partitioning._sharding_callbacks
    if not _inspections and not partitionings:  # as for most programs, which need not be searched
        return {}
    found: dict[bytes, Decide] = {}

    def visit(operation: Any) -> Any:
        if operation.name != "stablehlo.custom_call":
            return ir.WalkResult.ADVANCE
        target = operation.attributes["call_target_name"].value
        if target not in (INSPECT_SHARDING, CUSTOM_PARTITIONING):
            return ir.WalkResult.ADVANCE
        key = bytes(operation.attributes["backend_config"].value_bytes)
        callback = _inspections.get(key) if target == INSPECT_SHARDING else partitionings.get(key)
        if callback is not None:  # else it is another process's, and refused where it is compiled
            found[key] = _inspecting(callback) if target == INSPECT_SHARDING else _partitioning(key, callback)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


# ---- answers


def _inspecting(callback: Callable[[Any], Any]) -> Decide:
    def decide(call: CompileCall) -> CompileAnswer:
        if not isinstance(call, Inspect):
            raise invalid("a sharding that is to be inspected was asked for")
        callback(sharding_from_bytes(call.sharding))
        return CompileAnswer()

    return decide


def _partitioning(key: bytes, kept: Any) -> Decide:
    """By JAX's own rules, which find by `key` what is `kept` as long as they may be called."""

    def decide(call: CompileCall) -> CompileAnswer:
        _ = kept
        if isinstance(call, Propagate):
            propagate = _rules["_custom_partitioning_propagate_user_sharding"]
            return CompileAnswer(sharding_to_bytes(propagate(*reversed(_value(call.result)), key)))
        if isinstance(call, Inspect | Transform):
            raise invalid("a custom partitioning was given a sharding to inspect, or a module")
        operands = [_value(each) for each in call.operands]
        shapes, shardings = [shape for shape, _ in operands], [sharding for _, sharding in operands]
        result, result_sharding = _value(call.result)
        if isinstance(call, Infer):
            infer = _rules["_custom_partitioning_infer_sharding_from_operands"]
            return CompileAnswer(sharding_to_bytes(infer(shapes, shardings, result, key)))
        partition = _rules["_custom_partitioning_partition"]
        program, wanted, given = partition(shapes, shardings, result, result_sharding, key)
        return CompileAnswer(
            sharding_to_bytes(given), tuple(sharding_to_bytes(each) for each in wanted), portable_artifact(program)
        )

    return decide


def _value(value: Value) -> tuple[Any, Any]:
    from jax._src.lib import xla_client

    return xla_client.Shape(value.shape), None if value.sharding is None else sharding_from_bytes(value.sharding)


PATCH = Patch(
    name="callbacks at compile time",
    lifts="custom_partitioning and jax.debug.inspect_array_sharding inside of jit are refused",
    replacements=(
        Replacement("jaxlib.xla_client", "encode_inspect_sharding_callback", _recording, ("arg",)),
        Replacement(
            "jax._src.custom_partitioning",
            "_custom_partitioning_propagate_user_sharding",
            _known,
            ("user_sharding", "shape", "backend_string"),
        ),
        Replacement(
            "jax._src.custom_partitioning",
            "_custom_partitioning_infer_sharding_from_operands",
            _known,
            ("arg_shapes", "arg_shardings", "result_shape", "backend_string"),
        ),
        Replacement(
            "jax._src.custom_partitioning",
            "_custom_partitioning_partition",
            _known,
            ("arg_shapes", "arg_shardings", "result_shape", "result_sharding", "backend_string"),
        ),
        Replacement(
            "jax._src.compiler",
            "backend_compile_and_load",
            _serving,
            ("backend", "module", "executable_devices", "options"),
        ),
    ),
)
