"""Lets XLA call the user's Python while a host compiles a program.

`custom_partitioning` and `jax.debug.inspect_array_sharding` put a key into the program, which identifies an object of
this process: the address of a function, or a number. A worker does not have that object. Therefore this process keeps a
callable for each key in its `ClientChannel`, and sends the keys and the callables' numbers in an option of the
compile request, which the proxy removes again. The program is not changed.

The transformations of HLO modules that the user has registered with JAX (`jax.extend.xla`) work in the same way: JAX
registers them with this process's compiler and clients, but hosts compile programs for Atoll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from atoll.client.jax_patches.compile_pipeline import Compile, CompilePass, CompileRequest
from atoll.client.jax_patches.compiling_thread import CompilingThread, Decide, answering
from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.errors import invalid
from atoll.protocol.callbacks import (
    COMPILE_CALLS_OPTION,
    CUSTOM_PARTITIONING,
    INSPECT_SHARDING,
    TRANSFORMATION,
    CompileAnswer,
    CompileCall,
    Infer,
    Inspect,
    Propagate,
    Transform,
    Value,
)
from atoll.protocol.translation.xla_objects import portable_artifact, sharding_from_bytes, sharding_to_bytes

# The callbacks of `inspect_array_sharding` by their keys. JAX keeps a callback as long as its programs.
_inspections: WeakValueDictionary[bytes, Any] = WeakValueDictionary()
# JAX's functions that answer XLA, by name.
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


def _serve(request: CompileRequest, compile_: Compile) -> Any:
    """Compile on another thread, and answer XLA's calls on this one."""
    decisions = _decisions(request.module) | _transformations(request.backend.platform)
    if not decisions:
        return compile_(request)
    thread = CompilingThread()
    numbers = CLIENT_CHANNEL.add(request.backend, [answering(thread, decide) for decide in decisions.values()])
    keys = ",".join(key.hex() for key in decisions)
    announced = request.with_option(COMPILE_CALLS_OPTION, f"{numbers[0]}:{keys}")
    try:
        return thread.compile(lambda: compile_(announced))
    except BaseException:
        CLIENT_CHANNEL.remove(numbers)
        raise


def _decisions(module: Any) -> dict[bytes, Decide]:
    """Return the functions that answer the program's custom calls, by key."""
    from jax._src import custom_partitioning
    from jax._src.lib.mlir import ir

    partitionings = custom_partitioning._sharding_callbacks
    if not _inspections and not partitionings:  # the common case: no need to search the program
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
        if callback is not None:  # otherwise the key is of another process, and the worker refuses it
            found[key] = _inspecting(callback) if target == INSPECT_SHARDING else _partitioning(key, callback)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _inspecting(callback: Callable[[Any], Any]) -> Decide:
    def decide(call: CompileCall) -> CompileAnswer:
        if not isinstance(call, Inspect):
            raise invalid("the callback of inspect_array_sharding received a request of another kind")
        callback(sharding_from_bytes(call.sharding))
        return CompileAnswer()

    return decide


def _partitioning(key: bytes, kept: Any) -> Decide:
    """Answer with JAX's rules, which look up `kept` by `key`. The closure keeps it alive."""

    def decide(call: CompileCall) -> CompileAnswer:
        _ = kept
        if isinstance(call, Propagate):
            propagate = _rules["_custom_partitioning_propagate_user_sharding"]
            return CompileAnswer(sharding_to_bytes(propagate(*reversed(_value(call.result)), key)))
        if isinstance(call, Inspect | Transform):
            raise invalid("a custom partitioning received a sharding to inspect, or a module")
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


_Callback = Callable[[bytes], bytes | None]
_Registered = dict[tuple[int, str], _Callback]  # by stage and name, in the order in which XLA calls them

_for_cpus: _Registered = {}
_for_clients: _Registered = {}  # registered with Atoll's client


def _transformations(platform: str) -> dict[bytes, Decide]:
    """Return the transformations for Atoll's devices of `platform`, by key."""
    registered = _for_cpus | _for_clients if platform == "cpu" else _for_clients
    return {
        b"%s:%d:%s" % (TRANSFORMATION, stage, name.encode()): _transforming(callback)
        for (stage, name), callback in registered.items()
    }


def _transforming(callback: _Callback) -> Decide:
    def decide(call: CompileCall) -> CompileAnswer:
        if not isinstance(call, Transform):
            raise invalid("a transformation of modules received a request of another kind")
        return CompileAnswer(program=callback(call.module) or b"")

    return decide


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_xla_transform(name: str, stage: int, callback: _Callback) -> Any:
        done = register(name, stage, callback)
        _for_cpus[stage, name] = callback
        return done

    return register_xla_transform


def _registering_for_clients(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_xla_transform_c_api(client: Any, name: str, stage: int, callback: _Callback) -> Any:
        if not _is_atolls_client(client):
            return register(client, name, stage, callback)
        _for_clients[stage, name] = callback
        return None

    return register_xla_transform_c_api


def _clearing(clear: Callable[..., bool]) -> Callable[..., bool]:
    def clear_xla_transform(name: str, stage: int) -> bool:
        _for_cpus.pop((stage, name), None)
        return clear(name, stage)

    return clear_xla_transform


def _clearing_for_clients(clear: Callable[..., bool]) -> Callable[..., bool]:
    def clear_xla_transform_c_api(client: Any, name: str, stage: int) -> bool:
        if not _is_atolls_client(client):
            return clear(client, name, stage)
        return _for_clients.pop((stage, name), None) is not None

    return clear_xla_transform_c_api


def _finding_clients(find: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return Atoll's client in place of a PjRt plug-in, which Atoll's platforms do not have."""

    def get_pjrt_plugin(platform_name: str) -> Any:
        from jax._src import xla_bridge

        client = xla_bridge.backends().get(platform_name)
        return client if _is_atolls_client(client) else find(platform_name)

    return get_pjrt_plugin


def _is_atolls_client(found: Any) -> bool:
    return hasattr(found, "runtime_type") and is_atoll(found)


PATCH = Patch(
    name="callbacks at compile time",
    enables="`custom_partitioning` and `jax.debug.inspect_array_sharding` inside `jax.jit`",
    error="this program calls back into the client's Python while XLA compiles it",
    changes=(
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
        CompilePass("callbacks at compile time", _serve),
    ),
)

MODULE_PATCH = Patch(
    name="transformations of modules",
    enables="transformations of HLO modules on CPU devices (`jax.extend.xla`)",
    changes=(
        Replacement("jaxlib._xla", "register_xla_transform", _registering, ("name", "stage", "callback")),
        Replacement("jaxlib._xla", "clear_xla_transform", _clearing, ("name", "stage")),
    ),
)

# For transformations that are registered before a client exists, or for devices other than CPUs.
CLIENT_PATCH = Patch(
    name="transformations of modules for clients",
    enables="transformations of HLO modules that are registered for a client (`jax.extend.xla`)",
    changes=(
        Replacement(
            "jaxlib._xla",
            "register_xla_transform_c_api",
            _registering_for_clients,
            ("client", "name", "stage", "callback"),
        ),
        Replacement("jaxlib._xla", "clear_xla_transform_c_api", _clearing_for_clients, ("client", "name", "stage")),
    ),
    before=(0, 11),
)

# Later versions of JAX register with the PjRt plug-ins of all platforms instead of their clients.
PLUGIN_PATCH = Patch(
    name="transformations of modules for plug-ins",
    enables="transformations of HLO modules that are registered for all platforms (`jax.extend.xla`)",
    error="PJRT_Api is not initialized",
    changes=(
        Replacement("jaxlib._jax", "get_pjrt_plugin", _finding_clients, ("platform_name",)),
        Replacement(
            "jaxlib._xla",
            "register_xla_transform_c_api",
            _registering_for_clients,
            ("c_api", "name", "stage", "callback"),
        ),
        Replacement("jaxlib._xla", "clear_xla_transform_c_api", _clearing_for_clients, ("c_api", "name", "stage")),
    ),
    since=(0, 11),
)
